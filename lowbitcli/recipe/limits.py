"""What weights may lose, by pattern: `thresholds:` of a recipe, held by `lowbit verify --recipe`.

    thresholds:
      - match: "*.down_proj"
        fail_under_db: 22
      - match: "*"
        max_rel_error: 0.12

The first whose pattern takes a weight is its limit.
"""

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, StrictFloat, model_validator
from pydantic.json_schema import SkipJsonSchema

from lowbitcli.errors import RecipeError
from lowbitcli.recipe.document import Mapping, did_you_mean, place_of
from lowbitcli.recipe.pattern_set import PatternSet
from lowbitcli.recipe.patterns import Patterns


class Threshold(BaseModel):
    """The SQNR that weights must reach, in decibels, and the relative error they may have."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    match: Patterns = Field(min_length=1)
    fail_under_db: StrictFloat | None = Field(None, gt=-1000, lt=1000)
    max_rel_error: StrictFloat | None = Field(None, ge=0)
    where: SkipJsonSchema[str] = Field("", exclude=True)

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        known = [key for key in cls.model_fields if key != "where"]
        for key in value if isinstance(value, Mapping) else ():
            if key not in known:
                message = f"key {str(key)!r} is unknown"
                raise RecipeError(message, where=place_of(key), hint=did_you_mean(key, known))
        if all(value.get(key) is None for key in ("fail_under_db", "max_rel_error")):
            message = "a threshold has a fail_under_db, a max_rel_error, or both"
            raise RecipeError(message, where=place_of(value))
        return {**value, "where": place_of(value)}


class Limits:
    """Thresholds in order."""

    def __init__(self, thresholds: Sequence[Threshold]) -> None:
        self._of = [number for number, one in enumerate(thresholds) for _ in one.match]
        self._set = PatternSet(pattern for one in thresholds for pattern in one.match)

    def of(self, name: str) -> int | None:
        """Return which threshold takes this weight, or its module, first; None where none does."""
        found = self._set.first(name)
        return None if found is None else self._of[found]
