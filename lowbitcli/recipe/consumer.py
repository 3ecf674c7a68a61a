"""Who is to load the output: `consumer:` of a recipe, one or several.

    consumer: vllm
    consumer: [vllm, sglang@0.5.23]

The plan refuses what a consumer does not load, and warns of what it loads otherwise than meant.
What is known of each is of one version (`lowbitcli.containers.reading`); of another that is said.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema

from lowbitcli.containers.reading import CONSUMERS, VERSIONS
from lowbitcli.errors import RecipeError
from lowbitcli.recipe.document import did_you_mean, place_of

AT = "@"


class Consumer(BaseModel):
    """A program, as `lowbitcli.containers.reading` calls it, and the version that is asked for, ""
    for the one that is known."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    version: str = ""
    where: SkipJsonSchema[str] = Field("", exclude=True)

    @property
    def known(self) -> str:
        """The program and the version that what is known is of."""
        return VERSIONS[self.name]

    @property
    def is_other(self) -> bool:
        """Is another version asked for than the one that is known?"""
        wanted, known = self.version.split("."), self.known.split()[-1].split(".")
        return bool(self.version) and known[: len(wanted)] != wanted


def consumers(value: Any) -> Any:
    """Return what a recipe says under `consumer`."""
    if isinstance(value, tuple):
        return value
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
        raise ValueError("is a name, such as vllm or vllm@0.33, or a list of them")
    found = []
    for one in listed:
        name, _, version = (part.strip() for part in one.partition(AT))
        if name not in CONSUMERS:
            raise RecipeError(
                f"consumer {name!r} is unknown",
                where=place_of(one),
                hint=did_you_mean(name, CONSUMERS),
            )
        if AT in one and not version.removeprefix("v").replace(".", "").isalnum():
            message = f"{one!r} names no version"
            raise RecipeError(message, where=place_of(one), hint="as in vllm@0.33")
        found.append({"name": name, "version": version.removeprefix("v"), "where": place_of(one)})
    return tuple(found)
