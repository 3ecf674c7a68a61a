"""The curve of error against bits as a picture: of a search, and of a checkpoint whose manifest
tells by what its recipe was chosen.

Coordinates are those of an SVG's box, y grows downwards; bits are drawn on a scale of ratios. A
place is bits for each weight and dB.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pydantic import ValidationError

from lowbitcli.recipe.measured import Measured
from lowbitcli.verify.nouns import Verification

WIDTH, HEIGHT = 400, 220
ROWS = 17  # of a table
_LABEL, _LINE = 90, 15  # how wide and high what is written beside a mark may be
_BITS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64)
Place = tuple[float, float]


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


def drawn(
    curve: Sequence[Place], uniform: Mapping[str, Place], chosen: Place | None
) -> Picture | None:
    """Return the picture of places whose dB are finite, None where the curve has none."""
    if not curve:
        return None
    every = [*curve, *uniform.values(), *([chosen] if chosen is not None else [])]
    low, high = (math.log2(pick(bits for bits, _ in every)) for pick in (min, max))
    high = max(high, low + 0.01)
    floor = math.floor(min(db for _, db in every) / 5 - 0.5) * 5
    top = max(math.ceil(max(db for _, db in every) / 5) * 5, floor + 5)

    def x(bits: float) -> float:
        return round(WIDTH * (math.log2(bits) - low) / (high - low), 1)

    def y(db: float) -> float:
        return round(HEIGHT * (top - db) / (top - floor), 1)

    def mark(one: Place, label: str) -> Mark:
        return Mark(x(one[0]), y(one[1]), label, x(one[0]) > WIDTH / 2, y(one[1]) + 14)

    step = 5 if top - floor <= 30 else 10
    names = ", ".join(f"{name} {figures(one)}" for name, one in uniform.items())
    return Picture(
        "M" + "L".join(f"{x(bits)} {y(db)}" for bits, db in curve),
        _apart([mark(one, f"all {name}") for name, one in uniform.items()]),
        mark(chosen, "chosen") if chosen is not None else None,
        tuple((x(n), str(n)) for n in _BITS if low <= math.log2(n) <= high),
        tuple((y(n), str(n)) for n in range(-(-floor // step) * step, top + 1, step)),
        f"from {figures(curve[0])} to {figures(curve[-1])}; {names}",
    )


def _apart(marks: Sequence[Mark]) -> tuple[Mark, ...]:
    """Return marks with what is written beside them one below the other, where it would overlap."""
    placed: list[Mark] = []
    for one in sorted(marks, key=lambda mark: (mark.at, mark.x)):
        near = [x.at for x in placed if x.left == one.left and abs(x.x - one.x) < _LABEL]
        at = max([one.at, *(height + _LINE for height in near if height + _LINE > one.at)])
        placed.append(replace(one, at=round(at, 1)))
    return tuple(placed)


def figures(one: Place) -> str:
    return f"{one[0]:.2f} bits, {one[1]:.2f} dB"


@dataclass(frozen=True)
class Budget:
    """By what the recipe of a checkpoint was chosen: a picture, what was chosen in words, and rows
    of bits, dB and what has them."""

    picture: Picture
    told: str
    rows: tuple[tuple[str, str, str], ...]


def budget(found: Verification) -> Budget | None:
    """Return by what a checkpoint's recipe was chosen, None where its manifest does not say."""
    recipe = (found.manifest or {}).get("recipe")
    try:
        said = Measured.model_validate(recipe["measured"] if isinstance(recipe, dict) else None)
    except (KeyError, ValidationError):
        return None
    every = [*said.curve, *said.uniform.values(), *([said.chosen] if said.chosen else [])]
    if not all(0 < bits < 1e4 and abs(db) < 1e4 for bits, db in every):
        return None  # no curve that was measured
    picture = drawn(said.curve, said.uniform, said.chosen)
    if picture is None:
        return None
    step = max(1, -(-len(said.curve) // ROWS))
    rows = [(one, "the least error") for one in said.curve[::step]]
    rows += [(one, f"all {name}") for name, one in said.uniform.items()]
    rows += [(said.chosen, "chosen")] if said.chosen is not None else []
    rows.sort(key=lambda row: row[0])
    told = figures(said.chosen) if said.chosen is not None else ""
    return Budget(picture, told, tuple((f"{x:.3f}", f"{y:.2f}", what) for (x, y), what in rows))


__all__ = ["HEIGHT", "ROWS", "WIDTH", "Budget", "Mark", "Picture", "budget", "drawn"]
