"""Which rule takes a tensor, or why it is kept: all patterns of a recipe as one expression."""

import bisect
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from lowbitcli.errors import RecipeError
from lowbitcli.recipe.defaults import KeptKind
from lowbitcli.recipe.drafts import KIND, is_draft
from lowbitcli.recipe.model import Recipe, Rule
from lowbitcli.recipe.nearest import nearest
from lowbitcli.recipe.pattern_set import PatternSet
from lowbitcli.recipe.patterns import Pattern
from lowbitcli.regex import MAX_NAME

T = TypeVar("T")

NO_RULE = "no rule matches"
_ZEROS = bytes.maketrans(b"123456789", b"000000000")  # of bytes: ten times as fast as of text
_MOST_KNOWN = 4096
_MOST_TOLD, _MOST_HINTS = 20, 5  # of patterns that take nothing


@dataclass(frozen=True, slots=True)
class Decision:
    """What a recipe says of a tensor: the rule that takes it, or (`rule` None) why it is kept.

    `where` is the place of the pattern that decided, "" for a default; `kind` the kept kind;
    `exact` says that the pattern is the tensor's or its module's name literally, which also takes
    tensors of a kept kind.
    """

    rule: Rule | None
    reason: str = ""
    where: str = ""
    kind: str = ""
    exact: bool = False


@dataclass(frozen=True)
class _Entry:
    """A pattern of `keep` (rule None, rank -1) or of the rule at `rank`."""

    pattern: Pattern
    rule: Rule | None
    rank: int


class Matcher:
    """Decides by name alone: the recipe's `keep`, exact names, kept kinds, the rules in order.

    Layers from number `drafts` on predict further tokens, whatever is in them.
    """

    def __init__(self, recipe: Recipe, drafts: int | None = None) -> None:
        self._recipe = recipe
        kinds = {kind.name: kind for kind in recipe.kinds}
        self._draft = kinds.get(KIND) if drafts is not None else None
        self._drafts = drafts or 0
        self._entries = [_Entry(pattern, None, -1) for pattern in recipe.keep]
        for rank, rule in enumerate(recipe.rules):
            self._entries += [_Entry(pattern, rule, rank) for pattern in rule.match]
        self._ranks = [entry.rank for entry in self._entries]
        self._set = PatternSet(entry.pattern for entry in self._entries)
        excluded = [(rank, x) for rank, rule in enumerate(recipe.rules) for x in rule.exclude]
        self._excluded_by = [rank for rank, _ in excluded]
        self._excluded = PatternSet(pattern for _, pattern in excluded)
        self._kinds = _Kinds(recipe.kinds)
        every = [*self._set.patterns, *self._excluded.patterns]
        every += [p for kind in recipe.kinds for p in (*kind.components, *kind.patterns, *kind.but)]
        # Where no pattern tells digits apart, neither need we: layers and experts are numbered.
        self._tells_digits = not all(map(_takes_any_digit, every))
        self._known: dict[bytes, Decision] = {}

    def decide(self, name: str) -> Decision:
        """Return what the recipe says of the tensor of this name."""
        if self._draft is not None and is_draft(name, self._drafts):
            return self._decided(name, self._draft)
        if self._tells_digits:
            return self._decided(name)
        alike = name.encode(errors="surrogatepass").translate(_ZEROS)
        found = self._known.get(alike)
        if found is None:
            found = self._decided(alike.decode(errors="surrogatepass"))
            if len(self._known) < _MOST_KNOWN:
                self._known[alike] = found
        return found

    def _decided(self, name: str, kind: KeptKind | None = None) -> Decision:
        if len(name) > MAX_NAME:
            return Decision(None, f"name longer than {MAX_NAME} characters")
        entry, exact = self._first(name)
        if entry is not None and (entry.rule is None or entry.rule.keep):
            reason = f"recipe keep {entry.pattern.text!r}"
            return Decision(None, reason, entry.pattern.where, exact=exact)
        kind = None if exact else kind or self._kinds.first(name)
        if kind is not None:
            return Decision(None, kind.label, kind=kind.name)
        if entry is None:
            return Decision(None, NO_RULE)
        return Decision(entry.rule, where=entry.pattern.where, exact=exact)

    def _first(self, name: str) -> tuple[_Entry | None, bool]:
        """Return the first entry that takes the name, and whether it names it literally."""
        start = 0
        while (number := self._set.first(name, start)) is not None:
            rank = self._ranks[number]
            if not self._is_excluded(rank, name):
                exact = (x for x in self._set.literals(name) if self._ranks[x] == rank)
                named = next(exact, None)
                return self._entries[number if named is None else named], named is not None
            start = bisect.bisect_right(self._ranks, rank)
        return None, False

    def _is_excluded(self, rank: int, name: str) -> bool:
        start = bisect.bisect_left(self._excluded_by, rank)
        stop = bisect.bisect_right(self._excluded_by, rank)
        return start < stop and self._excluded.first(name, start, stop) is not None

    def dead(self, names: Iterable[str]) -> None:
        """Raise RecipeError where a pattern of the user's recipe takes none of the names."""
        names = list(names)
        patterns = [*self._set.patterns, *self._excluded.patterns]
        patterns += [pattern for one in self._recipe.thresholds for pattern in one.match]
        own = PatternSet(pattern for pattern in patterns if not pattern.shipped)
        if not own.patterns:
            return
        taking = own.taking(names)
        dead = [pattern for number, pattern in enumerate(own.patterns) if number not in taking]
        if not dead:
            return
        lines = [f"{pattern.text!r} matches no tensor" for pattern in dead[:_MOST_TOLD]]
        others = [
            f"{pattern.where}: {line}" if pattern.where else line
            for pattern, line in zip(dead[1:], lines[1:], strict=False)
        ]
        more = len(dead) - len(lines)
        others += [f"and {more} more patterns match none"] if more else []
        hints = [_near(pattern, names) for pattern in dead[:_MOST_HINTS]]
        raise RecipeError(
            "\n".join([lines[0], *others]),
            where=dead[0].where,
            hint="\n".join(dict.fromkeys(hint for hint in hints if hint)),
        )


