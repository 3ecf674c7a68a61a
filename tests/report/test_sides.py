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
from lowbitcli.verify import WARN, Kept, Problem
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


def test_a_kept_tensor_that_changed_is_not_alike():
    kept = (Kept("same", "BF16", (4,), "norm"), Kept("norm", "BF16", (4,), "norm"))
    wrong = Problem("changed", "norm", "not the source's bytes", "model.safetensors")
    for kind in ("changed", "dtype", "shape", "extra", "unreadable"):
        one = compared(of(kept=kept), of(kept=kept, problems=(replace(wrong, kind=kind),)))
        (change,) = one.changes
        assert (change.name, change.scheme_a, change.scheme_b) == ("norm", "kept", "kept")
        assert (change.sqnr_db_a, change.sqnr_db_b, change.relative_b) == (math.inf, None, None)
        assert (change.wrong_a, change.wrong_b, change.change) == ("", kind, None)
        assert row(change) == ("norm", "kept", "kept", "no error", kind, "")
        assert summary(one) == "1 tensor differs, 1 are alike"
    bad = of(kept=kept, problems=(wrong,))
    assert summary(compared(bad, bad)) == "all 2 tensors are alike"
    other = of(kept=kept, problems=(replace(wrong, message="at another byte"),))
    assert [one.name for one in compared(bad, other).changes] == ["norm"]
    warned = of(kept=kept, problems=(replace(wrong, severity=WARN),))
    assert compared(of(kept=kept), warned).changes == ()


def test_without_a_source_nothing_is_said_of_numbers():
    kept = (Kept("norm", "BF16", (4,), "norm"), Kept("x", "BF16", (4,), ""))
    alone = of(replace(made.row("w"), figures=None), kept=kept, source=None)
    whole = of(made.row("w"), replace(made.row("x"), figures=None), kept=kept[:1])
    one = compared(alone, alone)
    assert (one.changes, one.alike, one.not_looked_at) == ((), 0, 3)
    assert summary(one) == "0 tensors differ, 0 are alike, 3 not looked at in both"
    one = compared(alone, whole)
    (change,) = one.changes
    assert (change.name, change.sqnr_db_a, change.relative_a) == ("x", None, None)
    assert row(change) == ("x", "kept", "nvfp4", "not measured", "not measured", "")
    assert summary(one) == "1 tensor differs, 0 are alike, 2 not looked at in both"


def test_what_one_sample_left_out_is_neither_alike_nor_different():
    kept = tuple(Kept(f"norm{n}", "BF16", (4,), "norm") for n in range(4))

    def some(*numbers, sqnr=20.0):
        rows = [made.row(f"w{n}", sqnr) for n in range(4)]
        rows = [x if n in numbers else replace(x, figures=None) for n, x in enumerate(rows)]
        names = [f"{kind}{n}" for n in numbers for kind in ("w", "norm")]
        return of(*rows, kept=kept, sample={"share": 0.5, "seed": 0, "tensors": names})

    one = compared(some(0, 1), some(1, 2))
    assert (one.changes, one.alike, one.not_looked_at) == ((), 2, 6)
    assert summary(one) == "0 tensors differ, 2 are alike, 6 not looked at in both"
    one = compared(some(0, 1), some(1, 2, sqnr=25.0))
    assert [(x.name, x.change) for x in one.changes] == [("w1", 5.0)]
    assert (one.alike, one.not_looked_at) == (1, 6)
    whole = of(*(made.row(f"w{n}", 20.0) for n in range(4)), kept=kept)
    assert (compared(whole, some(3)).alike, compared(some(3), whole).not_looked_at) == (2, 6)
    other = of(*(made.row(f"w{n}", 20.0, scheme="mxfp8") for n in range(4)), kept=kept)
    assert len(compared(some(3), other).changes) == 4  # another scheme is one, looked at or not
    for write in SUFFIXES.values():
        assert "6 not looked at in both" in write(one) or '"not_looked_at": 6' in write(one)


def test_how_many_weights_were_measured_is_told():
    rows = (made.row("a"), replace(made.row("b"), figures=None))
    one = compared(of(*rows), of(*rows[:1]))
    assert ("weights measured", "1 of 2", "1 of 1") in totals(one)
    assert ((one.a.measured, one.a.weights), one.b.measured) == ((1, 2), 1)


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
