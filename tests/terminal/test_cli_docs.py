"""docs/cli.md against the program's own tree of commands: options, variables, exit codes."""

import re
from pathlib import Path

import typer

from lowbitcli.cli import app
from lowbitcli.program import EXIT_CODES

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
COMPLETION = {"--install-completion", "--show-completion", "--help", "--version"}


def leaves(command, path=()):
    """Yield (words of a command, command) for each command below, groups left out."""
    for name, child in getattr(command, "commands", {}).items():
        if hasattr(child, "commands"):
            yield from leaves(child, (*path, name))
        else:
            yield " ".join((*path, name)), child


def options_of_the_program():
    """Return (flags, variable, commands, help) of every option, as the table writes them."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for name, command in leaves(typer.main.get_command(app)):
        for option in command.params:
            if not any(flag.startswith("-") for flag in option.opts):
                continue
            flags = ", ".join(sorted(option.opts, key=len))
            if COMPLETION & set(option.opts):
                continue
            key = (flags, option.envvar or "none", option.help or "")
            found.setdefault(key, []).append(name)
    return {
        (flags, variable, ", ".join(names), text)
        for (flags, variable, text), names in found.items()
    }


def options_of_the_page():
    rows = re.findall(r"^\| `(-[^`]*)` \| (\S+) \| ([^|]*) \| (.*) \|$", PAGE.read_text(), re.M)
    return [(flags, variable.strip("`"), *rest) for flags, variable, *rest in rows]


def test_the_page_lists_every_option_and_no_other():
    page = options_of_the_page()
    assert len(page) > 10
    assert len(page) == len(set(page))
    assert set(page) == options_of_the_program()


def test_the_page_lists_every_command():
    page = set(
        re.findall(r"^\| `lowbit ([a-z]+(?: [a-z]+)?)(?: [A-Z]+)*` \|", PAGE.read_text(), re.M)
    )
    assert page == {name for name, _ in leaves(typer.main.get_command(app))}


def test_the_page_lists_every_exit_code():
    page = re.findall(r"^\| (\d+) \| ([^|]*) \|$", PAGE.read_text(), re.M)
    said = re.findall(r"^ +(\d+) +(.*)$", EXIT_CODES, re.M)
    said[-1:] = [("130", "interrupted"), ("143", "terminated")]
    assert page == said


def test_a_variable_belongs_to_one_option():
    flags = {}
    for option, variable, *_ in options_of_the_page():
        if variable != "none":
            assert re.fullmatch(r"LOWBIT_[A-Z0-9_]+", variable)
            assert flags.setdefault(variable, option) == option
