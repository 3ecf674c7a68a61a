"""What a pattern that takes no name may have meant: the names whose ends are spelt most like it."""

import difflib
import re
from collections.abc import Iterable, Sequence

from lowbitcli.recipe.patterns import Pattern

_MOST, _MOST_TAILS = 20_000, 2_000  # names that are looked at, and different ends of them


def nearest(pattern: Pattern, names: Sequence[str]) -> list[str]:
    """Return up to two of the names that a pattern that takes none of them may have meant."""
    wanted = re.sub(r"[\\^$*?()|\[\]+]", "", pattern.text.removeprefix("re:")).strip(".")
    near: dict[str, None] = {}
    for name in names[:_MOST]:
        near.setdefault(name)
    parts = wanted.count(".") + 1
    pool = _tails_of(near, parts)
    found = difflib.get_close_matches(wanted, list(pool), n=2, cutoff=0.5 if parts > 1 else 0.6)
    return list(dict.fromkeys(pool[one] for one in found))


def _tails_of(names: Iterable[str], parts: int) -> dict[str, str]:
    """Return the last `parts` components of the names, where one is asked for all of them, and
    the first full name of each."""
    pool: dict[str, str] = {}
    for name in names:
        for text in (name, name.removesuffix(".weight")):
            components = text.split(".")
            pool.setdefault(".".join(components[-parts:]), name)
            if parts == 1:
                for component in components:
                    pool.setdefault(component, name)
            if len(pool) > _MOST_TAILS:
                return pool
    return pool
