"""From what was measured to what may be chosen, and to the curve of error against bits."""

import math
import re
from collections.abc import Mapping, Sequence

from lowbit_kernels.error import Sums
from lowbitcli.errors import UnsupportedError
from lowbitcli.plan.nouns import Weight
from lowbitcli.search.knapsack import Item, Walk, walk
from lowbitcli.search.measure import Measured
from lowbitcli.search.nouns import Choice, Point, Score, point
from lowbitcli.search.units import Unit
from lowbitcli.tensors import safe

POINTS = 49  # of the curve, at most
_EXPERT = re.compile(r"(?<=\.experts\.)[0-9]+(?=\.)")


def scores(units: Sequence[Unit], measured: Measured, floor_db: float | None) -> tuple[Score, ...]:
    """Return what may be chosen for each unit.

    Raises:
        UnsupportedError: nothing reaches the floor for one of them.
    """
    floor = -math.inf if floor_db is None else floor_db
    return tuple(_score(unit, measured, floor) for unit in units)


def _score(unit: Unit, measured: Measured, floor_db: float) -> Score:
    matrices = max(len(_matrices(weights, {})) for weights in unit.weights.values())
    choices, below = {}, {}
    for name, weights in unit.weights.items():
        found = measured.lost.get(name, {})
        sums = [found.get(weight.name, Sums()) for weight in weights]
        error = math.fsum(
            _relative(one)
            for one in _matrices(weights, {**found, **measured.weighed.get(name, {})}).values()
        )
        least = min((one.sqnr_db for one in sums), default=math.inf)
        choice = Choice(unit.costs[name], error, least)
        (choices if least >= floor_db else below)[name] = choice
    if not choices:
        name, best = max(below.items(), key=lambda item: item[1].least_db)
        raise UnsupportedError(
            f"no scheme reaches {floor_db:g} dB for {safe(unit.name)}: "
            f"{name} comes nearest, with {best.least_db:.1f} dB",
            hint="add keep to --schemes, or ask for a lower --floor-db",
        )
    kept = sum(weight.bytes_out for weight in unit.kept)
    return Score(unit.name, unit.members, unit.elements, matrices, kept, choices, below)


def _matrices(weights: Sequence[Weight], lost: Mapping[str, Sums]) -> dict[str, Sums]:
    """Return the sums of each matrix, those of the experts of one projection together."""
    found: dict[str, Sums] = {}
    for weight in weights:
        key = _EXPERT.sub("*", weight.name)
        found[key] = found.get(key, Sums()).plus(lost.get(weight.name, Sums()))
    return found


def _relative(one: Sums) -> float:
    if one.error == 0:
        return 0.0
    return one.error / one.signal if one.signal else math.inf


def items(found: Sequence[Score]) -> list[list[Item]]:
    """Return the scores as the classes of a knapsack, choices in their order."""
    return [[(one.cost, one.error) for one in score.choices.values()] for score in found]


def chosen_names(found: Sequence[Score], places: Sequence[int]) -> tuple[str, ...]:
    """Return the candidate of each unit from its place among the choices."""
    return tuple(tuple(score.choices)[n] for score, n in zip(found, places, strict=True))


def uniform(found: Sequence[Score], name: str, keep: str) -> Point:
    """Return what one scheme for all comes to, whether or not it reaches the floor; what it is no
    choice for stays as it is."""
    cost, errors = 0, []
    elements: dict[str, int] = {}
    for score in found:
        choice = score.choices.get(name) or score.below.get(name)
        cost += choice.cost if choice else score.kept
        errors.append(choice.error if choice else 0.0)
        label = name if choice else keep
        elements[label] = elements.get(label, 0) + score.elements
    return Point(cost, math.fsum(errors), elements)


def curve(found: Sequence[Score]) -> tuple[Point, ...]:
    """Return places from the least bytes to the least error, by equal ratios of bytes, each the
    best for its own."""
    stops: Walk = walk(items(found))
    last = len(stops.costs) - 1
    low, high = stops.costs[0], stops.costs[last]
    wanted, stop = [0], 0
    for number in range(1, POINTS - 1):
        due = low * (high / low) ** (number / (POINTS - 1))
        while stop < last and stops.costs[stop + 1] <= due:
            stop += 1
        wanted.append(stop)
    wanted.append(last)
    return tuple(point(found, chosen_names(found, stops.at(n))) for n in dict.fromkeys(wanted))


__all__ = ["chosen_names", "curve", "items", "scores", "uniform"]
