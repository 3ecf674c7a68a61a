"""The curve of a search, error against bits, as a page, as Markdown, or as JSON."""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lowbitcli.report.bits import ROWS, Picture, drawn
from lowbitcli.report.markdown import table
from lowbitcli.report.page import template
from lowbitcli.report.write import check_path, put
from lowbitcli.search import told
from lowbitcli.search.nouns import Found, Point
from lowbitcli.search.text import shares, thinned
from lowbitcli.tensors import safe

UNITS = 400  # that are listed; the JSON has all of them


def picture(found: Found) -> Picture | None:
    """Return the picture, None where every error is none."""

    def place(one: Point) -> tuple[float, float]:
        return found.bits(one.cost), found.db(one.error)

    mine = found.point(found.chosen.names) if found.chosen is not None else None
    return drawn(
        [place(one) for one in found.curve if one.error > 0],
        {name: place(one) for name, one in found.uniform.items() if one.error > 0},
        place(mine) if mine is not None and mine.error > 0 else None,
    )


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
        lines=[*told.summary(found), *told.left_out(found)],
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
    parts += told.left_out(found)
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
    target = check_path(path)
    put(SUFFIXES[path.suffix.lower()](found), target)
