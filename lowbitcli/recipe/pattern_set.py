"""Patterns in order: which is the first that takes a name, in bounded time for all names together.

| patterns | how |
|---|---|
| literals | looked up |
| globs | all at once, see `globs` |
| `re:` | one after the other; each is of bounded time, all of them together have PATIENCE |
"""

import bisect
import re
import time
from collections.abc import Iterable

from lowbitcli.errors import RecipeError
from lowbitcli.recipe.globs import Globs, TooSlowError
from lowbitcli.recipe.patterns import Pattern
from lowbitcli.regex import MAX_NAME, TOO_SLOW

# Seconds of processor time for all names: to begin with, for each expression that was tried, and
# for those at most. What is usual takes a third of that for each.
PATIENCE, EACH, MOST = 0.7, 3e-6, 9.0
_LOOK = 8  # expressions between two looks at the clock
_WEIGHT = ".weight"


class PatternSet:
    """Patterns, by their places in what was given."""

    def __init__(self, patterns: Iterable[Pattern]) -> None:
        self.patterns = list(patterns)
        self._literals: dict[str, list[int]] = {}
        self._expressions: list[tuple[int, re.Pattern[str], bool]] = []
        self._of_glob: list[int] = []
        for number, pattern in enumerate(self.patterns):
            if pattern.is_literal:
                self._literals.setdefault(pattern.text, []).append(number)
            elif pattern.is_regex:
                compiled = re.compile(pattern.source([0]), re.DOTALL)
                self._expressions.append((number, compiled, pattern.sees_the_end))
            else:
                self._of_glob.append(number)
        self._globs = Globs([self.patterns[number].text for number in self._of_glob])
        self._places = [number for number, _, _ in self._expressions]
        self._seconds, self._tries = 0.0, 0

    def first(self, name: str, start: int = 0, stop: int | None = None) -> int | None:
        """Return the first pattern from `start` on and before `stop` that takes the name.

        Raises:
            RecipeError: the patterns take too long together.
        """
        sure = self._sure(name)
        at = bisect.bisect_left(sure, start)
        end = len(self.patterns) if stop is None else stop
        best = sure[at] if at < len(sure) and sure[at] < end else None
        if self._expressions:
            other = self._first_expression(name, start, end if best is None else best)
            return best if other is None else other
        return best

    def literals(self, name: str) -> list[int]:
        """Return those that are this name, or its module's, literally."""
        if not self._literals:
            return []
        found = self._literals.get(name, [])
        if name.endswith(_WEIGHT):
            found = sorted({*found, *self._literals.get(name.removesuffix(_WEIGHT), ())})
        return found

    def taking(self, names: Iterable[str]) -> set[int]:
        """Return those that take any of the names."""
        found: set[int] = set()
        for name in names:
            found.update(self._sure(name))
            start = 0
            while (
                other := self._first_expression(name, start, len(self.patterns), found)
            ) is not None:
                found.add(other)
                start = other + 1
        return found

    def _sure(self, name: str) -> tuple[int, ...] | list[int]:
        """Return the literals and globs that take the name, in order."""
        found = self.literals(name)
        if not self._of_glob or len(name) > MAX_NAME:
            return found
        try:
            globs = self._globs.taking(name)
        except TooSlowError as error:
            raise self._too_slow(self._of_glob) from error
        hits = [self._of_glob[one] for one in globs]
        return sorted([*hits, *found]) if found else hits

    def _first_expression(
        self, name: str, start: int, stop: int, known: Iterable[int] = ()
    ) -> int | None:
        at, found = bisect.bisect_left(self._places, start), None
        if at == len(self._places) or self._places[at] >= stop or len(name) > MAX_NAME:
            return None
        began, number = time.thread_time(), self._places[at]
        for number, compiled, sees_the_end in self._expressions[at:]:
            if number >= stop:
                break
            if number in known:
                continue
            self._tries += 1
            if self._tries % _LOOK == 0:
                began = self._spent(began, name, number)
            if _takes(compiled, sees_the_end, name):
                found = number
                break
        self._spent(began, name, number)
        return found

    def _spent(self, began: float, name: str, last: int) -> float:
        """Count the time since `began`; `last` is the expression that was tried last."""
        now = time.thread_time()
        self._seconds += now - began
        if self._seconds <= PATIENCE + min(MOST, EACH * self._tries):
            return now
        at = bisect.bisect_left(self._places, last)
        took = {}
        for number, compiled, sees_the_end in self._expressions[max(0, at - _LOOK) : at + 1]:
            began = time.thread_time()
            _takes(compiled, sees_the_end, name)
            took[number] = time.thread_time() - began
        raise self._too_slow([max(took, key=lambda number: took[number])])

    def _too_slow(self, among: list[int]) -> RecipeError:
        worst = max((self.patterns[number] for number in among), key=lambda one: one.wildcards)
        others = len(self.patterns) - 1
        beside = f", with {others} others and these names," if others else " for these names"
        return RecipeError(
            f"{worst.text!r}{beside} {TOO_SLOW}",
            where=worst.where,
            hint="use fewer patterns, or fewer stars in them; whole names cost nothing",
        )


def _takes(compiled: re.Pattern[str], sees_the_end: bool, name: str) -> bool:
    """Does an expression take the tensor's name, or its module's?"""
    if compiled.match(name) is not None:
        return True
    if not sees_the_end or not name.endswith(_WEIGHT):
        return False
    return compiled.match(name, 0, len(name) - len(_WEIGHT)) is not None
