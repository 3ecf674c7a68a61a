"""Patterns over tensor names: literals, globs, and regular expressions of bounded matching time.

| written | takes |
|---|---|
| `lm_head.weight`, `lm_head` | that tensor, or the weight of that module |
| `*.mlp.*` | a glob over the whole name: `*` (dots too) `?` `[abc]` `[!abc]`, case sensitive |
| `re:.*_proj$` | a regular expression, anchored at the start only, as in compressed-tensors |

Each is tried on the tensor's name and on its module's, the name without `.weight`.

What makes their time bounded is in `lowbitcli.regex`.
"""

import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.json_schema import SkipJsonSchema

from lowbitcli.errors import RecipeError
from lowbitcli.recipe.document import Text, place_of
from lowbitcli.regex import MAX_PATTERN, TOO_SLOW, compile_bounded

_WEIGHT = r"(?:\.weight)?\Z"
_SETS = "as in [0-9], with no * before the ]; the character itself is [[]"


class Pattern(BaseModel):
    """One pattern of a recipe; `where` is its place, `shipped`: from this package."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    text: str
    where: SkipJsonSchema[str] = Field("", exclude=True)
    shipped: SkipJsonSchema[bool] = Field(False, exclude=True)

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if isinstance(value, Pattern):
            return value
        if not isinstance(value, str):
            raise ValueError("a pattern is text")
        shipped = isinstance(value, Text) and value.shipped
        _check(value)
        return {"text": str(value), "where": place_of(value), "shipped": shipped}

    @property
    def is_regex(self) -> bool:
        return self.text.startswith("re:")

    @property
    def is_literal(self) -> bool:
        return not self.is_regex and not any(char in self.text for char in "*?[")

    @property
    def wildcards(self) -> int:
        """How many characters of it stand for others."""
        return sum(self.text.count(char) for char in "*?[+{")

    @property
    def sees_the_end(self) -> bool:
        """Can this expression take a module's name, the start of a tensor's, but not that?"""
        return self.is_regex and any(part in self.text for part in ("$", "\\Z", "\\b", "\\B", "(?"))

    def source(self, counter: list[int]) -> str:
        """Return the regular expression for this; `counter` numbers groups where many are combined.

        Those of globs and literals take the tensor's name and the module's, those of `re:` are to
        be tried on both.
        """
        if self.is_regex:
            return f"(?:{self.text[3:]})"
        return _glob(self.text, counter) + _WEIGHT


def _check(text: str) -> None:
    where = place_of(text)
    if not text or text == "re:":
        raise RecipeError("a pattern is empty", where=where, hint='to take everything, write "*"')
    if len(text) > MAX_PATTERN:
        raise RecipeError(f"a pattern has at most {MAX_PATTERN} characters", where=where)
    if text.startswith("re:"):
        _check_regex(text[3:], where)
        return
    if "[" not in text:
        return
    if "[" in characters(text):
        message = f"{str(text)!r} is no pattern: a [ is not closed"
        raise RecipeError(message, where=where, hint=_SETS)
    try:
        re.compile(_glob(text, [0]))
    except re.error as error:  # where in the expression that is made of it helps nobody
        message = f"{str(text)!r} is no pattern: {error.msg}"
        raise RecipeError(message, where=where) from error


def _check_regex(text: str, where: str) -> None:
    try:
        compile_bounded(text)
    except ValueError as error:
        slow = str(error) == TOO_SLOW
        hint = "use fewer of .* and of alternatives, or several patterns" if slow else ""
        raise RecipeError(f"{'re:' + text!r} {error}", where=where, hint=hint) from error


def _glob(text: str, counter: list[int]) -> str:
    """Return the regular expression of a glob, in which no `*` but the last is ever tried again.

    The first place where the text between two stars fits is always the right one, so a lookahead
    with a group keeps it (what atomic groups do from Python 3.11 on).
    """
    pieces = [_no_stars(piece) for piece in re.split(r"\*+", text)]
    if len(pieces) == 1:
        return pieces[0]
    out = [pieces[0]]
    for piece in pieces[1:-1]:
        counter[0] += 1
        group = f"s{counter[0]}"
        out.append(f"(?=(?P<{group}>.*?{piece}))(?P={group})")
    return "".join([*out, ".*", pieces[-1]])


def characters(text: str) -> list[str]:
    """Return what a glob asks for, one character after the other: itself, `?`, `[...]` as a regular
    expression has it; and `*` for any number of any."""
    out: list[str] = []
    for number, piece in enumerate(re.split(r"\*+", text)):
        out += ["*", *_characters(piece)] if number else _characters(piece)
    return out


def _characters(text: str) -> list[str]:
    out: list[str] = []
    index = 0
    while index < len(text):
        char = text[index]
        end = text.find("]", index + 2)
        if char == "[" and end > 0:
            body = text[index + 1 : end]
            negated, body = body[0] == "!" and len(body) > 1, body
            body = body[1:] if negated else body
            kept = re.sub(r"([\\\[\]^&~|])", r"\\\1", body)
            out.append(f"[{'^' if negated else ''}{kept}]")
            index = end + 1
            continue
        out.append(char)
        index += 1
    return out


def _no_stars(piece: str) -> str:
    return "".join(
        "." if one == "?" else one if len(one) > 1 else re.escape(one) for one in _characters(piece)
    )


def _one_or_more(value: Any) -> Any:
    if isinstance(value, str | Pattern):
        return (value,)
    if not isinstance(value, list | tuple):
        words = {dict: "a mapping", bool: "true or false", int: "a number", float: "a number"}
        kind = next((word for one, word in words.items() if isinstance(value, one)), "this")
        raise ValueError(f"takes a pattern or a list of patterns, not {kind}")
    return value


Patterns = Annotated[tuple[Pattern, ...], BeforeValidator(_one_or_more)]
