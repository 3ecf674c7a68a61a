"""F15: files and tensors with names that a terminal would obey, through commands and reports."""

import pytest

from lowbitcli.tensors import safe
from tests.attacks.test_documents import lowbit
from tests.checkpoints import CONFIG, single, weight
from tests.faults.shim import LONG

NAMES = (
    *(
        "\x1b[31mred",
        "\x1b]0;title\x07",
        "bell\x07",
        "two\nlines",
        "back\x08\x08",
        "carriage\rreturn",
    ),
    *("error: fake\n\nhint: fake", "del\x7f", "csi\x9b31m", "right\u202eleft", "zero\u200bwidth"),
    *("line\u2028separator", "tag\U000e0041", "[bold]x", "{braces}", "%s %d", "a" * 200),
    *(
        "<script>alert(1)</script>".replace("/", ""),
        "quote\"'`",
        "| pipe | table |",
        "# head",
        "é漢",
    ),
    *("-rf", "--json", " space ", "back\\slash", "$(touch gone)", "`touch gone`", "~", "*", "?"),
)


def is_clean(text):
    return all(safe(line) == line for line in text.split("\n"))


@pytest.mark.parametrize("number", range(0, len(NAMES), 1 if LONG else 3))
def test_f15_hostile_names(number, tmp_path):
    name = NAMES[number]
    source = single(tmp_path / name, {f"{name}.weight": weight(4, 32)}, CONFIG)
    (source / f"{name}.txt").write_text("beside it")
    output = tmp_path / f"{name}.out"
    ran = 0
    for words in (
        ("inspect", source, "-v"),
        ("plan", source, "-v"),
        ("quantize", source, "-o", output, "--device", "cpu", "-v"),
        ("quantize", source, "-o", output, "--device", "cpu", "--scheme", "fp8"),  # is there: 5
        ("quantize", source, "-o", output / name / name, "--recipe", tmp_path / f"{name}.yaml"),
        *(
            ("verify", output, "--against", source, "--report", tmp_path / f"report{kind}")
            for kind in (".md", ".json", ".html")
        ),
        ("verify", output / name),
        ("dequantize", output, "-o", output.with_name(f"{name}.back"), "--device", "cpu", "-v"),
    ):
        for more in ((), ("--json",)):
            said = lowbit(*words, *more)
            assert said.code in (0, 2, 3, 4, 5), (words, said.err)
            assert is_clean(said.err) and is_clean(said.out), (words, said.out, said.err)
            assert "Traceback" not in said.err, said.err
            assert said.out.isascii() or not more
            ran += 1
    for kind in (".md", ".json", ".html"):
        assert is_clean((tmp_path / f"report{kind}").read_text()), kind
    assert ran == 20
    print(f"F15: {ran} commands and 3 reports on {name!a}")
