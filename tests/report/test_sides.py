"""Two reports side by side: what differs, in which order, and no name leaves its cell."""

import json
import math
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from lowbitcli.errors import UsageError
from lowbitcli.report import sides_page, write_diff
from lowbitcli.report.sides import diff, row, summary, text, totals
from lowbitcli.report.sides_page import SUFFIXES, markdown, page
from lowbitcli.verify import Kept, Problem
from tests.report import made
from tests.report.made import Page, found, hostile

NAMES = ("a.json", "b.json")


def compared(a, b):
    return diff(a, b, NAMES)


def of(*weights, kept=(), **more):
    return found(weights=weights, kept=kept, **more)


def test_the_same_report_twice_is_alike():
    one = compared(found(), found())
    assert (one.changes, one.alike, one.problems_a, one.problems_b) == ((), 4, (), ())
    assert summary(one) == "all 4 tensors are alike"
    assert all(here == there for name, here, there in totals(one) if name != "report")


def test_what_changed_most_comes_first_whichever_way():
    a = of(made.row("up", 20.0), made.row("down", 20.0), made.row("same", 20.0), made.row("x", 20))
    b = of(
        made.row("up", 22.0), made.row("down", 15.0), made.row("same", 20.0), made.row("x", 20.5)
    )
    found_changes = compared(a, b).changes
    assert [(one.name, one.change) for one in found_changes] == [
        ("down", -5.0), ("up", 2.0), ("x", 0.5),
    ]  # fmt: skip
    assert summary(compared(a, b)) == "3 tensors differ, 1 are alike"


def test_what_only_one_has_or_keeps_comes_before():
    a = of(made.row("gone"), made.row("kept now"), made.row("b", 20.0), made.row("nan", math.nan))
    b = of(made.row("b", 90.0), made.row("nan", 1.0), kept=(Kept("kept now", "BF16", (1,), ""),))
    changes = {one.name: one for one in compared(a, b).changes}
    assert list(changes) == ["gone", "nan", "kept now", "b"]
    gone, now = changes["gone"], changes["kept now"]
    assert (gone.scheme_a, gone.scheme_b, gone.change) == ("nvfp4", "", None)
    assert (now.scheme_b, now.change, now.bits_b) == ("kept", math.inf, None)
    assert row(gone)[1:3] == ("nvfp4", "not there")
    assert row(now)[3:] == ("20.00 dB", "no error", "no error any more")
    assert row(compared(b, a).changes[2])[-1] == "error where none was"
    assert row(changes["nan"])[-1] == ""


def test_another_scheme_with_the_same_error_is_a_change():
    one = compared(of(made.row("a", 20.0)), of(made.row("a", 20.0, scheme="mxfp4")))
    assert [(x.scheme_a, x.scheme_b, x.change) for x in one.changes] == [("nvfp4", "mxfp4", 0.0)]


def test_the_last_digits_of_another_machine_are_no_change():
    near = of(made.row("a", 20.0 * (1 + 1e-12), relative=0.1 * (1 + 1e-12)))
    assert compared(of(made.row("a", 20.0, relative=0.1)), near).changes == ()


def test_problems_that_one_has_alone():
    both, one = Problem("bound", "w", "both"), Problem("scale", "w", "one", "f.safetensors")
    found_ = compared(found(problems=(both, one)), found(problems=(replace(both, file="other"),)))
    assert (found_.problems_a, found_.problems_b) == ((one,), ())
    assert ("verdict", "2 problems found", "1 problem found") in totals(found_)
    for write in (page, markdown):
        assert "Problems of A alone" in write(found_) and "Problems of B" not in write(found_)


@pytest.mark.parametrize("write", SUFFIXES.values())
def test_every_fact_is_told(write):
    told = write(compared(found(), of(made.row("layers.2.a.weight", 30.0), source=None)))
    told = Page(told).all_text if write is page else told.replace("\\", "")
    for fact in ("a.json", "b.json", "layers.2.a.weight", "layers.10.a.weight", "mxfp8"):
        assert fact in told
    assert ("+8.50 dB" in told) or ('"change": 8.5' in told)


def test_no_name_leaves_its_cell():
    one = diff(hostile(), found(), (made.HOSTILE, made.HOSTILE))
    parsed = Page(page(one))
    assert "script" not in {tag for tag, _ in parsed.elements}
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", page(one))
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", markdown(one))
    assert not re.search(r"(?<!\\)[<>`*]", markdown(one).replace("| --- |", ""))
    assert json.loads(text(one))["a"]["report"] == made.HOSTILE
    assert "://" not in page(one) and "url(" not in page(one)


def test_long_lists_end_with_how_many_more(monkeypatch):
    monkeypatch.setattr(sides_page, "SHOWN", 3)
    monkeypatch.setattr(sides_page, "PROBLEMS", 2)
    problems = tuple(Problem("bound", f"w{n}", "x") for n in range(7))
    one = compared(of(*(made.row(f"w{n}") for n in range(9)), problems=problems), of())
    told = Page(page(one)).all_text
    assert "and 6 more" in told and "and 5 more" in told
    assert "and 6 more" in markdown(one)
    assert len(json.loads(text(one))["changes"]) == 9


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_it_is_written_over_an_old_one(tmp_path, suffix):
    path = tmp_path / f"d{suffix}"
    path.write_text(SUFFIXES[suffix](compared(found(), of())))
    one = compared(found(), found())
    write_diff(one, path)
    assert path.read_text() == SUFFIXES[suffix](one)
    with pytest.raises(UsageError):
        write_diff(one, tmp_path / "d.txt")


def test_two_reports_are_read_without_a_tensor_library():
    """Its import takes a second or two, and nothing here has a tensor."""
    code = "import sys; from lowbitcli import report, tables; from lowbitcli.report import sides; "
    code += "print(sorted({'torch', 'numpy', 'triton'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
