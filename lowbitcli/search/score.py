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
    matrices = 0
    choices, below = {}, {}
    for name, weights in unit.weights.items():
        lost = measured.lost.get(name, {})
        own = measured.weighed.get(name, {})
        found = {w.name: one for w in weights if (one := lost.get(w.name)) is not None}
        together = _matrices(weights)
        matrices = max(matrices, len(together))
        weighed = {name: own.get(name, one) for name, one in found.items()}
        error = math.fsum(_relative(names, weighed) for names in together.values())
        least = min((one.sqnr_db for one in found.values()), default=math.inf)
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


def _matrices(weights: Sequence[Weight]) -> dict[str, list[str]]:
    """Return the names of weights by matrix, those of the experts of one projection together."""
    found: dict[str, list[str]] = {}
    for weight in weights:
        found.setdefault(_EXPERT.sub("*", weight.name), []).append(weight.name)
    return found


def _relative(names: Sequence[str], lost: Mapping[str, Sums]) -> float:
    """Return the squared error of a matrix over its squares."""
    some = [lost[name] for name in names if name in lost]
    error = math.fsum(one.error for one in some)
    if error == 0:
        return 0.0
    signal = math.fsum(one.signal for one in some)
    return error / signal if signal else math.inf


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
