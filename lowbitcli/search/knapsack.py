"""The multiple-choice knapsack: one item of each class, the least error in all, within a budget.

    minimize    sum_i error[i, x_i]      subject to    sum_i cost[i, x_i] <= budget
    bound       L(p) = sum_i min_j (error[i, j] + p cost[i, j]) - p budget     for any price p >= 0

L(p) is below every solution's error (Lagrange); the largest is that of the p at which the greedy
walk breaks off: from the cheapest items along the lower convex hulls of the classes, steepest step
first. Each stop of that walk is the best there is for its own cost, and what it stops with before
the budget, filled up with later steps that still fit, is the first solution. An item whose loss at
p, error + p cost less the least of its class, is more than the gap cannot be in a better one. Over
what is left the sets of classes are gone through one by one with all their states (cost, error) of
which none is better in both, less those that the bound rules out: where there was room for all of
them, what is found is the least error there is.
Source: Sinha and Zoltners 1979 (hull, walk); Dyer, Riha and Walker 1995 (states with bounds).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

STATES = 1 << 15  # of one set of classes
_KEPT = 1 << 23  # states over all sets, whose way back is remembered
_CLOSE = 1e-12  # relative: sums of fp64 in another order differ by less

Item = tuple[int, float]  # cost, error


@dataclass(frozen=True)
class Solution:
    """The item of each class, what they cost, their error, and what no solution is below; with
    `is_proved` that is the error itself, but for roundings."""

    chosen: tuple[int, ...]
    cost: int
    error: float
    bound: float
    is_proved: bool

    @property
    def gap(self) -> float:
        """How far the error may be above the least one, relative to that."""
        if self.is_proved or self.error <= self.bound:
            return 0.0
        return self.error / self.bound - 1 if self.bound > 0 else math.inf


@dataclass(frozen=True)
class Walk:
    """The stops of the greedy walk, cheapest first: (cost, error) of each, and which class went to
    which item in the step to it; `first` are the cheapest items."""

    first: tuple[int, ...]
    steps: tuple[tuple[int, int], ...]
    costs: tuple[int, ...]
    errors: tuple[float, ...]

    def at(self, stop: int) -> tuple[int, ...]:
        """Return the items at a stop."""
        chosen = list(self.first)
        for one, item in self.steps[:stop]:
            chosen[one] = item
        return tuple(chosen)


def pareto(items: Sequence[Item]) -> list[int]:
    """Return the items of which none other is as good in both, cheapest first."""
    found: list[int] = []
    for index in sorted(range(len(items)), key=lambda n: (*items[n], n)):
        if not found or items[index][1] < items[found[-1]][1]:
            found.append(index)
    return found


def hull(items: Sequence[Item]) -> list[int]:
    """Return the items on the lower convex hull, cheapest first."""
    found: list[int] = []
    for index in pareto(items):
        while len(found) > 1 and _gain(items, found[-1], index) >= _gain(items, *found[-2:]):
            found.pop()
        found.append(index)
    return found


def _gain(items: Sequence[Item], one: int, other: int) -> float:
    """Return by how much the error falls for each unit of cost, from one item to a dearer one."""
    return (items[one][1] - items[other][1]) / (items[other][0] - items[one][0])


def walk(classes: Sequence[Sequence[Item]]) -> Walk:
    """Return the greedy walk from the cheapest items to the best.

    Raises:
        ValueError: a class has no item.
    """
    hulls = [hull(items) for items in classes]
    if not all(hulls):
        raise ValueError("a class has no item")
    steps = sorted(
        (-_gain(classes[one], a, b), one, place, b)
        for one, found in enumerate(hulls)
        for place, (a, b) in enumerate(pairwise(found))
    )
    now = [found[0] for found in hulls]
    first = tuple(now)
    costs = [sum(classes[one][item][0] for one, item in enumerate(now))]
    errors = [math.fsum(classes[one][item][1] for one, item in enumerate(now))]
    for _, one, _, item in steps:
        costs.append(costs[-1] + classes[one][item][0] - classes[one][now[one]][0])
        errors.append(errors[-1] + (classes[one][item][1] - classes[one][now[one]][1]))
        now[one] = item
    return Walk(first, tuple((one, item) for _, one, _, item in steps), tuple(costs), tuple(errors))


def solve(classes: Sequence[Sequence[Item]], budget: int, states: int = STATES) -> Solution | None:
    """Return the items of the least error within a budget, as far as `states` at a time show it;
    None where even the cheapest are beyond it.

    Raises:
        ValueError: a class has no item.
    """
    stops = walk(classes)
    if stops.costs[0] > budget:
        return None
    stop = max(n for n, cost in enumerate(stops.costs) if cost <= budget)
    if stop == len(stops.steps):
        best = stops.at(stop)
        return _solution(classes, best, None)
    one, item = stops.steps[stop]
    before = stops.at(stop)
    price = _gain(classes[one], before[one], item)
    found = _filled(classes, before, stops.steps[stop:], budget)
    bound = _bound(classes, price, budget)
    better, is_proved = _improved(classes, found, price, bound, budget, states)
    return _solution(classes, better, None if is_proved else bound)


def _solution(
    classes: Sequence[Sequence[Item]], chosen: Sequence[int], bound: float | None
) -> Solution:
    cost = sum(classes[one][item][0] for one, item in enumerate(chosen))
    error = _error(classes, chosen)
    if bound is not None and bound >= error * (1 - _CLOSE):
        bound = None
    return Solution(
        tuple(chosen), cost, error, error if bound is None else max(0.0, bound), bound is None
    )


def _error(classes: Sequence[Sequence[Item]], chosen: Sequence[int]) -> float:
    return math.fsum(classes[one][item][1] for one, item in enumerate(chosen))


def _bound(classes: Sequence[Sequence[Item]], price: float, budget: int) -> float:
    return math.fsum(
        [min(error + price * cost for cost, error in items) for items in classes]
        + [-price * budget]
    )


def _filled(
    classes: Sequence[Sequence[Item]],
    chosen: Sequence[int],
    steps: Sequence[tuple[int, int]],
    budget: int,
) -> list[int]:
    """Go on with the steps that fit, then with any single item that does, the best gain first."""
    now = list(chosen)
    room = budget - sum(classes[one][item][0] for one, item in enumerate(now))
    for one, item in steps:
        cost = classes[one][item][0] - classes[one][now[one]][0]
        if cost <= room and classes[one][item][1] < classes[one][now[one]][1]:
            room, now[one] = room - cost, item
    moves = sorted(
        (error - classes[one][now[one]][1], one, item)
        for one, items in enumerate(classes)
        for item, (_, error) in enumerate(items)
    )
    for _, one, item in moves:
        cost = classes[one][item][0] - classes[one][now[one]][0]
        if cost <= room and classes[one][item][1] < classes[one][now[one]][1]:
            room, now[one] = room - cost, item
    return now


def _improved(
    classes: Sequence[Sequence[Item]],
    found: Sequence[int],
    price: float,
    bound: float,
    budget: int,
    states: int,
) -> tuple[list[int], bool]:
    """Look for something better than `found`; return the best, and whether nothing is better."""
    best = _error(classes, found)
    gap = best * (1 - _CLOSE) - bound
    if gap <= 0:
        return list(found), True
    losses = [_losses(items, price) for items in classes]
    left = [
        [n for n in pareto(items) if losses[one][n] <= gap] for one, items in enumerate(classes)
    ]
    if not all(left):
        return list(found), True
    is_open = [one for one, some in enumerate(left) if len(some) > 1]
    # Sets whose second choice loses most come first: few of their states live on.
    is_open.sort(key=lambda one: (-sorted(losses[one][n] for n in left[one])[1], one))
    fixed = [some[0] for some in left]
    closed = [one for one, some in enumerate(left) if len(some) == 1]
    room = budget - sum(classes[one][fixed[one]][0] for one in closed)
    sets = [[(*classes[one][n], losses[one][n]) for n in left[one]] for one in is_open]
    limit = max(1, min(states, _KEPT // max(1, len(sets))))
    places, is_whole = _states(sets, room, gap, limit)
    if places is None:
        return list(found), is_whole
    for one, place in zip(is_open, places, strict=True):
        fixed[one] = left[one][place]
    return (fixed if _error(classes, fixed) < best else list(found)), is_whole


def _losses(items: Sequence[Item], price: float) -> list[float]:
    """Return by how much more each item costs in all, at a price, than the cheapest so."""
    whole = [error + price * cost for cost, error in items]
    least = min(whole)
    return [one - least for one in whole]


def _states(
    sets: Sequence[Sequence[tuple[int, float, float]]], room: int, gap: float, limit: int
) -> tuple[list[int] | None, bool]:
    """Return the place in each set of what is best in `room` and loses no more than `gap`, None
    where nothing does; and whether no state was left out for want of space.

    Items are (cost, error, loss).
    """
    cheapest = [min(cost for cost, _, _ in items) for items in sets]
    after = np.cumsum([0, *reversed(cheapest)])[::-1]
    costs, errors, losses = np.zeros(1, np.int64), np.zeros(1), np.zeros(1)
    ways: list[tuple[np.ndarray, np.ndarray]] = []
    is_whole = True
    for number, items in enumerate(sets):
        sides = np.array(items).T
        cost = (costs[:, None] + sides[0].astype(np.int64)).ravel()
        error = (errors[:, None] + sides[1]).ravel()
        loss = (losses[:, None] + sides[2]).ravel()
        came = np.repeat(np.arange(len(costs), dtype=np.int32), len(items))
        place = np.tile(np.arange(len(items), dtype=np.int16), len(costs))
        keep = np.flatnonzero((cost + after[number + 1] <= room) & (loss <= gap))
        keep = keep[np.lexsort((error[keep], cost[keep]))]
        least = np.minimum.accumulate(error[keep])
        keep = keep[np.concatenate(([True], error[keep][1:] < least[:-1]))[: len(keep)]]
        if not len(keep):
            return None, is_whole
        if len(keep) > limit:
            is_whole = False
            keep = np.sort(keep[np.argsort(loss[keep], kind="stable")[:limit]])
        costs, errors, losses = cost[keep], error[keep], loss[keep]
        ways.append((came[keep], place[keep]))
    at = int(np.argmin(errors))
    places = []
    for came, place in reversed(ways):
        places.append(int(place[at]))
        at = int(came[at])
    return places[::-1], is_whole


__all__ = ["Item", "Solution", "Walk", "hull", "pareto", "solve", "walk"]
