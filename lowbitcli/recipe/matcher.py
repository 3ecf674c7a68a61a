"""Which rule takes a tensor, or why it is kept: one combined regular expression for all patterns of a recipe."""

import difflib
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from lowbitcli.errors import RecipeError
from lowbitcli.recipe.defaults import KeptKind
from lowbitcli.recipe.model import Recipe, Rule
from lowbitcli.recipe.patterns import MAX_NAME, Pattern

NO_RULE = "no rule matches"


@dataclass(frozen=True)
class Decision:
    """What a recipe says of a tensor: the rule that takes it, or (`rule` None) why it is kept.

    `where` is the place of the pattern that decided, "" for a default; `kind` the kept kind; `exact` says that the
    pattern is the tensor's or its module's name literally, which also takes tensors of a kept kind.
    """

    rule: Rule | None
    reason: str = ""
    where: str = ""
    kind: str = ""
    exact: bool = False


class Matcher:
    """Decides by name alone. `keep` of the recipe comes first, then exact names, kept kinds, and the rules in order."""

    def __init__(self, recipe: Recipe) -> None:
        keep = [(pattern, None) for pattern in recipe.keep]
        ruled = [(pattern, rule) for rule in recipe.rules for pattern in rule.match]
        self._recipe = recipe
        self._entries: list[tuple[Pattern, Rule | None]] = [*keep, *ruled]
        self._ranks = [_rank(recipe, rule) for _, rule in self._entries]
        self._literals: dict[str, list[int]] = {}
        open_ended: list[int] = []
        for index, (pattern, _) in enumerate(self._entries):
            if pattern.is_literal:
                self._literals.setdefault(pattern.text, []).append(index)
            else:
                open_ended.append(index)
        self._search = _Alternatives(
            [
                (index, [self._entries[index][0]], _exclude(self._entries[index][1]))
                for index in open_ended
            ]
        )
        self._excluded = {
            id(rule): _Alternatives([(0, rule.exclude, ())])
            for rule in recipe.rules
            if rule.exclude
        }
        self._kinds = _Kinds(recipe.kinds)

    def decide(self, name: str) -> Decision:
        """Return what the recipe says of the tensor of this name."""
        if len(name) > MAX_NAME:
            return Decision(None, f"name longer than {MAX_NAME} characters")
        index, exact = self._first(name)
        if index is not None:
            pattern, rule = self._entries[index]
            if rule is None or rule.keep:
                reason = f"recipe keep {pattern.text!r}"
                return Decision(None, reason, pattern.where, exact=exact)
            if exact:
                return Decision(rule, where=pattern.where, exact=True)
        kind = self._kinds.first(name)
        if kind is not None:
            return Decision(None, kind.label, kind=kind.name)
        if index is None:
            return Decision(None, NO_RULE)
        pattern, rule = self._entries[index]
        return Decision(rule, where=pattern.where)

    def _first(self, name: str) -> tuple[int | None, bool]:
        """Return the first entry that takes the name, and whether its rule or `keep` names it literally."""
        found = self._search.first(name)
        literal = self._literal(name)
        if literal is None:
            return found, False
        if found is None or self._ranks[literal] <= self._ranks[found]:
            return literal, True
        return found, False

    def _literal(self, name: str) -> int | None:
        module = name.removesuffix(".weight")
        hits = self._literals.get(name, [])
        if module != name:
            hits = sorted([*hits, *self._literals.get(module, [])])
        for index in hits:
            excluded = self._excluded.get(id(self._entries[index][1]))
            if excluded is None or excluded.first(name) is None:
                return index
        return None

    def dead(self, names: Iterable[str]) -> None:
        """Raise RecipeError where a pattern of the user's recipe takes none of the names, with the nearest ones."""
        names = list(names)
        known = {*names, *(name.removesuffix(".weight") for name in names)}
        patterns = [pattern for pattern, _ in self._entries]
        patterns += [pattern for rule in self._recipe.rules for pattern in rule.exclude]
        dead = [
            pattern
            for pattern in patterns
            if not pattern.shipped and _is_dead(pattern, names, known)
        ]
        if not dead:
            return
        lines = [f"{pattern.text!r} matches no tensor" for pattern in dead]
        others = [
            f"{pattern.where}: {line}" if pattern.where else line
            for pattern, line in zip(dead[1:], lines[1:], strict=True)
        ]
        hints = [_nearest(pattern, names) for pattern in dead]
        raise RecipeError(
            "\n".join([lines[0], *others]),
            where=dead[0].where,
            hint="\n".join(dict.fromkeys(hint for hint in hints if hint)),
        )


