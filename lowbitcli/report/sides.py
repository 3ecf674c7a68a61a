"""Two reports side by side: verdicts, totals, problems, and the tensors that differ, those that
changed most first."""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from lowbitcli.report import loss, words
from lowbitcli.verify.nouns import Problem, Verification, plain

SCHEMA = 1
ALIKE = 1e-9  # relative; figures that are nearer than this are the same
# Kinds of problems of a tensor that was to stay as it was, and did not.
NOT_THE_SOURCE = frozenset({"changed", "dtype", "extra", "shape", "unreadable"})


@dataclass(frozen=True)
class Side:
    """What one report says in total; `lowest` names the weight of the lowest SQNR."""

    report: str
    target: str
    passed: bool
    failures: int
    warnings: int
    tensors: int
    bytes_after: int
    bits_per_weight: float | None
    sqnr_db: float | None
    relative: float | None
    lowest_sqnr_db: float | None
    lowest: str
    weights: int
    measured: int


@dataclass(frozen=True)
class Change:
    """One tensor that is not alike in both. A scheme is `kept` where it is not quantized, "" where
    it is not there; an SQNR is infinite where it is the source's, None where nobody measured it.
    `change` is what B has more, in dB; `wrong` the kind of problem of one that is kept and not the
    source's."""

    name: str
    scheme_a: str
    scheme_b: str
    sqnr_db_a: float | None
    sqnr_db_b: float | None
    relative_a: float | None
    relative_b: float | None
    bits_a: float | None
    bits_b: float | None
    change: float | None
    wrong_a: str = ""
    wrong_b: str = ""


@dataclass(frozen=True)
class Diff:
    """Two reports: tensors that differ, how many are alike, problems that only one has; and how
    many tensors are stored alike whose numbers were not looked at for both, so that nobody knows.
    """

    a: Side
    b: Side
    changes: tuple[Change, ...]
    alike: int
    not_looked_at: int
    problems_a: tuple[Problem, ...]
    problems_b: tuple[Problem, ...]


@dataclass(frozen=True)
class _Seen:
    """A tensor in one report; `wrong` is why it is kept and not the source's."""

    scheme: str = ""
    sqnr_db: float | None = None
    relative: float | None = None
    bits: float | None = None
    is_looked_at: bool = True
    wrong: Problem | None = None


def diff(a: Verification, b: Verification, names: tuple[str, str]) -> Diff:
    """Return what differs between two reports; `names` is what they are called."""
    left, right = _tensors(a), _tensors(b)
    changes, alike, unknown = [], 0, 0
    for name in left.keys() | right.keys():
        here, there = left.get(name, _Seen()), right.get(name, _Seen())
        if not _is_stored_alike(here, there):
            changes.append(_change(name, here, there))
        elif not (here.is_looked_at and there.is_looked_at):
            unknown += 1
        elif _is_near(here.sqnr_db, there.sqnr_db) and _is_near(here.relative, there.relative):
            alike += 1
        else:
            changes.append(_change(name, here, there))
    changes.sort(key=_order)
    return Diff(
        *(_side(a, names[0]), _side(b, names[1]), tuple(changes), alike, unknown),
        *(_without(a.problems, b.problems), _without(b.problems, a.problems)),
    )


def document(found: Diff) -> dict[str, Any]:
    """Return a comparison as a JSON document; docs/report.md says what each key means."""
    return plain({"schema": SCHEMA, **asdict(found)})


def text(found: Diff) -> str:
    """Return a comparison as JSON text."""
    return json.dumps(document(found), indent=1, ensure_ascii=True, allow_nan=False) + "\n"


def _side(found: Verification, report: str) -> Side:
    rows = loss.measured(found)
    total, lowest = loss.total(figures for _, figures in rows), loss.least(rows)
    return Side(
        report,
        found.target,
        found.passed,
        len(found.failures),
        len(found.warnings),
        found.summary.tensors,
        found.summary.bytes_after,
        found.summary.bits_per_weight,
        total.sqnr_db if total else None,
        total.relative if total else None,
        lowest[1].sqnr_db if lowest else None,
        lowest[0].name if lowest else "",
        *(len(found.weights), len(rows)),
    )


def _tensors(found: Verification) -> dict[str, _Seen]:
    names = (found.sample or {}).get("tensors")
    sample = [x for x in names if isinstance(x, str)] if isinstance(names, list | tuple) else None
    looked, seen = frozenset(sample or ()), {}
    wrong = {one.tensor: one for one in found.failures if one.kind in NOT_THE_SOURCE}
    for one in found.kept:
        is_looked_at = found.source is not None and (sample is None or one.name in looked)
        is_same = is_looked_at and one.name not in wrong
        figures = (math.inf, 0.0) if is_same else (None, None)
        seen[one.name] = _Seen("kept", *figures, None, is_looked_at, wrong.get(one.name))
    for row in found.weights:
        figures = row.figures
        is_looked_at = found.source is not None and (sample is None or row.name in looked)
        seen[row.name] = _Seen(
            row.scheme or row.how,
            figures.sqnr_db if figures else None,
            figures.relative if figures else None,
            row.bits,
            is_looked_at or figures is not None,
        )
    return seen


