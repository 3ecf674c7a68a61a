"""What a search found, in lines for a terminal and as a JSON document."""

import math
from typing import Any

from lowbitcli.search.nouns import Choice, Found, Point, Score
from lowbitcli.search.text import CURVE, aligned, percent, shares, thinned, told_db

_BAR = 24  # characters of the longest bar
_EIGHTHS = " ▏▎▍▌▋▊▉█"
CHOSEN = "<- chosen"


def lines(found: Found) -> list[str]:
    """Return the curve, the uniform schemes and what was chosen."""
    places = [(one, "") for one in thinned(found.curve, CURVE)]
    chosen = found.chosen
    if chosen is not None:
        mine = found.point(chosen.names)
        places = sorted([*places, (mine, CHOSEN)], key=lambda one: (one[0].cost, one[1]))
    finite = [x for x in (found.db(one.error) for one, _ in places) if math.isfinite(x)]
    top = max(finite, default=1.0)
    rows = [("bits", "dB")] + [_figures(found, one) for one, _ in places]
    table = aligned(rows)
    told = [table[0]]
    for (one, mark), line in zip(places, table[1:], strict=True):
        bar = _bar(found.db(one.error), top)
        told.append(f"{line}  {bar}  {shares(found, one.elements)}  {mark}".rstrip())
    told += ["", *aligned([(*_figures(found, p), f"all {n}") for n, p in found.uniform.items()])]
    told += left_out(found)
    return told if chosen is None else [*told, "", *summary(found)]


def left_out(found: Found) -> list[str]:
    """Return which schemes the container cannot hold, and why."""
    return [f"left out: {name}: {why}" for name, why in found.left_out.items()]


def summary(found: Found) -> list[str]:
    """Return what was chosen, in two lines."""
    chosen = found.chosen
    if chosen is None:
        return []
    solution = chosen.solution
    gap = "the least there is" if solution.gap == 0 else f"at most {percent(solution.gap)} above it"
    return [
        f"{found.bits(solution.cost):.4f} bits for each of {found.elements:,} weights, "
        f"{told_db(found.db(solution.error))} over {found.matrices} matrices; error: {gap}",
        f"{found.bytes_in / 1e6:,.1f} MB become {chosen.bytes_out / 1e6:,.1f} MB, "
        f"with what is kept ({found.container})",
    ]


def _figures(found: Found, one: Point) -> tuple[str, str]:
    db = found.db(one.error)
    return f"{found.bits(one.cost):.3f}", f"{db:.2f}" if math.isfinite(db) else "exact"


def _bar(db: float, top: float) -> str:
    """Return a bar as long as a figure is of the largest, filled up with spaces."""
    eighths = round(8 * _BAR * max(0.0, min(1.0, db / top))) if top > 0 else 0
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(_BAR)


def document(found: Found) -> dict[str, Any]:
    """Return everything as a JSON document holds it."""
    chosen, wanted = found.chosen, found.wanted
    said: dict[str, Any] = {
        "source": found.source,
        "container": found.container,
        "schemes": [one.name for one in found.candidates],
        "left_out": dict(found.left_out),
        "notes": list(found.notes),
        "floor_db": wanted.floor_db,
        "elements": found.elements,
        "matrices": found.matrices,
        "bytes_in": found.bytes_in,
        "numbers_sha256": found.digest,
        "importance": found.importance,
        "curve": [_point(found, one) for one in found.curve],
        "uniform": {name: _point(found, one) for name, one in found.uniform.items()},
        "units": [
            _unit(score, chosen.names[n] if chosen else None)
            for n, score in enumerate(found.scores)
        ],
        "chosen": None,
        "seconds": found.seconds,
        "stages": dict(found.stages or {}),
        "peak_rss": found.peak_rss,
        "peak_gpu": found.peak_gpu,
    }
    if chosen is not None:
        solution = chosen.solution
        said["chosen"] = {
            **_point(found, found.point(chosen.names)),
            "budget_bits": wanted.bits,
            "budget_bytes": wanted.size,
            "bytes_out": chosen.bytes_out,
            "least_error": solution.bound,
            "gap": solution.gap,
            "recipe": chosen.text,
        }
    return said


def _point(found: Found, one: Point) -> dict[str, Any]:
    return {
        "bits": found.bits(one.cost),
        "bytes": one.cost,
        "error": one.error,
        "db": found.db(one.error),
        "elements": dict(one.elements),
    }


def _unit(score: Score, name: str | None) -> dict[str, Any]:
    return {
        "name": score.name,
        "weights": list(score.members),
        "elements": score.elements,
        "matrices": score.matrices,
        "chosen": name,
        "choices": {n: _choice(one, below=False) for n, one in score.choices.items()}
        | {n: _choice(one, below=True) for n, one in score.below.items()},
    }


def _choice(one: Choice, *, below: bool) -> dict[str, Any]:
    return {
        "bytes": one.cost,
        "error": one.error,
        "least_db": one.least_db,
        "below_floor": below,
    }


__all__ = ["document", "lines", "summary"]
