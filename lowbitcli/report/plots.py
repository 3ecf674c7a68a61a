"""Pictures as geometry: a histogram of errors, and the range of scales over the weights.

Coordinates are those of an SVG's box, y grows downwards; the template draws what is here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lowbit_kernels.formats import E4M3
from lowbitcli.report import loss
from lowbitcli.report.layers import natural
from lowbitcli.schemes import BY_NAME
from lowbitcli.verify.nouns import Histogram, Verification

WIDTH, HEIGHT = 400, 170
BARS = 300  # of a picture of scales; neighbours are drawn as one where there are more weights
_SUPERSCRIPT = str.maketrans(
    "-0123456789", "\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079"
)
_E4M3_LIMITS = (
    (E4M3.max, "448, the largest E4M3"),
    (2.0**-6, "fewer digits below"),
    (2.0**-9, "the least"),
)


@dataclass(frozen=True)
class Errors:
    """A histogram: paths of the bars within and outside half a gap, its height, and in words."""

    scheme: str
    inside: str
    outside: str
    top: str
    half_gap: str
    told: str
    rows: tuple[tuple[str, str, str], ...]  # from, to, elements


@dataclass(frozen=True)
class Scales:
    """The range of the stored scales of each weight: a path of bars, lines with their labels."""

    scheme: str
    bars: str
    thick: float
    lines: tuple[tuple[float, str], ...]
    limits: tuple[tuple[float, str], ...]
    told: str


def errors(found: Verification) -> list[Errors]:
    """Return a histogram of each scheme that has any element in one."""
    return [_errors(name, one) for name, one in found.errors.items() if sum(one.counts)]


def _errors(scheme: str, histogram: Histogram) -> Errors:
    counts, number = histogram.counts, sum(histogram.counts)
    most, bins = max(counts), len(counts) - 2
    wide = WIDTH / (len(counts) + 1)  # half a bar of room beside those that lie outside

    def bar(at: float, count: int) -> str:
        high = HEIGHT * count / most
        if count and high < 1:
            high = 1.0  # something is there
        return f"M{at * wide:.1f} {HEIGHT}h{wide - 1:.1f}v-{high:.1f}h-{wide - 1:.1f}z"

    inside = "".join(bar(n + 1.5, count) for n, count in enumerate(counts[1:-1]))
    outside = bar(0, counts[0]) + bar(bins + 2, counts[-1])
    beyond = counts[0] + counts[-1]
    quarter = sum(counts[1 + bins * 3 // 8 : 1 + bins * 5 // 8])
    told = f"{quarter / number:.1%} of {number:,} elements are off by a quarter of that or less"
    told += f", {beyond / number:.2%} by more than it: they were clipped." if beyond else "."
    ends = [f"{2 * n / bins - 1:+.4g}" for n in range(bins + 1)]
    rows = [("", ends[0], counts[0]), *zip(ends[:-1], ends[1:], counts[1:-1], strict=True)]
    rows.append((ends[-1], "", counts[-1]))
    return Errors(
        scheme,
        inside,
        outside,
        f"{most / number:.1%}",
        f"{histogram.half_gap:g} step" + ("" if histogram.half_gap == 1 else "s"),
        told,
        tuple((low, high, f"{count:,}") for low, high, count in rows),
    )


def scales(found: Verification) -> list[Scales]:
    """Return the range of scales of each scheme, weights in the order of their layers."""
    by_scheme: dict[str, list[tuple[list[tuple[int, int, str]], float, float]]] = {}
    for row, figures in loss.measured(found):
        least, most = figures.scale_least, figures.scale_most
        if least is not None and most is not None and 0 < least <= most < math.inf:
            ranges = by_scheme.setdefault(row.scheme, [])
            ranges.append((natural(row.name), math.log2(least), math.log2(most)))
    return [
        _scales(scheme, [(low, high) for _, low, high in sorted(ranges)])
        for scheme, ranges in sorted(by_scheme.items())
    ]


def _scales(scheme: str, ranges: Sequence[tuple[float, float]]) -> Scales:
    number = len(ranges)
    told = f"{number:,} weights; scales from {2.0 ** min(x for x, _ in ranges):.4g}"
    told += f" to {2.0 ** max(y for _, y in ranges):.4g}"
    if number > BARS:
        edges = [number * n // BARS for n in range(BARS + 1)]
        pieces = [ranges[a:b] for a, b in pairwise(edges)]
        ranges = [(min(x for x, _ in piece), max(y for _, y in piece)) for piece in pieces]
    of_e4m3 = scheme in BY_NAME and BY_NAME[scheme].scale is E4M3
    limits = [(math.log2(value), text) for value, text in _E4M3_LIMITS if of_e4m3]
    low = min(min(x for x, _ in ranges), *(at for at, _ in limits), math.inf)
    high = max(max(y for _, y in ranges), *(at for at, _ in limits), -math.inf)
    low, high = math.floor(low), math.ceil(high)
    high = max(high, low + 4)

    def y(value: float) -> float:
        return round(HEIGHT * (high - value) / (high - low), 1)

    wide = WIDTH / len(ranges)
    bars = "".join(
        f"M{wide * (n + 0.5):.1f} {y(top) - 1:.1f}V{y(bottom) + 1:.1f}"
        for n, (bottom, top) in enumerate(ranges)
    )
    step = next(n for n in (1, 2, 4, 8, 16, 32, 64, 128) if (high - low) / n <= 6 or n == 128)
    first = step * math.ceil(low / step)
    lines = tuple((y(at), power(at)) for at in range(first, high + 1, step))
    drawn = tuple((y(at), text) for at, text in limits)
    return Scales(scheme, bars, round(min(wide * 0.7, 8), 2), lines, drawn, told)


def power(exponent: int) -> str:
    """Return a power of two as it is written: `2⁻⁶`."""
    return f"2{str(exponent).translate(_SUPERSCRIPT)}"
