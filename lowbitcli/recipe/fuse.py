"""Groups of weights that are served as one matrix, and so share its scale."""

from collections.abc import Iterable

from lowbitcli.errors import RecipeError
from lowbitcli.recipe.defaults import SLOT, FuseGroup


def group(names: Iterable[str], fused: Iterable[FuseGroup]) -> dict[str, str]:
    """Return the key of its group for each name that a template takes.

    Names with the same common part are in one group, also where members are missing; the key
    shows them: `model.layers.0.mlp.{gate_proj,up_proj}`. A name that two templates take joins
    their groups. Time is linear in the names.
    """
    tails: dict[str, list[tuple[str, tuple[str, str]]]] = {}
    for one in fused:
        around = _around(one)
        for member in one.members:
            head, _, tail = member.partition(SLOT)
            tails.setdefault(tail, []).append((head, around))
    depths = sorted({tail.count(".") for tail in tails})

    first: dict[str, str] = {}
    joined: dict[str, str] = {}
    for name in names:
        module = name.removesuffix(".weight")
        for tail in _tails(module, depths):
            for head, (before, after) in tails.get(tail, ()):
                if module.startswith(head) and len(module) > len(head) + len(tail):
                    key = f"{before}{module[len(head) : len(module) - len(tail)]}{after}"
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
    places: dict[str, list[tuple[str, FuseGroup]]] = {}
    for one in fused:
        for member in one.members:
            head, _, tail = member.partition(SLOT)
            places.setdefault(tail, []).append((head, one))
    depths = sorted({tail.count(".") for tail in places})
    found: dict[str, tuple[str, ...]] = {}
    known: dict[tuple[int, str], tuple[str, ...]] = {}  # partners ask the same thing
    for name in names:
        module = name.removesuffix(".weight")
        lacks = []
        for tail in _tails(module, depths):
            for head, one in places.get(tail, ()):
                if module.startswith(head) and len(module) > len(head) + len(tail):
                    asked = id(one), module[len(head) : len(module) - len(tail)]
                    if asked not in known:
                        known[asked] = _lacking(one, asked[1], present)
                    lacks.append(known[asked])
        if lacks and all(lacks):
            found[name] = min(lacks, key=len)
    return found


def refuse_dead(names: Iterable[str], fused: Iterable[FuseGroup]) -> None:
    """Raise RecipeError where a template of a recipe takes none of the names."""
    modules = {name.removesuffix(".weight") for name in names}
    for one in fused:
        for member in one.members:
            head, _, tail = member.partition(SLOT)
            least = len(head) + len(tail)
            if not any(x.endswith(tail) and x.startswith(head) and len(x) > least for x in modules):
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
