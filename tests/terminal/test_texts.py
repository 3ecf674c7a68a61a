"""What commands print: whole outputs, held against text files."""

import re
from pathlib import Path

import pytest

from lowbitcli.plan import need

TEXTS = Path(__file__).parent / "texts"


def expected(name):
    return (TEXTS / f"{name}.txt").read_text()


def written(code, out, err):
    """Return a run as a text to compare: what depends on the machine replaced."""
    text = f"exit code {code}\n--- stdout\n{out}--- stderr\n{err}"
    text = text.replace(f"{Path.cwd()}/", "")
    text = re.sub(r"where .* are free", "where <some> are free", text)
    return re.sub(r"^.* s, .* GB/s, peak memory .*$", "<time, speed, memory>", text, flags=re.M)


COMMANDS = {
    "help": "--help",
    "no-command": "",
    "missing-argument": "verify --report model",
    "no-source": "inspect nothing",
    "unknown-scheme": "plan model --scheme nvfp5",
    "unknown-container": "plan model --container gguf",
    "both": "plan model --scheme nvfp4 --recipe nvfp4",
    "dead-pattern": "plan model --recipe typo.yaml",
    "recipe-syntax": "recipe check broken.yaml",
    "built-in-recipe": "plan model --scheme nvfp4 --container deepseek",
    "bad-decibels": "verify model --fail-under loud",
    "plan": "plan model",
    "plan-verbose": "quantize model --dry-run -v --scheme mxfp8",
    "inspect": "inspect model",
    "quantize": "quantize model",
    "output-exists": "quantize model -o model2",
    "verify": "verify quantized --against model --report r.md",
    "recipe-list": "recipe list",
    "recipe-check": "recipe check nvfp4 model",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_this_and_nothing_else(lowbit, name, monkeypatch):
    monkeypatch.setattr(need, "has_gpu", lambda: False)
    Path("model2").mkdir()
    Path("model2/other.txt").touch()
    Path("typo.yaml").write_text(
        'rules:\n  - match: "*"\n    scheme: nvfp4\n    exclude: ["lm_haed*", "re:.*gatee"]\n'
    )
    Path("broken.yaml").write_text("rules:\n  - match: '*'\n    shceme: nvfp4\n")
    if "quantized" in COMMANDS[name]:
        lowbit("quantize", "model", "-o", "quantized")
    assert written(*lowbit(*COMMANDS[name].split())) == expected(name)


def test_every_text_is_compared():
    assert {path.stem for path in TEXTS.glob("*.txt")} == set(COMMANDS)


# What typer words, and words otherwise in other versions.


def test_a_word_that_is_almost_right_is_answered_with_the_right_one(lowbit):
    code, out, err = lowbit("quantise", "model")
    assert (code, out) == (2, "")
    assert re.match(r"error: .*quantise.*quantize.*\n\nhint: lowbit --help\n\Z", err)
    code, out, err = lowbit("plan", "model", "--sheme", "nvfp4")
    assert (code, out) == (2, "")
    assert re.match(r"error: .*--sheme.*--scheme.*\n\nhint: lowbit plan --help\n\Z", err)
    code, out, err = lowbit("plan", "model", "--nonfinite", "maybe")
    assert (code, out) == (2, "")
    assert re.match(r"error: .*--nonfinite.*'maybe' is not one of .*'keep'.*\n\nhint: ", err)
    assert "Value error" not in err


@pytest.mark.parametrize("command", ["quantize", "dequantize", "verify", "inspect", "plan"])
def test_long_help_has_examples_and_exit_codes(lowbit, command):
    code, out, err = lowbit(command, "--help")
    assert (code, err) == (0, "")
    assert f"\n  Examples:\n    lowbit {command} " in out
    assert "\n  Exit codes:\n    0    done\n    1    verify found" in out
