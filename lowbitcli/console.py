"""The only place that prints, besides `progress`: data to stdout, notes and errors to stderr.

Names from a file are data. They pass through `safe`, and are never read as markup, so that a tensor
called `[/red]` or one with an escape sequence in it is shown and does nothing.
"""

import io
import json
import math
import os
import sys
import traceback
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.text import Text

from lowbitcli.errors import BUG, DeviceError, LowbitError, OutputError, UsageError
from lowbitcli.tensors import safe

BROKEN_PIPE = 141  # what a shell reports of a program that SIGPIPE ended
INTERRUPTED = 130
_LONGEST_LINE = 2000  # characters of a message


def size(count: float) -> str:
    """Return a number of bytes for people, in decimal units."""
    for unit, one in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= one:
            return f"{count / one:.1f} {unit}"
    return f"{count:.0f} bytes"


def duration(seconds: float) -> str:
    """Return a time for people: `0.8 s`, `42 s`, `3 min 5 s`, `2 h 10 min`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def tolerate() -> None:
    """Let stdout and stderr write what their encoding cannot hold as escapes, not as an error, and
    lose what they are given where they are closed."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def data(lines: Iterable[str]) -> None:
    """Write lines to stdout."""
    sys.stdout.write("".join(f"{safe(line)}\n" for line in lines))
    sys.stdout.flush()


def document(value: Any) -> None:
    """Write one JSON document to stdout, in ASCII; a number that is not finite becomes a string."""
    sys.stdout.write(json.dumps(_finite(value), indent=2, allow_nan=False) + "\n")
    sys.stdout.flush()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def notes(messages: Iterable[str]) -> None:
    """Write what the user should know, but did not ask for, to stderr."""
    for message in messages:
        _complain("note", message, "yellow")


def _complain(label: str, message: str, style: str) -> None:
    """Write `label: message` to stderr; further lines of the message are indented."""
    first, *rest = (_clipped(line) for line in message.split("\n"))
    text = Text(f"{label}:", style=f"bold {style}") + Text(f" {safe(first)}")
    for line in rest:
        text += Text(f"\n  {safe(line.strip())}")
    Console(stderr=True).print(text, soft_wrap=True)


def _clipped(line: str) -> str:
    """Return a line that a reader can take: a name in it may have a million characters."""
    if len(line) <= _LONGEST_LINE:
        return line
    return f"{line[:_LONGEST_LINE]}... ({len(line) - _LONGEST_LINE:,} characters more)"


def _let_go_of_stdout() -> bool:
    """Send what stdout could not take to nowhere, or Python complains of it when it exits; return
    whether there was something."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def report(error: BaseException, *, as_json: bool = False) -> int:
    """Print an error once, as `error: ...`, blank line, `hint: ...`, and return its exit code."""
    if isinstance(error, OSError) and _let_go_of_stdout() and error.filename is None:
        error.filename = "stdout"
    if isinstance(error, BrokenPipeError):
        return BROKEN_PIPE  # nobody reads any more, which is no news to whoever closed the pipe
    message, hint, code = _explain(error)
    if code == BUG:
        lines = "".join(traceback.format_exception(error)).splitlines()
        sys.stderr.write("".join(f"{safe(line)}\n" for line in lines))
    _complain("error", message, "red")
    if hint:
        sys.stderr.write("\n")
        _complain("hint", hint, "cyan")
    if as_json:
        document({"error": {"message": message, "hint": hint, "exit_code": code}})
    return code


def _explain(error: BaseException) -> tuple[str, str, int]:
    """Return the message, hint and exit code of an error."""
    if isinstance(error, LowbitError):
        return error.message, error.hint, error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", "", getattr(error, "exit_code", INTERRUPTED)
    if isinstance(error, OSError):
        where = f"{safe(str(error.filename))}: " if error.filename is not None else ""
        return f"{where}{error.strerror or error}", "", OutputError.exit_code
    if isinstance(error, MemoryError):
        return "out of memory", "", DeviceError.exit_code
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        hint = "it may have more memory or threads: ulimit -v, ulimit -u, or a container's limits"
        return "no room for another thread", hint, DeviceError.exit_code
    if hasattr(error, "format_message"):  # of typer and of click, whichever of them raised it
        context = getattr(error, "ctx", None)
        hint = f"{context.command_path} --help" if context else "lowbit --help"
        message = error.format_message().replace("Value error, ", "")  # type: ignore[attr-defined]
        return message, hint, UsageError.exit_code
    message = f"this is a bug of lowbit: {type(error).__name__}: {error}"
    hint = "please report it with the traceback above, the command and what lowbit doctor prints"
    return message, hint, BUG
