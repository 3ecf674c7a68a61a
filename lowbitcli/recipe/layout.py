"""How weights lie in the source, where a recipe says it: `layout:`, patterns and words.

    layout:
      "*.experts.gate_up_proj": in_out interleaved
      "*.experts.down_proj": in_out
      "*.c_attn": in_out

The words are those of `lowbitcli.containers.stacks`. The first pattern that takes a name decides.
"""

import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.json_schema import SkipJsonSchema

from lowbitcli.containers.stacks import WORDS, Stacking
from lowbitcli.errors import CheckpointError, RecipeError
from lowbitcli.recipe.document import did_you_mean, place, place_of
from lowbitcli.recipe.pattern_set import PatternSet
from lowbitcli.recipe.patterns import Pattern
from lowbitcli.regex import MAX_NAME

WRONG = 'is a mapping of patterns to words, such as {"*.experts.down_proj": in_out}'


class Lie(BaseModel):
    """How the weights lie whose names `pattern` takes: `words` is one of WORDS."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pattern: Pattern
    words: str
    where: SkipJsonSchema[str] = Field("", exclude=True)

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        return re.compile(self.pattern.source([0]), re.DOTALL)

    def takes(self, name: str) -> bool:
        """Does the pattern take this tensor, or its module?"""
        if len(name) > MAX_NAME:
            return False
        module = name.removesuffix(".weight")
        return any(self._compiled.match(one) is not None for one in {name, module})


def lies(value: Any) -> Any:
    """Return what a recipe says under `layout`, in order."""
    if not isinstance(value, dict):
        return value if isinstance(value, tuple) else _several(value)
    found = []
    for pattern, words in value.items():
        if not isinstance(words, str):
            message = f"layout of {str(pattern)!r} is a word, such as in_out"
            raise RecipeError(message, where=place(value, [pattern]) or place_of(pattern))
        text = " ".join(words.split())
        if text not in WORDS:
            raise RecipeError(
                f"layout {str(words[:80])!r} is unknown",
                where=place_of(words) or place_of(pattern),
                hint=did_you_mean(words, WORDS),
            )
        found.append({"pattern": pattern, "words": str(text), "where": place_of(pattern)})
    return tuple(found)


def _several(value: Any) -> Any:
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise ValueError(WRONG)
    return tuple(lie for one in value for lie in lies(one))


class Layouts:
    """What a recipe says of how weights lie, by name."""

    def __init__(self, said: Sequence[Lie] = ()) -> None:
        self._said = tuple(said)
        self._set = PatternSet(lie.pattern for lie in self._said)

    def of(self, name: str) -> Stacking | None:
        """Return how the weight of this name lies, None where nothing says."""
        found = self._set.first(name) if self._said else None
        return None if found is None else Stacking.of(self._said[found].words)

    def where(self, name: str) -> str:
        """Return the place of the pattern that says how the weight of this name lies, "" where none
        does."""
        found = self._set.first(name) if self._said else None
        return "" if found is None else self._said[found].where

    def dead(self, names: Iterable[str]) -> None:
        """Raise RecipeError where a pattern takes none of the names of stacks and matrices; none of
        a recipe that was cut for a component is held to take something."""
        taking = self._set.taking(names) if self._said else ()
        for number, lie in enumerate(self._said):
            if not lie.pattern.shipped and number not in taking:
                raise RecipeError(
                    f"layout: {lie.pattern.text!r} takes no stack of experts and no matrix",
                    where=lie.where,
                    hint="lowbit inspect lists the names",
                )

    def document(self) -> list[list[str]]:
        """Return it as a JSON document, for those who read the output later."""
        return [[lie.pattern.text, lie.words] for lie in self._said]

    @classmethod
    def read(cls, document: Any) -> "Layouts":
        """Return what `document` told.

        Raises:
            CheckpointError: it is something else.
        """
        if document is None:
            return cls()
        try:
            pairs = TypeAdapter(list[tuple[str, str]]).validate_python(document)
            return cls([Lie.model_validate(one) for one in lies(dict(pairs))])
        except (ValidationError, RecipeError, ValueError) as error:
            raise CheckpointError("what the manifest says of layouts cannot be read") from error
