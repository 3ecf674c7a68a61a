"""How much each input channel counts, from a file that `lowbit importance` wrote: which weights of
a plan have it.

    lowbit.importance   "1" in the file's metadata, beside what it was measured on
    MODULE              I8 [in], the exponents of `lowbit_kernels.importance`
    MODULE              I8 [experts, in], of all experts of a layer; [in] where they are equal

MODULE is a weight's name without `.weight`, of experts without their number: `a.experts.up_proj` is
for `a.experts.7.up_proj.weight` as for a stack of that name.
"""

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.containers.layouts import is_cropped
from lowbitcli.containers.stacks import FUSED
from lowbitcli.errors import CheckpointError, UsageError
from lowbitcli.plan.nouns import PathLike, Weight
from lowbitcli.tensors import Shape, TensorSpec, safe

KEY, FORMAT = "lowbit.importance", "1"
NAMED = 5  # modules that are named
ZERO = b"\x80"  # the exponent of a column that is never anything but zero

_EXPERT = re.compile(r"((?:.*\.)?experts)\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Importance:
    """An importance file that was read: exponents by module, what they were measured on, and a
    digest over the exponents."""

    name: str
    tensors: Mapping[str, tuple[Shape, bytes]]
    said: Mapping[str, str]
    digest: str

    @classmethod
    def open(cls, path: PathLike) -> "Importance":
        """Read a file.

        Raises:
            CheckpointError: it cannot be read, or is no importance file.
        """
        if Path(path).is_dir():
            raise CheckpointError(f"{safe(os.fspath(path))}: a directory, and no importance file")
        with Checkpoint.open(path) as file:
            (metadata,) = file.metadata.values()
            if metadata.get(KEY) != FORMAT:
                raise CheckpointError(
                    f"{safe(os.fspath(path))}: no importance file of format {FORMAT}",
                    hint="lowbit importance MODEL -o FILE makes one",
                )
            found: dict[str, tuple[Shape, bytes]] = {}
            total = hashlib.sha256()
            for name, stored in file.tensors.items():
                _check(path, stored.spec)
                data = bytes(file.read(name))
                found[name] = stored.spec.shape, data
                total.update(f"{name} {list(stored.spec.shape)}\n".encode() + data)
        return cls(Path(path).name, found, metadata, total.hexdigest())

    @property
    def told(self) -> str:
        """Return what it was measured on, in words."""
        what = "tokens of a text" if self.said.get("text") else "random tokens"
        return f"{self.said.get('tokens', '?')} {what}"

    def key(self, module: str) -> tuple[str, int | None] | None:
        """Return the name that a module's exponents have in the file, and its number among the
        experts that they are for."""
        return next((one for one in _keys(module) if one[0] in self.tensors), None)

    def of(self, weight: Weight) -> bytes:
        """Return the exponents of a weight's columns, of each matrix where they differ; none where
        the file has none.

        Raises:
            CheckpointError: it has them of another number of columns, or of experts.
        """
        found = self.key(module_of(weight.name))
        if found is None:
            return b""
        name, expert = found
        shape, data = self.tensors[name]
        cols = shape[-1]
        if len(shape) == 2 and expert is not None and expert < shape[0]:
            shape, data = shape[1:], data[expert * cols :][:cols]
        if len(weight.shape) == 3 and shape[:-1] == weight.shape[:1]:
            shape = shape[1:]
        missing = weight.shape[-1] - cols
        if is_cropped(weight.plain) and 0 < missing < 32:
            data, cols = data + ZERO * missing, weight.shape[-1]
        if len(shape) != 1 or cols != weight.shape[-1]:
            raise CheckpointError(
                f"{safe(self.name)}: the importance of {safe(name)} is "
                f"{list(self.tensors[name][0])}, and {safe(weight.name)} is {list(weight.shape)}",
                hint="was it measured on this model?",
            )
        return data


def model_of(checkpoint: Checkpoint) -> str:
    """Return what an importance file names the checkpoint by that it was measured on: a sha256 over
    its files' names, sizes and headers. Two of the same shapes have the same."""
    digest = hashlib.sha256()
    for name, header in sorted(checkpoint.headers.items()):
        digest.update(f"{name} {header.size}\n".encode() + header.raw)
    return digest.hexdigest()


def module_of(name: str) -> str:
    """Return what a weight's module is called."""
    return name.removesuffix(".weight")


def stacked_name(module: str) -> tuple[str, int | None]:
    """Return what all experts' modules of this kind are called, and which of them it is."""
    found = _EXPERT.fullmatch(module)
    return (module, None) if found is None else (f"{found[1]}.{found[3]}", int(found[2]))


def _keys(module: str) -> Iterator[tuple[str, int | None]]:
    """Yield the names that a module's exponents may have, and its number among experts."""
    yield module, None
    stem, expert = stacked_name(module)
    if expert is not None:
        yield stem, expert
    before, dot, member = stem.rpartition(".")
    for whole, members in FUSED.items():
        if member in members:
            yield f"{before}{dot}{whole}", expert
        elif member == whole:
            yield f"{before}{dot}{members[0]}", expert


def _check(path: PathLike, spec: TensorSpec) -> None:
    if spec.dtype != "I8" or len(spec.shape) not in (1, 2) or 0 in spec.shape:
        raise CheckpointError(
            f"{safe(os.fspath(path))}: {safe(spec.name)} is {spec.dtype} {list(spec.shape)}, "
            "and exponents are I8 [in] or [experts, in]"
        )


def weighs(weight: Weight) -> bool:
    """Does a run search scales of this weight in a way that can weigh its columns?"""
    return weight.target is not None and not weight.recodes and weight.rule in weight.target.weighs


def weighted(
    weights: Sequence[Weight], importance: Importance, checkpoint: Checkpoint
) -> tuple[list[Weight], tuple[str, ...]]:
    """Return the weights with the importance of those whose scales are searched, and what to tell.

    Raises:
        UsageError: no weight is searched by a rule that takes it, or it is of another model.
        CheckpointError: it is of other shapes.
    """
    searched = [weight for weight in weights if weighs(weight)]
    if not searched:
        raise UsageError(
            "--importance is given, and no rule searches scales with it",
            hint="--recipe nvfp4-best does, or scale: mse in a rule of nvfp4 or mxfp4",
        )
    found = [x._replace(importance=importance.of(x)) if weighs(x) else x for x in weights]
    without = [x.name for x in found if weighs(x) and not x.importance]
    if len(without) == len(searched):
        raise UsageError(
            f"{safe(importance.name)} has the importance of none of the {len(searched):,} weights "
            "whose scales are searched",
            hint="was it measured on this model?",
        )
    used = {key[0] for x in weights if (key := importance.key(module_of(x.name))) is not None}
    having = len(searched) - len(without)
    told = [
        f"{having:,} of {len(searched):,} searched weights have their columns weighed by "
        f"{safe(importance.name)} ({safe(importance.told)})",
        *_foreign(importance, checkpoint),
        *_listed("searched without importance, which the file lacks:", without),
        *_listed(
            f"{safe(importance.name)} has modules that this checkpoint lacks:",
            sorted(importance.tensors.keys() - used),
        ),
    ]
    return found, tuple(told)


def _foreign(importance: Importance, checkpoint: Checkpoint) -> list[str]:
    if importance.said.get("model") in (None, model_of(checkpoint)):
        return []
    return [
        f"{safe(importance.name)} was measured on other files than these: is it the same model, "
        "stored otherwise?"
    ]


def _listed(what: str, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    more = [f"and {len(names) - NAMED:,} more"] if len(names) > NAMED else []
    return ["\n".join([what, *(safe(name) for name in names[:NAMED]), *more])]