def _change(name: str, a: _Seen, b: _Seen) -> Change:
    change = None
    if a.sqnr_db is not None and b.sqnr_db is not None:
        change = 0.0 if a.sqnr_db == b.sqnr_db else b.sqnr_db - a.sqnr_db
    return Change(
        name,
        *(a.scheme, b.scheme, a.sqnr_db, b.sqnr_db),
        *(a.relative, b.relative, a.bits, b.bits, change),
        *("" if one.wrong is None else one.wrong.kind for one in (a, b)),
    )


def _is_stored_alike(a: _Seen, b: _Seen) -> bool:
    """Is a tensor the same in all that is known of it but for its numbers?"""
    told = [one.wrong and (one.wrong.kind, one.wrong.message) for one in (a, b)]
    return a.scheme == b.scheme and _is_near(a.bits, b.bits) and told[0] == told[1]


def _is_near(x: float | None, y: float | None) -> bool:
    if x is None or y is None:
        return x is y
    return math.isclose(x, y, rel_tol=ALIKE) or (math.isnan(x) and math.isnan(y))


def _order(change: Change) -> tuple[int, float, str]:
    """Return what to sort by: what only one has, then what is not known, then the largest."""
    absent = not change.scheme_a or not change.scheme_b
    unknown = change.change is None or math.isnan(change.change)
    size = 0.0 if unknown or change.change is None else -abs(change.change)
    return (0 if absent else 1 if unknown else 2, size, change.name)


def _without(some: Iterable[Problem], others: Iterable[Problem]) -> tuple[Problem, ...]:
    known = {(one.kind, one.tensor, one.message) for one in others}
    return tuple(one for one in some if (one.kind, one.tensor, one.message) not in known)


TOTALS_HEAD = ("", "A", "B")
CHANGES_HEAD = ("tensor", "A", "B", "SQNR A", "SQNR B", "change")


def totals(found: Diff) -> list[tuple[str, str, str]]:
    """Return both sides in words, columns as in TOTALS_HEAD."""
    rows = zip(_told(found.a), _told(found.b), strict=True)
    return [(name, here, there) for (name, here), (_, there) in rows]


def _told(side: Side) -> list[tuple[str, str]]:
    bits = side.bits_per_weight
    return [
        ("report", side.report),
        ("checkpoint", side.target),
        ("verdict", words.verdict_of(side.failures, side.warnings)),
        ("size", words.short(side.bytes_after)),
        ("bits per quantized weight", "" if bits is None else f"{bits:.2f}"),
        ("weights measured", f"{side.measured:,} of {side.weights:,}"),
        ("SQNR over them", _decibels(side.sqnr_db)),
        ("relative error", words.percent(side.relative)),
        ("lowest SQNR", _decibels(side.lowest_sqnr_db)),
        ("of", side.lowest),
    ]


def tables(found: Diff, most: int | None) -> list[tuple[list[tuple[str, ...]], tuple[int, ...]]]:
    """Return tables for a terminal: rows, the first of them its head, and columns of numbers.

    No table has more than `most` rows without saying so in its last one.
    """
    changes = [CHANGES_HEAD, *map(row, found.changes)]
    shown = [([TOTALS_HEAD, *totals(found)], ()), (changes, (3, 4, 5))]
    for name, problems in (("A", found.problems_a), ("B", found.problems_b)):
        rows = [(one.severity, one.kind, one.tensor, one.message) for one in problems]
        shown.append(([(f"{name} alone", "kind", "tensor", "problem"), *rows], ()))
    return [(_first(rows, most), right) for rows, right in shown if len(rows) > 1]


def _first(rows: list[tuple[str, ...]], most: int | None) -> list[tuple[str, ...]]:
    left = 0 if most is None else len(rows) - 1 - most
    if left <= 0:
        return rows
    return [*rows[:-left], (f"... and {left:,} more; -v lists all", *[""] * (len(rows[0]) - 1))]


def row(change: Change) -> tuple[str, ...]:
    """Return a change in words, columns as in CHANGES_HEAD."""
    return (
        change.name,
        change.scheme_a or "not there",
        change.scheme_b or "not there",
        _measured(change.scheme_a, change.sqnr_db_a, change.wrong_a),
        _measured(change.scheme_b, change.sqnr_db_b, change.wrong_b),
        _signed(change.change),
    )


def _measured(scheme: str, sqnr_db: float | None, wrong: str) -> str:
    if sqnr_db is None and scheme:
        return wrong or "not measured"
    return _decibels(sqnr_db)


def _decibels(value: float | None) -> str:
    return "" if value is None else words.decibels(value)


def _signed(change: float | None) -> str:
    if change is None or math.isnan(change):
        return ""
    if math.isinf(change):
        return "error where none was" if change < 0 else "no error any more"
    return f"{change:+.2f} dB"


def summary(found: Diff) -> str:
    """Return in a sentence how much differs."""
    number, unknown = len(found.changes), found.not_looked_at
    if not number and not unknown:
        return f"all {found.alike:,} tensors are alike"
    differ = "1 tensor differs" if number == 1 else f"{number:,} tensors differ"
    text = f"{differ}, {found.alike:,} are alike"
    return f"{text}, {unknown:,} not looked at in both" if unknown else text
