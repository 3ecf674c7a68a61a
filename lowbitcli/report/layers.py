"""Weights by layer and kind, as their names tell it: rows and columns of the map of SQNR.

    model.layers.12.mlp.experts.7.up_proj.weight
    stack `model.layers`, layer 12, kind `mlp.experts.*.up_proj`

A cell is the weight of the lowest SQNR among those of its layer and kind.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lowbitcli.report import loss
from lowbitcli.verify.nouns import Figures, Verification, WeightRow

CELLS = 1600  # of all maps together
KINDS = 32  # of one map
STEPS = 7
NARROW = 0.5  # dB; the least width of a step, so that what is alike looks alike

Pair = tuple[WeightRow, Figures]


class Place(NamedTuple):
    """Where a weight is: `layer` is None where its name has no number."""

    stack: str
    layer: int | None
    kind: str


@dataclass(frozen=True)
class Cell:
    """The lowest SQNR of `number` weights; `step` is its colour, 0 the worst, None for no error."""

    text: str
    step: int | None
    number: int


@dataclass(frozen=True)
class Map:
    """The map of one stack: a row for each layer, a cell for each kind, and the total of both."""

    stack: str
    kinds: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell | None, ...], str], ...]
    totals: tuple[str, ...]
    left_out: int  # layers that are not shown, better than those that are
    kinds_left_out: int


@dataclass(frozen=True)
class Maps:
    """All maps, with one scale of colours: `legend` has the bounds in dB of each step."""

    maps: tuple[Map, ...]
    legend: tuple[str, ...]
    is_many: bool  # has any cell more than one weight?


def place(name: str) -> Place:
    """Return where the weight of this name is."""
    parts = name.removesuffix(".weight").split(".")
    numbers = [_is_number(part) for part in parts]
    if not any(numbers):
        return Place("", None, ".".join(parts))
    at = numbers.index(True)
    kind = ".".join("*" if _is_number(part) else part for part in parts[at + 1 :])
    return Place(".".join(parts[:at]), int(parts[at]), kind or "weight")


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdecimal() and len(part) < 10


def maps(found: Verification) -> Maps | None:
    """Return the maps of all weights that were measured, None where none was."""
    pairs = loss.measured(found)
    if not pairs:
        return None
    stacks: dict[str, dict[int | None, dict[str, list[Pair]]]] = {}
    for pair in pairs:
        at = place(pair[0].name)
        layers = stacks.setdefault(at.stack, {})
        layers.setdefault(at.layer, {}).setdefault(at.kind, []).append(pair)
    scale = Scale.over(figures.sqnr_db for _, figures in pairs)
    shown, left = [], CELLS
    for stack in sorted(stacks, key=lambda name: (name == "", name)):
        one, used = _map(stack, stacks[stack], scale, left)
        left -= used
        shown.append(one)
    is_many = any(
        cell is not None and cell.number > 1 for one in shown for _, cells, _ in one.rows
        for cell in cells
    )  # fmt: skip
    is_any = any(math.isfinite(figures.sqnr_db) for _, figures in pairs)
    return Maps(tuple(shown), scale.legend if is_any else (), is_many)


@dataclass(frozen=True)
class Scale:
    """Steps of equal width that end at the highest SQNR and begin at the lowest, or below it."""

    low: float
    width: float

    @classmethod
    def over(cls, values: Iterable[float]) -> "Scale":
        finite = [value for value in values if math.isfinite(value)]
        low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
        width = max((high - low) / STEPS, NARROW)
        return cls(high - STEPS * width, width)

    def step(self, value: float) -> int | None:
        if math.isnan(value) or value == -math.inf:
            return 0
        if value == math.inf:
            return None
        return max(0, min(STEPS - 1, int((value - self.low) / self.width)))

    @property
    def legend(self) -> tuple[str, ...]:
        return tuple(
            f"{self.low + n * self.width:.1f}\N{EN DASH}{self.low + (n + 1) * self.width:.1f}"
            for n in range(STEPS)
        )


def _map(
    stack: str, layers: dict[int | None, dict[str, list[Pair]]], scale: Scale, left: int
) -> tuple[Map, int]:
    """Return the map of a stack with at most `left` cells, and how many it has."""
    by_kind: dict[str, list[Pair]] = {}
    for kinds in layers.values():
        for kind, pairs in kinds.items():
            by_kind.setdefault(kind, []).extend(pairs)
    if stack == "":  # nothing to be set against each other: one below the other
        layers = {number: {"SQNR": by_kind[kind]} for number, kind in enumerate(sorted(by_kind))}
        labels: dict[int | None, str] = dict(enumerate(sorted(by_kind)))
        by_kind = {"SQNR": [pair for pairs in by_kind.values() for pair in pairs]}
    else:
        labels = {number: str(number) for number in layers}
    kinds = sorted(by_kind, key=lambda kind: _worst(by_kind[kind]))[:KINDS]
    kinds.sort()
    fits = max(0, left // max(1, len(kinds)))
    numbers = sorted(layers, key=lambda n: _worst([p for x in layers[n].values() for p in x]))
    numbers = sorted(numbers[:fits], key=lambda n: -1 if n is None else n)
    rows = tuple(
        (
            labels[number],
            tuple(_cell(layers[number].get(kind), scale) for kind in kinds),
            _total([pair for pairs in layers[number].values() for pair in pairs]),
        )
        for number in numbers
    )
    totals = tuple(_total(by_kind[kind]) for kind in kinds)
    one = Map(
        stack, tuple(kinds), rows, totals, len(layers) - len(rows), len(by_kind) - len(kinds)
    )  # fmt: skip
    return one, len(rows) * len(kinds)


def _worst(pairs: Sequence[Pair]) -> float:
    return min(loss.key(figures.sqnr_db) for _, figures in pairs)


def _cell(pairs: Sequence[Pair] | None, scale: Scale) -> Cell | None:
    if not pairs:
        return None
    value = min((figures.sqnr_db for _, figures in pairs), key=loss.key)
    return Cell(short(value), scale.step(value), len(pairs))


def _total(pairs: Sequence[Pair]) -> str:
    found = loss.total(figures for _, figures in pairs)
    return "" if found is None else short(found.sqnr_db)


def short(sqnr_db: float) -> str:
    """Return an SQNR without its unit, for a cell."""
    if math.isinf(sqnr_db):
        return "\N{INFINITY}" if sqnr_db > 0 else "\N{MINUS SIGN}\N{INFINITY}"
    return "NaN" if math.isnan(sqnr_db) else f"{sqnr_db:.1f}"


def natural(name: str) -> list[tuple[int, int, str]]:
    """Return a key that sorts `layers.2` before `layers.10`."""
    return [
        (0, int(part), "") if part.isdecimal() and len(part) < 19 else (1, 0, part)
        for part in name.split(".")
    ]
