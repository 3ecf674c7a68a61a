"""A verification as one HTML page that needs nothing else: no script, no font, no image from
outside."""

import math
from dataclasses import dataclass
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined

from lowbitcli.report import words
from lowbitcli.tensors import safe
from lowbitcli.verify.nouns import Verification, WeightRow

PROBLEMS = 200  # that are listed
NAMES = 400  # of tensors that were kept, over all reasons
DOTS = 2000  # of the picture; more weights than that are thinned, the worst stay


@dataclass(frozen=True)
class Dot:
    """One weight in the picture: where it is, what it says when pointed at, its colour."""

    x: float
    y: float
    title: str
    kind: int


@dataclass(frozen=True)
class Picture:
    """SQNR over the weights in order: dots in a box of `width` by `height`, lines at round dB."""

    width: int
    height: int
    dots: tuple[Dot, ...]
    lines: tuple[tuple[float, str], ...]
    kinds: tuple[str, ...]
    left_out: int
    without_error: int


def page(found: Verification) -> str:
    """Return the whole report as HTML."""
    return _template().render(
        found=found,
        verdict=words.verdict(found),
        facts=words.facts(found),
        problems=found.problems[:PROBLEMS],
        more=max(0, len(found.problems) - PROBLEMS),
        checks=words.checks(found),
        schemes=words.schemes(found),
        worst_head=words.WORST_HEAD,
        worst=words.worst(found),
        kept=_kept(found),
        picture=picture(found),
    )


@cache
def _template():
    environment = Environment(
        loader=PackageLoader("lowbitcli", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: safe(value) if isinstance(value, str) else value,
    )
    return environment.get_template("page.html.j2")


def _kept(found: Verification) -> list[tuple[str, int, list[str]]]:
    """Return (reason, number, names) with no more than NAMES names in all."""
    left, rows = NAMES, []
    for reason, tensors in words.kept(found):
        names = [f"{one.name}  {one.dtype} {list(one.shape)}" for one in tensors[:left]]
        left -= len(names)
        rows.append((reason, len(tensors), names))
    return rows


def picture(found: Verification, width: int = 1000, height: int = 260) -> Picture | None:
    """Return the picture of SQNR per weight, None where nothing was measured.

    Names are in the order of their layers: numbers in them count as numbers.
    """
    measured = [row for row in found.weights if row.figures is not None]
    finite = [row for row in measured if math.isfinite(_sqnr(row))]
    if not finite:
        return None
    shown = finite
    if len(finite) > DOTS:
        shown = sorted(finite, key=lambda row: (_sqnr(row), row.name))[:DOTS]
    shown = sorted(shown, key=lambda row: _natural(row.name))
    kinds = tuple(sorted({row.scheme or row.how for row in shown}))
    low = 5 * math.floor(min(map(_sqnr, shown)) / 5)
    high = max(5 * math.ceil(max(map(_sqnr, shown)) / 5), low + 5)
    step = next(n for n in (5, 10, 20, 50, 100, 1000) if (high - low) / n <= 8 or n == 1000)

    def y(value: float) -> float:
        return round(height * (high - value) / (high - low), 1)

    dots = tuple(
        Dot(
            round(width * (number + 0.5) / len(shown), 1),
            y(_sqnr(row)),
            f"{row.name}: {words.decibels(_sqnr(row))}",
            kinds.index(row.scheme or row.how),
        )
        for number, row in enumerate(shown)
    )
    first = step * math.ceil(low / step)
    lines = tuple((y(value), f"{value} dB") for value in range(first, high + 1, step))
    left_out = len(finite) - len(shown)
    return Picture(width, height, dots, lines, kinds, left_out, len(measured) - len(finite))


def _sqnr(row: WeightRow) -> float:
    return row.figures.sqnr_db if row.figures is not None else math.nan


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Return a key that sorts `layers.2` before `layers.10`."""
    return [
        (0, int(part), "") if part.isdecimal() and len(part) < 19 else (1, 0, part)
        for part in name.split(".")
    ]