class _Alternatives(Generic[T]):
    """Patterns in order as one regular expression, each with what it stands for."""

    def __init__(self, choices: Iterable[tuple[Pattern, T]]) -> None:
        choices = list(choices)
        counter = [0]
        parts = [
            f"(?P<a{number}>{pattern.source(counter)})"
            for number, (pattern, _) in enumerate(choices)
        ]
        self._on_module = any(pattern.sees_the_end for pattern, _ in choices)
        self._compiled = re.compile("|".join(parts), re.DOTALL) if parts else None
        groups = self._compiled.groupindex if self._compiled else {}
        self._numbers = {groups[f"a{number}"]: number for number in range(len(choices))}
        self._values = [value for _, value in choices]

    def first(self, name: str) -> T | None:
        if self._compiled is None:
            return None
        best = len(self._values)
        hit = self._compiled.match(name)
        if hit is not None:
            best = self._numbers[hit.lastindex or 0]
        if self._on_module and best and name.endswith(".weight"):
            hit = self._compiled.match(name, 0, len(name) - len(".weight"))
            if hit is not None:
                best = min(best, self._numbers[hit.lastindex or 0])
        return self._values[best] if best < len(self._values) else None


class _Kinds:
    """The kept kinds; each component is looked up once, and checkpoints have few different ones."""

    def __init__(self, kinds: tuple[KeptKind, ...]) -> None:
        self._kinds = kinds
        self._of_component: dict[str, tuple[int, ...]] = {}
        self._ordinary: set[str] = set()
        self._components = _each(kind.components for kind in kinds)
        self._whole = _Alternatives(
            (pattern, index) for index, kind in enumerate(kinds) for pattern in kind.patterns
        )
        self._but = _each(kind.but for kind in kinds)

    def first(self, name: str) -> KeptKind | None:
        whole = self._whole.first(name)
        parts = name.split(".")
        if whole is None and self._ordinary.issuperset(parts):
            return None
        hits = {index for part in parts for index in self._of(part)}
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
            if not known:
                self._ordinary.add(component)
        return known


def _takes_any_digit(pattern: Pattern) -> bool:
    """Is this a pattern that takes a name whichever digits are in it?"""
    plain = pattern.text.replace("[0-9]", "")
    return not pattern.is_regex and "[" not in plain and re.search(r"\d", plain) is None


def _each(groups: Iterable[tuple[Pattern, ...]]) -> "list[_Alternatives[bool]]":
    return [_Alternatives((pattern, True) for pattern in group) for group in groups]


def _near(pattern: Pattern, names: Sequence[str]) -> str:
    found = nearest(pattern, names)
    return f"near {pattern.text!r}: {', '.join(found)}" if found else ""
