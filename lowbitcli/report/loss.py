"""What was lost, over many weights: overall, by kind, the worst, and why they are.

norm of all errors = sqrt(sum (relative * norm)^2)      SQNR = 20 log10(norm / norm of errors)
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from lowbitcli.verify.nouns import Figures, Verification, WeightRow

MANY = 1.5  # times the median share of zeros made: outliers have coarsened many blocks
SINGLE = 0.1  # of a weight's squared error in one block
FEW = 1e-3  # share of blocks or elements from which on losing them is worth a word


@dataclass(frozen=True)
class Total:
    """The error of several weights together."""

    number: int
    relative: float
    sqnr_db: float


def measured(found: Verification) -> list[tuple[WeightRow, Figures]]:
    """Return the weights that were compared, with their figures."""
    return [(row, row.figures) for row in found.weights if row.figures is not None]


def total(figures: Iterable[Figures]) -> Total | None:
    """Return the error of weights together; None where there are none, or norms are not known."""
    known = [one for one in figures if not math.isnan(one.norm)]
    if not known:
        return None
    signal = math.fsum(one.norm**2 for one in known)
    error = math.fsum((one.relative * one.norm) ** 2 for one in known if one.norm)
    if error == 0:
        return Total(len(known), 0.0, math.inf)
    if not math.isfinite(error):
        return Total(len(known), error, -error)
    return Total(len(known), math.sqrt(error / signal), 10 * math.log10(signal / error))


def least(rows: Iterable[tuple[WeightRow, Figures]]) -> tuple[WeightRow, Figures] | None:
    """Return the weight with the lowest SQNR; NaN is lower than any."""
    return min(rows, key=lambda pair: (key(pair[1].sqnr_db), pair[0].name), default=None)


def key(sqnr_db: float) -> float:
    """Return what an SQNR is sorted by: NaN is worse than anything."""
    return -math.inf if math.isnan(sqnr_db) else sqnr_db


def share(count: int | None, row: WeightRow) -> float | None:
    """Return a number of elements as a share of a weight's."""
    return None if count is None else count / max(1, math.prod(row.shape))


class Reasons:
    """Why weights lost more than others of their scheme."""

    def __init__(self, found: Verification) -> None:
        self._rows = measured(found)

    @cached_property
    def _medians(self) -> dict[str, tuple[float, float]]:
        """Return scheme -> (median SQNR, median share of zeros made)."""
        by_scheme: dict[str, list[tuple[float, float]]] = {}
        for row, figures in self._rows:
            if math.isfinite(figures.sqnr_db):
                pair = figures.sqnr_db, share(figures.zeros, row) or 0.0
                by_scheme.setdefault(row.scheme, []).append(pair)
        return {
            scheme: (median(x for x, _ in pairs), median(y for _, y in pairs))
            for scheme, pairs in by_scheme.items()
        }

    def of(self, row: WeightRow, figures: Figures) -> str:
        """Return why this weight lost what it lost, in a few words."""
        if not math.isfinite(figures.relative):
            return "values that are not finite"
        middle, usual = self._medians.get(row.scheme, (figures.sqnr_db, 0.0))
        told = [*_lost(row, figures), *_outliers(row, figures, usual)]
        below = middle - figures.sqnr_db
        if not told and math.isfinite(below):
            alike = "like the others" if below < 1 else ""
            apart = f"{below:.1f} dB below the median" if below >= 0.05 else ""
            return ", ".join(filter(None, (alike, apart)))
        return "; ".join(told) or "like the others"


def _lost(row: WeightRow, figures: Figures) -> list[str]:
    told = []
    blocks = figures.blocks or 0
    if figures.outside:
        told.append(f"{figures.outside:,} elements outside their interval")
    if figures.underflow_blocks and figures.underflow_blocks >= FEW * blocks:
        part = figures.underflow_blocks / blocks
        told.append(f"underflow: {part:.1%} of its blocks are lost")
    return told


def _outliers(row: WeightRow, figures: Figures, usual: float) -> list[str]:
    told = []
    zeros = share(figures.zeros, row)
    if zeros is not None and zeros > MANY * usual and zeros > FEW:
        told.append(f"outliers: {zeros:.1%} became zero (median {usual:.1%})")
    worst = figures.worst_block
    if worst is not None and figures.blocks and figures.blocks > 10:
        part = worst.times / figures.blocks
        if part >= SINGLE:
            told.append(f"one block has {part:.0%} of the error")
    return told


def worst_blocks(found: Verification, number: int = 20) -> list[tuple[WeightRow, Figures]]:
    """Return the weights whose worst block stands out most from their others, one block of each.

    Only blocks are told of that are a small part of their weight: of a scheme with a scale for each
    row or matrix that is a row.
    """
    rows = [pair for pair in measured(found) if pair[1].worst_block is not None]
    rows.sort(key=lambda pair: (-_times(pair[1]), pair[0].name))
    return rows[:number]


def _times(figures: Figures) -> float:
    worst = figures.worst_block
    return 0.0 if worst is None or math.isnan(worst.times) else worst.times


def place(where: Sequence[int], shape: tuple[int, int]) -> str:
    """Return where a block is: `row 12, columns 32-47`, with the matrix of a stack before it."""
    *lead, row, col = where
    told = f"{_span('row', row, shape[0])}, {_span('column', col, shape[1])}"
    return f"matrix {', '.join(map(str, lead))}, {told}" if lead else told


def _span(what: str, start: int, number: int) -> str:
    if number == 1:
        return f"{what} {start:,}"
    return f"{what}s {start:,}\N{EN DASH}{start + number - 1:,}"