class _Alternatives:
    """Patterns in order as one regular expression; `first` says which alternative takes a name first."""

    def __init__(
        self, choices: "list[tuple[int, Collection[Pattern], Collection[Pattern]]]"
    ) -> None:
        counter = [0]
        self._indices = [index for index, _, _ in choices]
        parts = []
        for number, (_, patterns, excluded) in enumerate(choices):
            inner = "|".join(pattern.source(counter) for pattern in patterns) or "(?!)"
            guard = "|".join(pattern.source(counter) for pattern in excluded)
            parts.append(f"(?P<a{number}>{f'(?!{guard})' if guard else ''}(?:{inner}))")
        self._compiled = re.compile("|".join(parts), re.DOTALL) if parts else None
        self._on_module = any(p.is_regex for _, patterns, but in choices for p in (*patterns, *but))

    def first(self, name: str) -> int | None:
        if self._compiled is None:
            return None
        found = self._compiled.match(name)
        best = None if found is None else int((found.lastgroup or "a0")[1:])
        if self._on_module and name.endswith(".weight"):
            found = self._compiled.match(name[: -len(".weight")])
            if found is not None:
                other = int((found.lastgroup or "a0")[1:])
                best = other if best is None else min(best, other)
        return None if best is None else self._indices[best]


class _Kinds:
    """The kept kinds; what a component says is looked up once, and checkpoints have few different ones."""

    def __init__(self, kinds: tuple[KeptKind, ...]) -> None:
        self._kinds = kinds
        self._of_component: dict[str, tuple[int, ...]] = {}
        self._components = [_Alternatives([(0, kind.components, ())]) for kind in kinds]
        self._whole = _Alternatives(
            [(index, kind.patterns, ()) for index, kind in enumerate(kinds) if kind.patterns]
        )
        self._but = [_Alternatives([(0, kind.but, ())] if kind.but else []) for kind in kinds]

    def first(self, name: str) -> KeptKind | None:
        hits = {index for part in name.split(".") for index in self._of(part)}
        whole = self._whole.first(name)
        if whole is not None:
            hits.add(whole)
        for index in sorted(hits):
            if self._but[index].first(name) is None:
                return self._kinds[index]
        return None

    def _of(self, component: str) -> tuple[int, ...]:
        known = self._of_component.get(component)
        if known is None:
            found = (
                i for i, one in enumerate(self._components) if one.first(component) is not None
            )
            known = self._of_component[component] = tuple(found)
        return known


def _rank(recipe: Recipe, rule: Rule | None) -> int:
    """Return the place of a rule in the order in which they are tried; `keep` comes first."""
    return -1 if rule is None else next(i for i, one in enumerate(recipe.rules) if one is rule)


def _exclude(rule: Rule | None) -> tuple[Pattern, ...]:
    return () if rule is None else rule.exclude


def _is_dead(pattern: Pattern, names: list[str], known: set[str]) -> bool:
    if pattern.is_literal:
        return pattern.text not in known
    one = _Alternatives([(0, [pattern], ())])
    return all(one.first(name) is None for name in names if len(name) <= MAX_NAME)


def _nearest(pattern: Pattern, names: list[str]) -> str:
    wanted = re.sub(r"[\\^$*?()|\[\]+]", "", pattern.text.removeprefix("re:")).strip(".")
    near: dict[str, None] = {}
    for name in names[:20_000]:
        near.setdefault(name)
    pool = _tails_of(near, wanted.count(".") + 1)
    found = difflib.get_close_matches(wanted, list(pool), n=2, cutoff=0.5)
    return f"near {pattern.text!r}: {', '.join(pool[one] for one in found)}" if found else ""


def _tails_of(names: Iterable[str], parts: int) -> dict[str, str]:
    """Return the last components of the names, as many as the pattern has, and the first full name of each."""
    pool: dict[str, str] = {}
    for name in names:
        for text in (name, name.removesuffix(".weight")):
            pool.setdefault(".".join(text.split(".")[-parts:]), name)
            if len(pool) > 2_000:
                return pool
    return pool
