"""A plan, an outcome, an inspection or a verification as lines of text and as a JSON document.

Everything here goes from values to lines; nothing is printed. Names are made safe before they are
measured, so that columns line up. The JSON documents keep names as they are.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from rich.cells import cell_len

from lowbitcli.plan.nouns import Plan, Weight
from lowbitcli.tensors import safe

SHOWN = 40  # rows of a list of tensors, unless all of them are asked for


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


def columns(rows: Iterable[Sequence[str]], right: Iterable[int] = ()) -> list[str]:
    """Return rows as lines whose cells stand below each other; columns in `right` end together."""
    shown = [[safe(cell) for cell in row] for row in rows]
    right = set(right)
    widths = [max(map(cell_len, column)) for column in zip(*shown, strict=True)]
    lines = []
    for row in shown:
        cells = []
        for number, (cell, width) in enumerate(zip(row, widths, strict=True)):
            gap = " " * (width - cell_len(cell))
            cells.append(gap + cell if number in right else cell + gap)
        lines.append("  ".join(cells).rstrip())
    return lines


def shape_of(shape: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def first(rows: list[Sequence[str]], everything: bool) -> tuple[list[Sequence[str]], list[str]]:
    """Return the rows to show, and a line about those that are not shown."""
    if everything or len(rows) <= SHOWN:
        return rows, []
    return rows[:SHOWN], [f"... and {len(rows) - SHOWN} more; -v lists all"]


def plan_lines(plan: Plan, *, everything: bool = False) -> list[str]:
    """Tell of a plan: schemes with tensors and bytes, what is kept and why, the sizes."""
    lines = [f"{safe(str(plan.source))} -> {safe(str(plan.output))} ({plan.container})", ""]
    table: list[Sequence[str]] = [("scheme", "tensors", "size")]
    table += [(name, f"{n:,}", size(total)) for name, (n, total) in plan.counts.items()]
    lines += columns(table, right=(1, 2))
    reasons = Counter(weight.kept for weight in plan.weights if weight.kept)
    if reasons:
        table = [("kept because", "tensors")]
        table += [(reason, f"{count:,}") for reason, count in reasons.most_common()]
        lines += ["", *columns(table, right=(1,))]
    if everything:
        table = [("tensor", "shape", "stored as", "")]
        table += [
            (weight.name, shape_of(weight.shape), _becomes(weight), weight.kept)
            for weight in plan.weights
        ]
        lines += ["", *columns(table)]
    return [*lines, "", *_sizes(plan)]


def _becomes(weight: Weight) -> str:
    before = weight.source.name if weight.source else weight.dtype
    after = weight.target.name if weight.target else weight.dtype
    if weight.fake:
        after = f"{weight.dtype} as {after} would have it"
    return before if before == after else f"{before} -> {after}"


def _sizes(plan: Plan) -> list[str]:
    lines = columns(
        [
            ("input", size(plan.bytes_in), f"({plan.bytes_in:,} bytes)"),
            ("output", size(plan.bytes_out), f"({plan.bytes_out:,} bytes)"),
        ],
        right=(1, 2),
    )
    if plan.bits_per_weight:
        lines.append(f"{plan.bits_per_weight:.2f} bits per quantized weight, scales included")
    return lines


def plan_document(plan: Plan) -> dict[str, Any]:
    """Return a plan as a JSON document: sizes in bytes, every tensor with its reads and writes."""
    return {
        "source": str(plan.source),
        "output": None if plan.output is None else str(plan.output),
        "container": plan.container,
        "bytes_in": plan.bytes_in,
        "bytes_out": plan.bytes_out,
        "bits_per_weight": plan.bits_per_weight,
        "schemes": {
            name: {"tensors": number, "bytes": total}
            for name, (number, total) in plan.counts.items()
        },
        "notes": list(plan.notes),
        "files": [{"name": file.name, "bytes": file.size} for file in plan.files],
        "tensors": [_weight_document(weight) for weight in plan.weights],
    }


def _weight_document(weight: Weight) -> dict[str, Any]:
    return {
        "name": weight.name,
        "shape": list(weight.shape),
        "dtype": weight.dtype,
        "source": weight.source.name if weight.source else None,
        "target": weight.target.name if weight.target else None,
        "kept": weight.kept,
        "bytes_in": weight.bytes_in,
        "bytes_out": weight.bytes_out,
    }
