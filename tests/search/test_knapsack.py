"""The knapsack against trying everything, and against a table over all budgets."""

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbitcli.search import knapsack

ERRORS = st.one_of(st.integers(0, 50).map(float), st.floats(0, 50, width=32))
CLASS = st.lists(st.tuples(st.integers(0, 40), ERRORS), min_size=1, max_size=4)
CLASSES = st.lists(CLASS, min_size=1, max_size=5)


def all_solutions(classes):
    for chosen in itertools.product(*(range(len(items)) for items in classes)):
        picked = [classes[one][item] for one, item in enumerate(chosen)]
        yield sum(cost for cost, _ in picked), math.fsum(error for _, error in picked)


def least_by_table(classes, budget):
    """Return the least error within a budget, from a table of the least for each cost."""
    table = [0.0] + [math.inf] * budget
    for items in classes:
        table = [
            min((table[b - cost] + error for cost, error in items if cost <= b), default=math.inf)
            for b in range(budget + 1)
        ]
    return min(table)


@given(CLASSES, st.integers(0, 200))
@settings(max_examples=60, deadline=None)
def test_nothing_within_the_budget_is_better(classes, budget):
    within = [error for cost, error in all_solutions(classes) if cost <= budget]
    found = knapsack.solve(classes, budget)
    if not within:
        assert found is None
        return
    assert found is not None
    picked = [classes[one][item] for one, item in enumerate(found.chosen)]
    assert found.cost == sum(cost for cost, _ in picked) <= budget
    assert found.error == math.fsum(error for _, error in picked)
    assert found.is_proved
    assert found.gap == 0
    assert found.error == pytest.approx(min(within), rel=1e-11, abs=1e-11)


@given(CLASSES, st.integers(0, 200), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_without_room_for_states_the_bound_still_holds(classes, budget, states):
    within = [error for cost, error in all_solutions(classes) if cost <= budget]
    found = knapsack.solve(classes, budget, states)
    if found is None:
        assert not within
        return
    least = min(within)
    assert found.bound <= least * (1 + 1e-11) + 1e-11
    assert found.error >= least * (1 - 1e-11)
    assert found.cost <= budget
    if found.is_proved:
        assert found.error == pytest.approx(least, rel=1e-11, abs=1e-11)
    elif found.bound > 0:
        assert found.error <= found.bound * (1 + found.gap) * (1 + 1e-12)


@given(CLASSES)
@settings(max_examples=50, deadline=None)
def test_every_stop_of_the_walk_is_the_best_for_its_cost(classes):
    stops = knapsack.walk(classes)
    everything = list(all_solutions(classes))
    for stop, (cost, error) in enumerate(zip(stops.costs, stops.errors, strict=True)):
        picked = [classes[one][item] for one, item in enumerate(stops.at(stop))]
        assert cost == sum(one for one, _ in picked)
        least = min(other for spent, other in everything if spent <= cost)
        assert error == pytest.approx(least, rel=1e-9, abs=1e-9)


def layers(number):
    """Classes as a model has them: a few sizes, errors that fall by a hundred with twice the
    bits, each layer with a difficulty of its own."""
    classes = []
    for layer in range(number):
        for kind, size in enumerate((960, 576, 3072, 1536)):
            hard = 0.008 * (1 + (layer * 7 + kind * 3) % 11 / 9 + layer % 5)
            classes.append(
                [(9 * size, hard), (16 * size, hard / 13), (17 * size, hard / 15), (32 * size, 0.0)]
            )
    return classes


@pytest.mark.parametrize("share", [0.02, 0.1, 0.35, 0.8])
def test_a_model_of_many_layers_against_the_table(share):
    classes = layers(6)
    unit = math.gcd(*(cost for items in classes for cost, _ in items))
    least, most = (sum(pick(items)[0] for items in classes) for pick in (min, max))
    budget = int(least + share * (most - least))
    found = knapsack.solve(classes, budget)
    assert found is not None and found.is_proved
    small = [[(cost // unit, error) for cost, error in items] for items in classes]
    assert found.error == pytest.approx(least_by_table(small, budget // unit), rel=1e-11)


def test_many_budgets_against_the_table():
    """Sizes without a common measure, so that the best fill is seldom the first one found."""
    generator = random.Random(3)
    for _ in range(40):
        classes = []
        for _ in range(7):
            size, hard = generator.randint(3, 30), generator.uniform(0.5, 2)
            errors = (hard, hard * generator.uniform(0.2, 0.6), hard * generator.uniform(0, 0.2))
            classes.append(list(zip((size, 2 * size - 1, 3 * size + 1), errors, strict=True)))
        least = sum(items[0][0] for items in classes)
        budget = int(least * generator.uniform(1.1, 2.5))
        found = knapsack.solve(classes, budget)
        assert found is not None and found.is_proved
        assert found.error == pytest.approx(least_by_table(classes, budget), rel=1e-11)


@pytest.mark.parametrize("bits", [5, 7, 12])
def test_a_large_model_is_solved_within_a_small_gap(bits):
    classes = layers(200)
    found = knapsack.solve(classes, bits * 2 * sum(items[0][0] // 9 for items in classes))
    assert found is not None
    assert found.gap < 1e-5


def test_a_budget_below_the_least_has_no_solution():
    assert knapsack.solve([[(5, 1.0)], [(7, 1.0), (6, 2.0)]], 10) is None
    assert knapsack.solve([[(5, 1.0)], [(7, 1.0), (6, 2.0)]], 11).chosen == (0, 1)


def test_a_class_without_items_is_refused():
    with pytest.raises(ValueError, match="no item"):
        knapsack.solve([[(1, 1.0)], []], 10)


def test_no_class_costs_nothing():
    found = knapsack.solve([], 0)
    assert (found.chosen, found.cost, found.error, found.is_proved) == ((), 0, 0.0, True)
