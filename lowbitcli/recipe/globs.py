"""Many globs over one name at once, character by character.

    D        the set of (glob, characters of it that are taken), one bit each
    D'  =    ((D & takes[c]) << 1) | (D & star)        for a character c
    hit      a bit at a glob's end, after the last character, or before `.weight`

Sets and what a character makes of them are kept (a lazy DFA): names of a checkpoint share most of
their beginnings, so nearly all of the time goes into looking up. New sets cost their size; of those
there may be MAX_WORK words, about a second, however globs and names are made.
"""

import re
from collections.abc import Sequence

from lowbitcli.recipe.patterns import characters

MAX_WORK = 24_000_000  # words of 64 bits in new sets: about a second
_FREE = 16  # words of a set that cost no more than the look-up
_MOST_HELD = 1 << 20  # words of sets that are kept, 8 MB
_WEIGHT = ".weight"


class TooSlowError(ValueError):
    """These globs and these names take too long together."""


class Globs:
    """Globs, by their places in `texts`."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._starts = self._stars = self._ends = 0
        self._single: dict[str, list[int]] = {}  # what stands for one character -> its bits
        self._at_end: dict[int, int] = {}  # bit -> glob
        starts, stars, at = [], [], 0
        for number, text in enumerate(texts):
            starts.append(at)
            for one in characters(text):
                if one == "*":
                    stars.append(at)
                else:
                    self._single.setdefault(one, []).append(at)
                    at += 1
            self._at_end[at] = number
            at += 1
        self._words = at // 64 + 1
        self._starts, self._stars = _bits(starts, at), _bits(stars, at)
        self._ends = _bits(list(self._at_end), at)
        self._size = at
        self._several = [
            (re.compile(one if one != "?" else ".", re.DOTALL), one)
            for one in self._single
            if len(one) > 1 or one == "?"
        ]
        self._sets_of: dict[str, int] = {}
        self._takes: dict[str, int] = {}
        self._work = 0
        self._forget()

    def taking(self, name: str) -> tuple[int, ...]:
        """Return the globs that take a tensor's name, or its module's, in order.

        Raises:
            TooSlowError: too much work was done for these names already.
        """
        if self._held > _MOST_HELD:
            self._forget()
        module = name.removesuffix(_WEIGHT)
        state = self._walk(0, module)
        hits = self._hits_at(state)
        if module == name:
            return hits
        more = self._hits_at(self._walk(state, _WEIGHT))
        return hits if more == hits or not more else tuple(sorted({*hits, *more}))

    def _forget(self) -> None:
        self._sets = [self._starts]
        self._numbers = {self._starts: 0}
        self._next: list[dict[str, int]] = [{}]
        self._hits: list[tuple[int, ...] | None] = [None]
        self._held = self._words

    def _walk(self, state: int, text: str) -> int:
        following = self._next
        for char in text:
            found = following[state].get(char)
            state = self._step(state, char) if found is None else found
        return state

    def _step(self, state: int, char: str) -> int:
        self._spend(self._words)
        takes = self._takes.get(char)
        if takes is None:
            takes = self._takes[char] = self._taken_by(char)
        before = self._sets[state]
        after = ((before & takes) << 1) | (before & self._stars)
        number = self._numbers.get(after)
        if number is None:
            number = self._numbers[after] = len(self._sets)
            self._sets.append(after)
            self._next.append({})
            self._hits.append(None)
            self._held += self._words + _FREE
        self._next[state][char] = number
        return number

    def _taken_by(self, char: str) -> int:
        """Return the places that a character leads on from."""
        self._spend(4 * self._words * (1 + len(self._several)))
        found = self._set_of(char) if char in self._single and char != "?" else 0
        for pattern, one in self._several:
            if pattern.fullmatch(char) is not None:
                found |= self._set_of(one)
        return found

    def _set_of(self, one: str) -> int:
        if one not in self._sets_of:
            self._sets_of[one] = _bits(self._single[one], self._size)
        return self._sets_of[one]

    def _hits_at(self, state: int) -> tuple[int, ...]:
        found = self._hits[state]
        if found is None:
            ends = self._sets[state] & self._ends
            places = re.finditer("1", f"{ends:b}"[::-1]) if ends else ()
            found = tuple(self._at_end[place.start()] for place in places)
            self._spend(8 * self._words if ends else 0)
            self._hits[state] = found
            self._held += len(found)
        return found

    def _spend(self, words: int) -> None:
        self._work += max(0, words - _FREE)
        if self._work > MAX_WORK:
            raise TooSlowError


def _bits(places: Sequence[int], size: int) -> int:
    found = bytearray(size // 8 + 1)
    for place in places:
        found[place // 8] |= 1 << place % 8
    return int.from_bytes(found, "little")
