"""Groups of weights that are served as one matrix, and so share its scale."""

from collections.abc import Iterable
from typing import Generic, TypeVar

from lowbitcli.errors import RecipeError
from lowbitcli.recipe.defaults import SLOT, FuseGroup

T = TypeVar("T")

_FEW = 8  # templates that are looked at one by one


class _Templates(Generic[T]):
    """Templates by what stands behind the slot, each with what it stands for; where many end alike,
    also by what stands before it, so that a name meets few, however many there are."""

    def __init__(self, templates: Iterable[tuple[str, T]]) -> None:
        self._by_tail: dict[str, list[tuple[str, T]]] = {}
        for text, value in templates:
            head, _, tail = text.partition(SLOT)
            self._by_tail.setdefault(tail, []).append((head, value))
        self._depths = sorted({tail.count(".") for tail in self._by_tail})
        self._many = {
            tail: _by_head(some) for tail, some in self._by_tail.items() if len(some) > _FEW
        }

    def taking(self, module: str) -> list[tuple[str, T]]:
        """Return what is in the slot and what it stands for, for each template that takes it."""
        out: list[tuple[str, T]] = []
        for tail in _tails(module, self._depths):
            some = self._by_tail.get(tail, ())
            if len(some) > _FEW:
                places = [
                    place
                    for length, heads in self._many[tail].items()
                    for place in heads.get(module[:length], ())
                ]
                some = [some[place] for place in sorted(places)]
            end = len(module) - len(tail)
            for head, value in some:
                if len(head) < end and module.startswith(head):
                    out.append((module[len(head) : end], value))
        return out


def _by_head(templates: list[tuple[str, T]]) -> dict[int, dict[str, list[int]]]:
    """Return the length of a head -> the head -> places of templates."""
    found: dict[int, dict[str, list[int]]] = {}
    for place, (head, _) in enumerate(templates):
        found.setdefault(len(head), {}).setdefault(head, []).append(place)
    return found


def group(names: Iterable[str], fused: Iterable[FuseGroup]) -> dict[str, str]:
    """Return the key of its group for each name that a template takes.

    Names with the same common part are in one group, also where members are missing; the key
    shows them: `model.layers.0.mlp.{gate_proj,up_proj}`. A name that two templates take joins
    their groups. Time is linear in the names.
    """
    templates = _Templates((member, _around(one)) for one in fused for member in one.members)
    first: dict[str, str] = {}
    joined: dict[str, str] = {}
    for name in names:
        for common, (before, after) in templates.taking(name.removesuffix(".weight")):
            key = f"{before}{common}{after}"
            other = first.setdefault(name, key)
            if other != key:
                _join(joined, other, key)
    return {name: _root(joined, key) for name, key in first.items()}


def missing(
    names: Iterable[str], fused: Iterable[FuseGroup], present: set[str]
) -> dict[str, tuple[str, ...]]:
    """Return the names that fused partners are missing for among the modules that are `present`,
    each with those partners: of the template that lacks fewest, where none that takes the name is
    complete."""
    templates = _Templates((member, one) for one in fused for member in one.members)
    found: dict[str, tuple[str, ...]] = {}
    known: dict[tuple[int, str], tuple[str, ...]] = {}  # partners ask the same thing
    for name in names:
        lacks = []
        for common, one in templates.taking(name.removesuffix(".weight")):
            asked = id(one), common
            if asked not in known:
                known[asked] = _lacking(one, common, present)
            lacks.append(known[asked])
        if lacks and all(lacks):
            found[name] = min(lacks, key=len)
    return found


def refuse_dead(names: Iterable[str], fused: Iterable[FuseGroup]) -> None:
    """Raise RecipeError where a template of a recipe takes none of the names."""
    fused = list(fused)
    members = [(member, one) for one in fused for member in one.members]
    templates = _Templates((member, number) for number, (member, _) in enumerate(members))
    alive: set[int] = set()
    for module in {name.removesuffix(".weight") for name in names}:
        alive.update(number for _, number in templates.taking(module))
    for number, (member, one) in enumerate(members):
        if number not in alive:
            raise RecipeError(
                f"fuse: {member!r} matches no tensor",
                where=one.where,
                hint="lowbit inspect lists the names",
            )


def _lacking(one: FuseGroup, common: str, present: set[str]) -> tuple[str, ...]:
    members = [member.replace(SLOT, common) for member in one.members]
    return () if present.issuperset(members) else tuple(m for m in members if m not in present)


def _tails(module: str, depths: list[int]) -> list[str]:
    out = []
    at, dots = len(module), 0
    for depth in depths:
        while dots < depth and at >= 0:
            at, dots = module.rfind(".", 0, at), dots + 1
        if at < 0:
            break
        out.append(module[at:])
    return out


def _around(one: FuseGroup) -> tuple[str, str]:
    """Return what stands before and after the common part in the key of a group."""
    heads = {member.partition(SLOT)[0] for member in one.members}
    tails = [member.partition(SLOT)[2].removeprefix(".") for member in one.members]
    head = heads.pop() if len(heads) == 1 else "|".join(sorted(heads))
    return head, f".{{{','.join(tails)}}}"


def _join(joined: dict[str, str], one: str, other: str) -> None:
    one, other = _root(joined, one), _root(joined, other)
    if one != other:
        joined[other] = one


def _root(joined: dict[str, str], key: str) -> str:
    while key in joined:
        key = joined[key]
    return key
