"""What holds for every recipe: the kinds of tensors that are kept, the weights that are fused.

Both are data, in `configs/defaults.yaml`.
"""

from functools import cache
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.json_schema import SkipJsonSchema

from lowbitcli.errors import RecipeError
from lowbitcli.recipe import document, shelf
from lowbitcli.recipe.document import place_of
from lowbitcli.recipe.patterns import Pattern

SLOT = "{}"
_SUFFIX = ".weight"


class KeptKind(BaseModel):
    """A kind of tensor that stays as it is: `label` names one of them, `reason` says why.

    It takes a name one of whose `components` (the parts between dots) or the whole of which
    matches, and no `but`. `default` is what becomes of it where a recipe says nothing.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    label: str
    reason: str
    components: tuple[Pattern, ...] = ()
    patterns: tuple[Pattern, ...] = ()
    but: tuple[Pattern, ...] = ()
    default: Literal["keep", "quantize"] = "keep"


class FuseGroup(BaseModel):
    """Names of weights that are served as one matrix; `{}` stands for what they have in common."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    members: tuple[str, ...]
    where: SkipJsonSchema[str] = Field("", exclude=True)

    @model_validator(mode="before")
    @classmethod
    def _from_list(cls, value: Any) -> Any:
        if isinstance(value, FuseGroup):
            return value
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise ValueError('a fuse group is a list of names, such as ["{}.w1", "{}.w3"]')
        for item in value:
            _check_member(item)
        members = [str(item).removesuffix(_SUFFIX) for item in value]
        if len(set(members)) < 2:
            message = "a fuse group has at least two different members"
            raise RecipeError(message, where=place_of(value))
        return {"members": tuple(members), "where": place_of(value)}


def _check_member(member: str) -> None:
    if member.count(SLOT) != 1 or not member.partition(SLOT)[2].startswith("."):
        raise RecipeError(
            f"{str(member)!r} is no template of a name",
            where=place_of(member),
            hint='write {} once, then a dot and the rest of the name: "{}.w1"',
        )


class Defaults(BaseModel):
    """The content of `configs/defaults.yaml`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kinds: tuple[KeptKind, ...]
    fuse: tuple[FuseGroup, ...]


@cache
def load_defaults() -> Defaults:
    """Return what `configs/defaults.yaml` says."""
    shown = f"{shelf.DEFAULTS}.yaml"
    text = document.read(shelf.folder() / shown, shown)
    data = document.parse(text, shown, shipped=True)
    kinds = [{"name": str(name), **kind} for name, kind in data["kinds"].items()]
    return Defaults.model_validate({"kinds": kinds, "fuse": data["fuse"]})
