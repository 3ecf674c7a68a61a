"""Who is to load the output: `consumer:` of a recipe and `--for` of verify, one or several.

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
from lowbitcli.tensors import safe

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
        wanted, known = self.version.split("."), _number(self.name).split(".")
        return bool(self.version) and known[: len(wanted)] != wanted

    @property
    def doubt(self) -> str:
        """What is to be said where another version is asked for, "" where it is the known one."""
        if not self.is_other:
            return ""
        asked = f"{self.name} {safe(self.version)} is asked for"
        return f"{asked}, and what it loads is known of {self.known} only"


def named(text: str) -> Consumer:
    """Return the consumer that `vllm` or `vllm@0.33` names.

    Raises:
        RecipeError: no such program is known, or what stands behind @ is no version.
    """
    name, at, version = (part.strip() for part in text.partition(AT))
    if name not in CONSUMERS:
        raise RecipeError(
            f"consumer {name!r} is unknown",
            where=place_of(text),
            hint=did_you_mean(name, CONSUMERS),
        )
    version = version.removeprefix("v")
    if at and not version.replace(".", "").isalnum():
        message = f"{str(text)!r} names no version"
        raise RecipeError(message, where=place_of(text), hint=f"as in {name}@{_number(name)}")
    return Consumer(name=name, version=version, where=place_of(text))


def _number(name: str) -> str:
    """Return the version that is known of a program."""
    return VERSIONS[name].split()[-1].removeprefix("@")


def consumers(value: Any) -> Any:
    """Return what a recipe says under `consumer`."""
    if isinstance(value, tuple):
        return value
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
        raise ValueError("is a name, such as vllm or vllm@0.33, or a list of them")
    return tuple(named(one) for one in listed)
