"""`lowbit report diff`: what it prints, writes and refuses."""

import json
import re
from pathlib import Path

import pytest

from tests.report.documented import complaints, tables

DOCS = Path(__file__).parents[2] / "docs" / "report.md"


@pytest.fixture
def reports(lowbit):
    """Make two reports, of one model in NVFP4 and in MXFP8."""
    for scheme in ("nvfp4", "mxfp8"):
        assert lowbit("quantize", "model", "-o", scheme, "--scheme", scheme, "-q")[0] == 0
        words = ("verify", scheme, "--against", "model", "--report", f"{scheme}.json", "-q")
        assert lowbit(*words)[0] == 0
    return "nvfp4.json", "mxfp8.json"


def test_it_prints_totals_and_the_tensors_that_changed_most(lowbit, reports):
    code, out, err = lowbit("report", "diff", *reports)
    assert (code, err) == (0, "")
    lines = [re.split(r" {2,}", line) for line in out.splitlines()]
    assert lines[0] == ["", "A", "B"]
    told = {line[0]: line[1:] for line in lines if len(line) > 1}
    assert told["report"] == list(reports)
    assert told["verdict"] == ["passed", "passed"]
    assert told["bits per quantized weight"] == ["4.51", "8.25"]
    name, a, b, sqnr_a, sqnr_b, change = next(
        x for x in lines if "down_proj" in x[0] and len(x) > 5
    )
    assert (name.endswith("mlp.down_proj.weight"), a, b) == (True, "nvfp4", "mxfp8")
    difference = float(sqnr_b.split()[0]) - float(sqnr_a.split()[0])
    assert float(change.split()[0]) == pytest.approx(difference, abs=0.011) and difference > 5
    assert lines[-1] == ["1 tensor differs, 3 are alike"]


def test_it_prints_one_json_document_as_documented(lowbit, reports):
    code, out, err = lowbit("report", "diff", *reports, "--json")
    assert (code, err) == (0, "")
    assert complaints(json.loads(out), "The comparison", tables(DOCS.read_text())) == []
    assert (
        json.loads(lowbit("report", "diff", "mxfp8.json", "mxfp8.json", "--json")[1])["alike"] == 4
    )


@pytest.mark.parametrize("suffix", ["html", "md", "json"])
def test_it_writes_a_page(lowbit, reports, suffix):
    code, out, _ = lowbit("report", "diff", *reports, "-o", f"d.{suffix}")
    assert code == 0 and out.endswith(f"\nreport: d.{suffix}\n")
    assert "down" in Path(f"d.{suffix}").read_text()
    out = lowbit("report", "diff", *reports, "--json", "-o", f"d.{suffix}")[1]
    assert json.loads(out)["schema"] == 1


def test_what_is_no_report_is_refused(lowbit, reports):
    Path("x.json").write_text("{}")
    for words, code, message in (
        (
            ("x.json", "mxfp8.json"),
            4,
            "error: x.json is no report of lowbit\n\nhint: lowbit verify ",
        ),
        (("nvfp4.json", "none.json"), 4, "error: none.json: No such file or directory\n\nhint: "),
        (
            (*reports, "-o", "d.txt"),
            2,
            "error: no report can be written to d.txt\n\nhint: use .html",
        ),
        (
            (*reports, "-o", reports[0]),
            2,
            "error: nvfp4.json is to be read, not to be replaced\n\nhint: name another",
        ),
        ((*reports, "-o", "no/d.md"), 5, "error: no is no directory\n\nhint: "),
        (("nvfp4.json",), 2, "error: Missing argument 'B'"),
        ((), 2, "error: Missing argument 'A'"),
    ):
        found, out, err = lowbit("report", "diff", *words)
        assert (found, out) == (code, "")
        assert err.startswith(message)
    assert lowbit("report")[0] == 2


def test_names_from_reports_do_nothing_to_a_terminal(lowbit, reports):
    one = json.loads(Path("nvfp4.json").read_text())
    one["weights"][0]["name"] = "\x1b[31m\u202ered\n[/red]"
    Path("h.json").write_text(json.dumps(one))
    code, out, _ = lowbit("report", "diff", "h.json", "mxfp8.json")
    assert code == 0 and "\\x1b[31m\\u202ered\\x0a[/red]" in out
    assert not re.search("[\x1b\u202e]", out)
    assert "\\x1b[31m" in lowbit("report", "diff", "h.json", "mxfp8.json", "-v")[1]


def test_help_has_examples(lowbit):
    code, out, _ = lowbit("report", "diff", "--help")
    assert code == 0 and "lowbit report diff nvfp4.json mxfp8.json" in out
