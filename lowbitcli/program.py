"""What all commands have in common: exit codes, errors, signals, and how a command line is read."""

import functools
import math
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from lowbitcli import console
from lowbitcli.errors import UsageError
from lowbitcli.tensors import safe

EXIT_CODES = """\b
Exit codes:
  0    done
  1    verify found something wrong
  2    the command line makes no sense
  3    the recipe is wrong
  4    the source is malformed, unsupported or holds NaN or Inf
  5    reading or writing failed
  6    another run holds the output
  7    no such device, or it has too little memory
  70   a bug of lowbit
  130  interrupted (143: terminated)"""


class Terminated(KeyboardInterrupt):
    """SIGTERM: what cleans up after Ctrl-C cleans up after this too."""

    exit_code = 128 + signal.SIGTERM


def command(group: typer.Typer, name: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Register a function as a command whose errors are printed and become exit codes."""

    def register(function: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(function)
        def run(**options: Any) -> int:
            try:
                signal.signal(signal.SIGTERM, _terminate)  # before, there is nothing to clean up
                return function(**options)
            except typer.Exit:
                raise
            except BaseException as error:
                return console.report(error, as_json=options.get("as_json", False))

        group.command(name, epilog=EXIT_CODES)(run)
        return function

    return register


def help_unless_invoked(context: typer.Context) -> int:
    """Show the help of a group that was called without a command, which is a usage error."""
    if context.invoked_subcommand is not None:
        return 0
    console.data(context.get_help().splitlines())
    return 2


def one_of(context: typer.Context, **options: str | None) -> list[str | None]:
    """Return options that exclude each other; one from a variable yields to those of the command
    line."""
    told = [name for name, value in options.items() if value is not None]
    from_variable = {
        name
        for name in told
        if getattr(context.get_parameter_source(name), "name", "") == "ENVIRONMENT"
    }
    yields = from_variable if len(from_variable) < len(told) else set()
    return [None if name in yields else value for name, value in options.items()]


def device_or_devices(
    context: typer.Context, device: str, devices: str | None
) -> tuple[str, str | None]:
    """Return `--device` and `--devices`, of which one from a variable yields to the other."""
    one, many = one_of(context, device=None if device == "auto" else device, devices=devices)
    return one or "auto", many


def decibels(text: str | None) -> float | None:
    """Return the number in `20`, `20dB` or `20 dB`; raise UsageError for anything else."""
    if text is None:
        return None
    number = text.strip().lower().removesuffix("db").strip()
    try:
        value = float(number)
    except ValueError:
        value = float("nan")
    if not -1000 < value < 1000:
        raise UsageError(f"{text!r} is no number of decibels", hint="--fail-under 20dB")
    return value


def byte_count(text: str | None, example: str = "--max-memory 2GiB") -> int | None:
    """Return the number of bytes in `2GiB`, `1500 MB` or `2147483648`; raise UsageError, with an
    `example` as its hint, for anything else."""
    if text is None:
        return None
    found = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,3})?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if found is None or (found[3] and not found[2]):
        raise UsageError(f"{text!r} is no number of bytes", hint=example)
    base = 1024 if found[3] else 1000
    return int(float(found[1]) * base ** " KMGT".index(found[2].upper() or " "))


def finite(number: float | None, example: str) -> float | None:
    """Return the number of an option; raise UsageError, with an `example` as its hint, for one that
    is infinite or NaN."""
    if number is not None and not math.isfinite(number):
        raise UsageError(f"{example.split()[0]} takes a finite number, not {number}", hint=example)
    return number


def beside(output: Path) -> Path:
    """Return where the report on `output` goes when nobody says: `OUT.report.html`."""
    named = output if output.name not in ("", "..") else output.resolve()
    return named.with_name(f"{named.name}.report.html")


def with_optional_values(arguments: list[str]) -> list[str]:
    """Return arguments in which a `--report` without a value has an empty one."""
    given = []
    for number, argument in enumerate(arguments):
        following = arguments[number + 1 : number + 2]
        alone = not following or following[0].startswith("-")
        given.append("--report=" if argument == "--report" and alone else argument)
    return given


def _terminate(*_: object) -> None:
    raise Terminated


_built = functools.cache(typer.main.get_command)  # the parser, which takes longer than it works


def run(app: typer.Typer, arguments: list[str]) -> int:
    """Run a command line, and return its exit code."""
    console.tolerate()
    try:
        code = _built(app)(
            with_optional_values(arguments), prog_name="lowbit", standalone_mode=False
        )
    except typer.Abort as error:  # Ctrl-C before a command began
        return console.report(error.__cause__ or KeyboardInterrupt())
    except typer.Exit as error:
        return error.exit_code
    except Exception as error:
        as_json = "--json" in arguments or _is_set("LOWBIT_JSON")
        return console.report(_explained(error, arguments), as_json=as_json)
    return code or 0


def _is_set(variable: str) -> bool:
    """Is a variable that stands in for a flag set, by the words that the parser takes?"""
    return os.environ.get(variable, "").strip().lower() in ("1", "true", "t", "yes", "y", "on")


def _explained(error: Exception, arguments: list[str]) -> Exception:
    """Return an error, of a missing argument with a hint where `--report` took it for its file."""
    if type(error).__name__ != "MissingParameter" or "--report" not in arguments:
        return error
    taken = arguments[arguments.index("--report") + 1 :][:1]
    if not taken or taken[0].startswith("-"):
        return error
    hint = f"--report took {safe(taken[0])} for the file to write: put DST before it"
    return UsageError(error.format_message(), hint=hint)  # type: ignore[attr-defined]
