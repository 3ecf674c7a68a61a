"""What is decided together, on paper: units of weights that get one scheme, and what each costs.

| in one unit | because |
|---|---|
| weights that are served as one matrix (q/k/v, gate/up) | readers need one scheme for them |
| all experts of a module | readers take one scheme for all of them |
| a stack of experts and what it is taken apart into | a recipe sees one name |
| equal names in the denoisers of a pipeline | a recipe's patterns are for all of them |

A plan is made for each candidate, in which it takes all weights; what it makes of a weight, and
with how many bytes, is in that plan. A weight that no candidate can take is no part of a unit, as
are those of kept kinds: they are what they are whatever is chosen. Of a unit that a candidate takes
only in part it is no choice.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.containers import container
from lowbitcli.errors import RecipeError, UnsupportedError
from lowbitcli.plan.build import build
from lowbitcli.plan.choose import Conditions
from lowbitcli.plan.components import build_pipeline, examine
from lowbitcli.plan.importance import Importance
from lowbitcli.plan.nouns import Job, Plan, Weight
from lowbitcli.plan.prepare import container_of
from lowbitcli.plan.source import Source
from lowbitcli.plan.split import experts
from lowbitcli.recipe import Recipe, Rule
from lowbitcli.search.candidates import Candidate, everything
from lowbitcli.search.patterns import natural

_ONE_BY_ONE = re.compile(r"(.*\.experts)\.[0-9]+\.")


@dataclass(frozen=True)
class Unit:
    """Weights that get one scheme. `members` are the names that recipes see, `elements` how many
    numbers they hold, `kept` what they are where they stay; `weights` has what each
    candidate makes of them, `costs` in how many bytes."""

    name: str
    members: tuple[str, ...]
    elements: int
    kept: tuple[Weight, ...]
    weights: Mapping[str, tuple[Weight, ...]]
    costs: Mapping[str, int]


@dataclass(frozen=True)
class Paper:
    """All that is known before a weight is read: the plan of each candidate, without its files,
    and the units. `names` are those that recipes see, `rest` is the most bytes of a plan beyond
    those of units, `left_out` says of candidates that the container cannot hold why."""

    plans: Mapping[str, Plan]
    kept: Plan
    units: tuple[Unit, ...]
    names: tuple[str, ...]
    rest: int
    is_pipeline: bool
    container: str
    left_out: Mapping[str, str]

    def jobs(self, candidate: str) -> list[Job]:
        """Return the jobs of the units that a candidate is a choice for."""
        wanted = {
            w.name for unit in self.units for w in unit.weights.get(candidate, ()) if w.target
        }
        return [job for job in self.plans[candidate].jobs if job.weights[0].name in wanted]


def plan_of(
    checkpoint: Checkpoint,
    recipe: Recipe,
    asked: str,
    *,
    split_groups: bool = False,
    importance: Importance | None = None,
) -> Plan:
    """Plan a recipe for a checkpoint that is open; `asked` is a container's name, or auto.

    Raises:
        LowbitError: what making a plan raises.
    """
    name = asked if asked != "auto" else recipe.container

    def conditions_of(one: Checkpoint) -> Conditions:
        of = container_of(name, one)
        return Conditions(container=of, split_groups=split_groups, importance=importance)

    if checkpoint.components:
        return build_pipeline(checkpoint, recipe, conditions_of, None)
    return build(checkpoint, recipe, conditions_of(checkpoint))


def paper(
    checkpoint: Checkpoint,
    candidates: Sequence[Candidate],
    asked: str,
    importance: Importance | None = None,
    *,
    need_all: bool = True,
) -> Paper:
    """Plan every candidate for all weights, and find what is decided together; where its scales are
    searched, with the `importance` of columns. A candidate that the container cannot hold is left
    out, unless all are needed.

    Raises:
        RecipeError: the container cannot hold a candidate that is needed, or none of them.
        UnsupportedError: no weight can be quantized.
        LowbitError: what making a plan raises.
    """
    keeps = Rule.model_validate({"match": everything(), "keep": True})
    kept = plan_of(checkpoint, Recipe(name="auto", rules=(keeps,)), asked, split_groups=True)
    plans: dict[str, Plan] = {}
    left_out: dict[str, str] = {}
    quantizing = sum(not one.keeps for one in candidates)
    for one in candidates:
        try:
            plans[one.name] = kept if one.keeps else _plan(checkpoint, one, asked, importance)
        except RecipeError as error:
            left_out[one.name] = error.message
            if need_all or len(left_out) == quantizing:
                raise
    source = examine(checkpoint)
    finding = _Finding(source, plans, kept, is_pipeline=bool(checkpoint.components))
    units = finding.units()
    if not units:
        raise UnsupportedError(
            "there is no weight that these schemes can take",
            hint="lowbit plan SRC -v says of each why it is kept",
        )
    members = {name for unit in units for name in unit.members}
    return Paper(
        {name: _slim(plan) for name, plan in plans.items()},
        _slim(kept),
        units,
        tuple(source.weights),
        max(finding.rest(plan, members) for plan in plans.values()),
        bool(checkpoint.components),
        next(plan.container for plan in plans.values() if plan is not kept),
        left_out,
    )


def _plan(
    checkpoint: Checkpoint, one: Candidate, asked: str, importance: Importance | None
) -> Plan:
    recipe = Recipe(name="auto", rules=(one.rule,))
    by = importance if one.weighs else None
    try:
        return plan_of(checkpoint, recipe, asked, split_groups=True, importance=by)
    except RecipeError as error:
        hint = f"leave {one.name} out of --schemes"
        if error.hint:
            hint = f"{error.hint}; {hint}"
        raise RecipeError(error.message, hint=hint) from error


def _slim(plan: Plan) -> Plan:
    """Return a plan without what is known of its files, which is half of it."""
    return replace(plan, files=(), index=None, config=None)


class _Finding:
    """Finds units: which names recipes see, who takes which of them, and who goes with whom."""

    def __init__(
        self, source: Source, plans: Mapping[str, Plan], kept: Plan, *, is_pipeline: bool
    ) -> None:
        self._source, self._plans, self._kept = source, plans, kept
        self._is_pipeline = is_pipeline
        self._owner = {
            one.name: name for name, weight in source.weights.items() for one in experts(weight)
        }
        self._takes = {
            name: {self._of(w) for w in plan.weights if w.target is not None and not w.kept}
            for name, plan in plans.items()
            if plan is not kept
        }
        self._taken = set().union(*self._takes.values())

    def rest(self, plan: Plan, members: Collection[str]) -> int:
        """Return the bytes of a plan beyond those of the members."""
        inside = (w.bytes_out for w in plan.weights if self._of(w) in members)
        return plan.bytes_out - sum(inside)

    def units(self) -> tuple[Unit, ...]:
        """Return what is to be decided, in the order of the names."""
        together = self._together()
        held = {name: self._by_unit(plan, together) for name, plan in self._plans.items()}
        kept = self._by_unit(self._kept, together)
        members: dict[str, list[str]] = {}
        for name, unit in together.items():
            members.setdefault(unit, []).append(name)
        found = []
        for unit, names in sorted(members.items(), key=lambda item: natural(item[0])):
            able = [name for name, takes in self._takes.items() if takes.issuperset(names)]
            if not able:
                continue
            choices = [one for one in self._plans if one in able or one not in self._takes]
            weights = {name: tuple(held[name][unit]) for name in choices}
            costs = {name: sum(w.bytes_out for w in some) for name, some in weights.items()}
            as_is = tuple(kept[unit])
            elements = sum(weight.numel for weight in as_is)
            ordered = tuple(sorted(names, key=natural))
            found.append(Unit(unit, ordered, elements, as_is, weights, costs))
        return tuple(found)

    def _of(self, weight: Weight) -> str:
        """Return the name that a recipe sees of a weight."""
        return self._owner.get(weight.name, weight.name)

    def _by_unit(self, plan: Plan, together: Mapping[str, str]) -> dict[str, list[Weight]]:
        found: dict[str, list[Weight]] = {}
        for weight in plan.weights:
            unit = together.get(self._of(weight))
            if unit is not None:
                found.setdefault(unit, []).append(weight)
        return found

    def _together(self) -> dict[str, str]:
        """Return the unit of each name that something takes, and of what is fused with it."""
        sets: dict[str, str] = {name: name for name in self._taken}
        for key, names in self._keys():
            for name in names:
                sets.setdefault(name, name)
            sets.setdefault(key, key)
            for name in names:
                one, other = sorted((_root(sets, name), _root(sets, key)))
                sets[one] = other
        roots: dict[str, list[str]] = {}
        for name in sets:
            roots.setdefault(_root(sets, name), []).append(name)
        found = {}
        for names in roots.values():
            # What ties them together names the unit.
            keys = [name for name in names if name.startswith(_KEY)]
            first = min(keys, default=min(names)).removeprefix(_KEY)
            label = first.removesuffix(".weight") or first
            found |= {name: label for name in names if not name.startswith(_KEY)}
        return found

    def _keys(self) -> Iterator[tuple[str, list[str]]]:
        """Yield what ties names together, and those names."""
        groups: dict[str, list[str]] = {}
        if any(container(x).fuses for plan in self._plans.values() for x in _containers(plan)):
            names = [name for name, one in self._source.weights.items() if len(one.shape) >= 2]
            for name, group in Recipe(name="auto").groups(names).items():
                groups.setdefault(f"{_KEY}{group}", []).append(name)
        for key, names in groups.items():
            if not self._taken.isdisjoint(names):
                yield key, names
        for name in self._taken:
            module = _experts(name, len(self._source.weights[name].shape))
            if module:
                yield f"{_KEY}{module}", [name]
            if self._is_pipeline:
                yield f"{_KEY}{name.partition('/')[2]}", [name]


_KEY = "\0"  # no name begins with it


def _containers(plan: Plan) -> list[str]:
    """Return the containers of a plan, of which a pipeline may have several."""
    return plan.container.split(", ")


def _root(sets: Mapping[str, str], name: str) -> str:
    while sets[name] != name:
        name = sets[name]
    return name


def _experts(name: str, dimensions: int) -> str:
    """Return the module whose experts a weight is of, "" where it is of none."""
    found = _ONE_BY_ONE.match(name)
    if found is not None:
        return found[1]
    return name.removesuffix(".weight").rpartition(".")[0] if dimensions == 3 else ""
