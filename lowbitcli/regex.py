"""Regular expressions from strangers, of bounded matching time.

A backtracking matcher tries at most as many ways as the parts of a pattern can be combined:
for k unbounded repeats over a name of n characters C(n + k, k), times the alternatives. Patterns
above MAX_WAYS for n = MAX_NAME are refused, and so are repeats of what can match in several ways.
"""

import math
import re
import warnings
from typing import Any

try:  # where the parser of regular expressions lives depends on Python: 3.11 and later, 3.10
    from re import _parser as sre  # pyright: ignore[reportAttributeAccessIssue]
except ImportError:
    import sre_parse as sre

MAX_PATTERN = 512
MAX_NAME = 256  # longer tensor names are matched by no pattern
MAX_WAYS = 2**24
MAX_NESTING = 16

TOO_SLOW = "could take too long to match"


def compile_bounded(text: str) -> re.Pattern[str]:
    """Return the compiled expression.

    Raises:
        ValueError: it is too long, is none, uses what is not taken, or could take long to match.
    """
    if len(text) > MAX_PATTERN:
        raise ValueError(f"has more than {MAX_PATTERN} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tree = sre.parse(text)
        if tree.state.flags & ~re.UNICODE:
            raise _RefusedError("flags such as (?i) are not taken")
        if tree.state.groupdict:
            raise _RefusedError("named groups are not taken")
        ways, repeats = _ways(tree.data, 0, last=True)
        compiled = re.compile(text)
    except (re.error, OverflowError, RecursionError, Warning) as error:
        raise ValueError(f"is no regular expression: {error}") from error
    if ways * math.comb(MAX_NAME + repeats, repeats) > MAX_WAYS:
        raise ValueError(TOO_SLOW)
    return compiled


class _RefusedError(ValueError):
    pass


def _ways(items: list[Any], depth: int, last: bool = False) -> tuple[int, int]:
    """Return the alternatives of a sequence, multiplied, and the number of its unbounded repeats.

    `last`: the sequence ends the pattern. A repeat of any character there never has to try again.
    """
    if depth > MAX_NESTING:
        raise _RefusedError(f"is nested deeper than {MAX_NESTING}")
    ways, repeats = 1, 0
    for index, (op, argument) in enumerate(items):
        more, unbounded = _ways_of(op, argument, depth)
        if unbounded and last and index == len(items) - 1 and str(op) == "MAX_REPEAT":
            inner = argument[2].data
            if len(inner) == 1 and str(inner[0][0]) == "ANY":
                continue
        ways, repeats = ways * more, repeats + unbounded
        if ways > MAX_WAYS or repeats > MAX_NAME:
            return MAX_WAYS + 1, 0
    return ways, repeats


def _ways_of(op: Any, argument: Any, depth: int) -> tuple[int, int]:
    name = str(op)
    if name in ("LITERAL", "NOT_LITERAL", "ANY", "IN", "AT"):
        return 1, 0
    if name in ("ASSERT", "ASSERT_NOT"):
        return _ways(argument[1].data, depth + 1)
    if name == "SUBPATTERN":
        _, added, removed, body = argument
        if added or removed:
            raise _RefusedError("flags such as (?i) are not taken")
        return _ways(body.data, depth + 1)
    if name == "BRANCH":
        parts = [_ways(part.data, depth + 1) for part in argument[1]]
        return sum(ways for ways, _ in parts), max(repeats for _, repeats in parts)
    if name in ("MAX_REPEAT", "MIN_REPEAT"):
        low, high, body = argument
        ways, repeats = _ways(body.data, depth + 1)
        if high > 1 and (ways > 1 or repeats):
            raise _RefusedError("repeats something that can match in several ways, as (a+)+ does")
        if high - low > 16:
            return ways, repeats + 1
        return ways * (high - low + 1), repeats
    raise _RefusedError("uses more than . [] () | * + ? {} ^ $ and lookahead")
