"""The curve of a search, error against bits, as a page, as Markdown, or as JSON.

Coordinates are those of an SVG's box, y grows downwards; bits are drawn on a scale of ratios.
"""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lowbitcli.report.markdown import table
from lowbitcli.report.page import template
from lowbitcli.report.write import check_path, put
from lowbitcli.search import told
from lowbitcli.search.nouns import Found, Point
from lowbitcli.search.text import shares, thinned
from lowbitcli.tensors import safe

WIDTH, HEIGHT = 400, 220
ROWS = 17  # of the curve's table
UNITS = 400  # that are listed; the JSON has all of them
_LABEL, _LINE = 90, 15  # how wide and high what is written beside a mark may be
_BITS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64)


@dataclass(frozen=True)
class Mark:
    """A place in the picture with what is written beside it, at which height, and `left` of it or
    not."""

    x: float
    y: float
    label: str
    left: bool
    at: float


@dataclass(frozen=True)
class Picture:
    """The curve as a path, the places of uniform schemes, what was chosen, and the axes."""

    path: str
    uniform: tuple[Mark, ...]
    chosen: Mark | None
    bits: tuple[tuple[float, str], ...]
    db: tuple[tuple[float, str], ...]
    told: str


def picture(found: Found) -> Picture | None:
    """Return the picture, None where every error is none."""
    finite = [one for one in found.curve if one.error > 0]
    if not finite:
        return None
    marked = {name: one for name, one in found.uniform.items() if one.error > 0}
    every = [*finite, *marked.values()]
    low, high = (math.log2(found.bits(pick(one.cost for one in every))) for pick in (min, max))
    high = max(high, low + 0.01)
    floor = math.floor(min(found.db(one.error) for one in every) / 5 - 0.5) * 5
    top = max(math.ceil(max(found.db(one.error) for one in every) / 5) * 5, floor + 5)

    def x(cost: int) -> float:
        return round(WIDTH * (math.log2(found.bits(cost)) - low) / (high - low), 1)

    def y(error: float) -> float:
        return round(HEIGHT * (top - found.db(error)) / (top - floor), 1)

    def mark(one: Point, label: str) -> Mark:
        return Mark(x(one.cost), y(one.error), label, x(one.cost) > WIDTH / 2, y(one.error) + 14)

    chosen = found.chosen
    mine = found.point(chosen.names) if chosen is not None else None
    step = 5 if top - floor <= 30 else 10
    names = ", ".join(f"{name} {_figures(found, one)}" for name, one in marked.items())
    bits = [n for n in _BITS if low <= math.log2(n) <= high]
    return Picture(
        "M" + "L".join(f"{x(one.cost)} {y(one.error)}" for one in finite),
        _apart([mark(one, f"all {name}") for name, one in marked.items()]),
        mark(mine, "chosen") if mine is not None and mine.error > 0 else None,
        tuple((x(round(n * found.elements / 8)), str(n)) for n in bits),
        tuple(
            (round(HEIGHT * (top - n) / (top - floor), 1), str(n))
            for n in range(-(-floor // step) * step, top + 1, step)
        ),
        f"from {_figures(found, finite[0])} to {_figures(found, finite[-1])}; {names}",
    )


def _apart(marks: Sequence[Mark]) -> tuple[Mark, ...]:
    """Return marks with what is written beside them one below the other, where it would overlap."""
    placed: list[Mark] = []
    for one in sorted(marks, key=lambda mark: (mark.at, mark.x)):
        near = [x.at for x in placed if x.left == one.left and abs(x.x - one.x) < _LABEL]
        at = max([one.at, *(height + _LINE for height in near if height + _LINE > one.at)])
        placed.append(replace(one, at=round(at, 1)))
    return tuple(placed)


def _figures(found: Found, one: Point) -> str:
    return f"{found.bits(one.cost):.2f} bits, {_db(found.db(one.error))} dB"


def _db(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "exact"


HEAD = ("bits", "dB", "of what")


def rows(found: Found) -> list[tuple[str, str, str]]:
    """Return places of the curve, the uniform schemes, and what was chosen."""
    named = [(one, shares(found, one.elements)) for one in thinned(found.curve, ROWS)]
    named += [(one, f"all {name}") for name, one in found.uniform.items()]
    if found.chosen is not None:
        one = found.point(found.chosen.names)
        named.append((one, f"chosen: {shares(found, one.elements)}"))
    named.sort(key=lambda item: item[0].cost)
    return [(f"{found.bits(one.cost):.3f}", _db(found.db(one.error)), what) for one, what in named]


def units_head(found: Found) -> tuple[str, ...]:
    """Return the head of the table of units."""
    names = [one.name for one in found.candidates if not one.keeps]
    return ("unit", "chosen", *(f"{name}, dB" for name in names))


def units(found: Found) -> list[tuple[str, ...]]:
    """Return of each unit what was chosen, and the SQNR of its worst weight in each scheme."""
    names = [one.name for one in found.candidates if not one.keeps]
    listed = []
    for number, score in enumerate(found.scores[:UNITS]):
        chosen = found.chosen.names[number] if found.chosen is not None else ""
        some = [score.choices.get(name) or score.below.get(name) for name in names]
        cells = ["-" if one is None else _db(one.least_db) for one in some]
        listed.append((score.name, chosen, *cells))
    return listed


def summary(found: Found) -> str:
    """Return what was chosen in a sentence."""
    if found.chosen is None:
        return f"{safe(found.source)}: error against bits"
    bits = found.bits(found.chosen.solution.cost)
    db = _db(found.db(found.chosen.solution.error))
    return f"{safe(found.source)} in {bits:.3f} bits for each weight: {db} dB"


def page(found: Found) -> str:
    """Return the curve as HTML."""
    return template("curve.html.j2").render(
        summary=summary(found),
        lines=told.summary(found),
        picture=picture(found),
        head=HEAD,
        rows=rows(found),
        units_head=units_head(found),
        units=units(found),
        more=f"{len(found.scores) - UNITS:,}" if len(found.scores) > UNITS else "",
        recipe=found.chosen.text.splitlines() if found.chosen is not None else [],
    )


def markdown(found: Found) -> str:
    """Return the curve as Markdown."""
    parts = [f"# lowbit recipe auto: {summary(found)}", *told.summary(found)]
    parts += ["## Error against bits", table(HEAD, rows(found))]
    parts += ["## Units", table(units_head(found), units(found))]
    if len(found.scores) > UNITS:
        parts.append(f"and {len(found.scores) - UNITS} more")
    return "\n\n".join(parts) + "\n"


def document(found: Found) -> str:
    """Return all of it as JSON text."""
    return json.dumps(_finite(told.document(found)), indent=1, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


SUFFIXES: Mapping[str, Callable[[Found], str]] = {
    ".html": page,
    ".md": markdown,
    ".json": document,
}


def write_curve(found: Found, path: str | os.PathLike[str]) -> None:
    """Write the report of a search to `path`, over one that is there.

    Raises:
        UsageError, OutputError: see `check_path`; OutputError also where writing fails.
    """
    path = Path(path)
    check_path(path)
    put(SUFFIXES[path.suffix.lower()](found), path)
