"""Names that a terminal would obey or a reader be fooled by, through every way out."""

import json
import sys
from pathlib import Path

import pexpect
import pytest

from lowbitcli import api, console, tables, tables_inspection
from lowbitcli.containers.container import Finding
from lowbitcli.errors import CheckpointError
from lowbitcli.tensors import safe
from lowbitcli.verify.nouns import Check, Problem, Verification
from tests.checkpoints import single, weight

NAMES = [
    "\x1b[31mred",
    "\x1b]0;title\x07",
    "[/red]",
    "[bold]x[/bold]",
    ":smile:",
    "bell\x07",
    "back\x08\x08\x08\x08",
    "carriage\rreturn",
    "two\nlines",
    "error: fake\n\nhint: fake",
    "tab\there",
    "del\x7f",
    "nel\x85",
    "csi\x9b31m",
    "right\u202eleft",
    "isolate\u2066x\u2069",
    "zero\u200bwidth",
    "joiner\u200d",
    "bom\ufeff",
    "line\u2028separator",
    "tag\U000e0041",
    "{braces}",
    "%s %d",
    "<script>alert(1)</script>",
    "quote\"'`",
    "back\\slash",
    "é",
    "漢字",
    "a" * 200,
    " space ",
]
RAW = [name for name in NAMES if safe(name) != name]


@pytest.fixture
def hostile():
    single(Path("hostile"), {f"{name}.weight": weight(4, 16) for name in NAMES})


def is_clean(text):
    return all(char == "\n" or (char.isprintable() or char == " ") for char in text)


COMMANDS = ("inspect hostile -v", "plan hostile -v", "quantize hostile -v")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_pipe_gets_no_control_character(lowbit, hostile, command):
    code, out, err = lowbit(*command.split())
    assert code == 0
    assert is_clean(out)
    assert is_clean(err)
    assert len(RAW) > 15
    for name in NAMES:
        assert safe(name) in out


@pytest.mark.parametrize("command", COMMANDS)
def test_a_json_document_is_ascii_and_keeps_the_names(lowbit, hostile, command):
    code, out, _ = lowbit(*command.split(), "--json")
    assert code == 0
    assert out.isascii()
    assert is_clean(out)
    named = {tensor["name"] for tensor in json.loads(out)["tensors"]}
    assert named == {f"{name}.weight" for name in NAMES}


def test_a_terminal_gets_no_sequence_but_our_own(hostile):
    child = pexpect.spawn(
        sys.executable,
        ["-m", "lowbitcli", "quantize", "hostile", "-v"],
        dimensions=(50, 700),
        timeout=120,
    )
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    shown = child.before.decode()
    for sequence in ("\x1b[31mred", "\x1b]", "\x07", "\x08", "\x7f", "\x85", "\x9b", "\u202e"):
        assert sequence not in shown
    for name in ("[/red]", ":smile:", "\\x1b[31mred", "two\\x0alines"):
        assert name in shown


@pytest.mark.parametrize("name", NAMES)
def test_an_error_shows_a_name_and_does_what_it_says_nowhere(capsys, name):
    code = console.report(CheckpointError(f"{name}: is wrong", hint=f"drop {name}"), as_json=True)
    out, err = capsys.readouterr()
    assert code == 4
    assert is_clean(err)
    assert out.isascii()
    assert is_clean(out)
    assert json.loads(out)["error"]["message"] == f"{name}: is wrong"
    # A line break in a name starts no line of its own: what follows is indented.
    lines = err.splitlines()
    assert [line[:6] for line in lines if line and not line.startswith(" ")] == ["error:", "hint: "]


def test_a_bug_shows_a_name_in_its_traceback_safely(capsys):
    assert console.report(ValueError("".join(NAMES))) == 70
    out, err = capsys.readouterr()
    assert out == ""
    assert is_clean(err)


def test_a_verification_shows_names_safely():
    found = Verification(
        target="out\x1b[2J",
        source=None,
        container="lowbit",
        problems=tuple(Problem("scale", name, f"of {name}") for name in NAMES),
        checks=(Check("scales", 3, False), Check("numbers", 0, None, "no source")),
    )
    lines = tables.verification_lines(found, everything=True)
    assert all(map(is_clean, lines))
    assert not any("\n" in line for line in lines)


def test_findings_of_an_inspection_are_shown_safely(lowbit, hostile, monkeypatch):
    found = api.inspect("hostile")
    faults = tuple(Finding("orphan", name, f"{name} is alone") for name in NAMES)
    object.__setattr__(found, "findings", faults)
    lines = tables_inspection.inspection_lines(found)
    assert all(map(is_clean, lines))
    assert any("\\x1b[31mred is alone" in line for line in lines)


def test_columns_stand_below_each_other_in_any_script():
    assert tables.columns([("漢字", "1"), ("abc", "23"), ("\x1b", "4")], right=(1,)) == [
        "漢字   1",
        "abc   23",
        "\\x1b   4",
    ]


def test_one_long_cell_does_not_widen_every_line():
    lines = tables.columns([("x" * 10_000, "1"), ("abc", "2")])
    assert lines[0] == "x" * 10_000 + "  1"
    assert len(lines[1]) < 200
