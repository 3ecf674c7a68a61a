"""Will it load? A checkpoint as a consumer finds it, and the rules that it is held against: by
`verify --for vllm`, and on paper where a recipe names its consumer.

A rule is a function that yields what it found; the tables of rules say whom it is for, and each
function's docstring where it was read. What was read, and of which version, stands in
`containers/reading`. The rules of this room look at names, dtypes, shapes and configs alone.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.containers.ct_config import of as quantization_config
from lowbitcli.containers.reading import CONSUMERS
from lowbitcli.errors import CheckpointError, RecipeError, UsageError
from lowbitcli.plan.source import Source, SourceWeight
from lowbitcli.recipe import Consumer, Matcher, Recipe
from lowbitcli.recipe.consumer import AT, named
from lowbitcli.recipe.document import did_you_mean
from lowbitcli.tensors import DATA, FLOATING, safe

FAIL, WARN = "fail", "warn"


class Found(NamedTuple):
    """What a rule found: the tensor that it is about ("" for the checkpoint), and why."""

    tensor: str
    message: str
    severity: str = FAIL


@dataclass(frozen=True)
class Seen:
    """A checkpoint as a consumer finds it: tensors, what its config says, and what we make of
    both."""

    checkpoint: Checkpoint
    source: Source

    @property
    def config(self) -> Mapping[str, Any]:
        return self.checkpoint.config or {}

    @cached_property
    def said(self) -> Mapping[str, Any]:
        """The quantization_config; empty where there is none that can be read."""
        try:
            return quantization_config(self.checkpoint.config)
        except CheckpointError:
            return {}

    @property
    def container(self) -> str:
        return self.source.container.name

    @cached_property
    def quantized(self) -> dict[str, SourceWeight]:
        """Module -> its quantized weight."""
        return {
            _module(name): weight
            for name, weight in self.source.weights.items()
            if weight.scheme is not None
        }

    @cached_property
    def plain(self) -> dict[str, SourceWeight]:
        """Module -> its matrix that is stored in floating point."""
        return {
            _module(name): weight
            for name, weight in self.source.weights.items()
            if weight.scheme is None
            and weight.dtype in FLOATING
            and len(weight.shape) == 2
            and name.endswith(".weight")
        }

    @cached_property
    def modules(self) -> frozenset[str]:
        """Every module of which a tensor is there, and what they are in."""
        found: set[str] = set()
        for name in self.checkpoint.tensors:
            module = name.rpartition(".")[0]
            while module and module not in found:
                found.add(module)
                module = module.rpartition(".")[0]
        return frozenset(found)

    @cached_property
    def groups(self) -> list[list[str]]:
        """Modules that are served as one matrix, of those that are there."""
        names = [f"{module}.weight" for module in (*self.quantized, *self.plain)]
        groups: dict[str, list[str]] = {}
        for name, key in Recipe().groups(names).items():
            groups.setdefault(key, []).append(_module(name))
        return [sorted(group) for group in groups.values() if len(group) > 1]

    @property
    def architecture(self) -> str:
        said = self.config.get("architectures")
        return str(said[0]) if isinstance(said, list) and said else ""

    def kind_of(self, module: str) -> str:
        """Return the kind by which a module is kept by default, "" for an ordinary one."""
        return _kinds().decide(f"{module}.weight").kind

    def has(self, name: str) -> bool:
        return name in self.checkpoint.tensors

    def data_of(self, module: str) -> str:
        """Return the tensor that holds a module's data."""
        return (self.quantized.get(module) or self.plain[module]).reads[DATA].spec.name


@cache
def _kinds() -> Matcher:
    return Matcher(Recipe())


Check = Callable[[Seen, str], Iterator[Found]]


class Rule(NamedTuple):
    """A check, and the consumers that it holds for."""

    check: Check
    consumers: tuple[str, ...]


def asked(names: Iterable[str]) -> tuple[Consumer, ...]:
    """Return the consumers that are named, each once, as recipes name them; a name may hold
    several, with commas.

    Raises:
        UsageError: no such consumer is known, one has no name, or it names no version.
    """
    wanted = [part.strip().lower() for name in names for part in name.split(",")]
    found = []
    for text in wanted:
        name = text.partition(AT)[0].strip()
        if not name:
            raise UsageError("a consumer without a name", hint=f"known: {', '.join(CONSUMERS)}")
        if name not in CONSUMERS:
            raise UsageError(f"no consumer {safe(name)!r}", hint=did_you_mean(name, CONSUMERS))
        try:
            found.append(named(text))
        except RecipeError as error:
            raise UsageError(error.message, hint=error.hint) from error
    return tuple(dict.fromkeys(found))


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def many(names: Iterable[str], shown: int = 3) -> str:
    """Return some names for a message, and how many more there are."""
    listed = sorted(names)
    told = ", ".join(safe(name) for name in listed[:shown])
    return told + (f" and {len(listed) - shown:,} more" if len(listed) > shown else "")


__all__ = ["CONSUMERS", "FAIL", "WARN", "Found", "Rule", "Seen", "asked", "many"]
