"""Shards cut anew: the weights in the order in which the source holds them, as many to a file as
its limit of bytes takes.

    one file     <stem>.safetensors, or the name of the source's one file
    more         <stem>-00001-of-0000N.safetensors, and an index
    <stem>       diffusion_pytorch_model where the source's files are called so, else model

A file ends before the weight that would take its tensors past the limit; all parts of a weight are
in one file, and a weight larger than the limit has a file to itself. Headers do not count, as they
do not in huggingface_hub 2.4 (`serialization/_base.py`), which cuts the same way.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.checkpoint.shard_index import SUFFIX
from lowbitcli.errors import UsageError
from lowbitcli.plan.nouns import Weight
from lowbitcli.tensors import DATA

DIFFUSERS = "diffusion_pytorch_model"


@dataclass(frozen=True)
class Placed:
    """Weights that know their output files, and output file -> the source's files that what is in
    it comes from."""

    weights: Sequence[Weight]
    files: Mapping[str, tuple[str, ...]]


def place(weights: Sequence[Weight], checkpoint: Checkpoint, limit: int | None) -> Placed:
    """Put weights where the source has them or, where there is a `limit`, into shards of at most
    so many bytes.

    Raises:
        UsageError: the limit is no size, or a file that was named alone would have to be cut.
    """
    unmoved = Placed(weights, {file: (file,) for file in checkpoint.files})
    if limit is None or not weights:
        return unmoved
    if limit < 1:
        raise UsageError("a shard has at least one byte", hint="--max-shard-size 5GB")
    if not checkpoint.is_directory:
        size = sum(weight.bytes_out for weight in weights)
        if size > limit:
            raise UsageError(
                f"the output is one file of {size:,} bytes, and --max-shard-size is {limit:,}",
                hint="only a directory is written in shards: name the model's directory, "
                "or leave --max-shard-size out",
            )
        return unmoved
    return _cut(weights, checkpoint, limit)


def _cut(weights: Sequence[Weight], checkpoint: Checkpoint, limit: int) -> Placed:
    shard_of: dict[int, int] = {}
    shard = held = 0
    for number in _in_order(weights, checkpoint):
        size = weights[number].bytes_out
        if held and held + size > limit:
            shard, held = shard + 1, 0
        shard_of[number] = shard
        held += size
    names = _names(shard + 1, checkpoint)
    moved = [_moved(weight, names[shard_of[number]]) for number, weight in enumerate(weights)]
    sources: dict[str, dict[str, None]] = {name: {} for name in names}
    for number, weight in enumerate(weights):
        sources[names[shard_of[number]]][weight.reads[DATA].file] = None
    return Placed(moved, {name: tuple(sorted(files)) for name, files in sources.items()})


def _in_order(weights: Sequence[Weight], checkpoint: Checkpoint) -> list[int]:
    """Return the numbers of the weights in the order of their data in the source."""

    def position(number: int) -> tuple[str, int, int]:
        read = weights[number].reads[DATA]
        return read.file, checkpoint.tensors[read.spec.name].start, number

    return sorted(range(len(weights)), key=position)


def _names(count: int, checkpoint: Checkpoint) -> list[str]:
    if count == 1 and len(checkpoint.files) == 1:
        return list(checkpoint.files)
    stem = DIFFUSERS if any(file.startswith(DIFFUSERS) for file in checkpoint.files) else "model"
    if count == 1:
        return [stem + SUFFIX]
    return [f"{stem}-{number:05d}-of-{count:05d}{SUFFIX}" for number in range(1, count + 1)]


def _moved(weight: Weight, file: str) -> Weight:
    if all(part.file == file for part in weight.writes.values()):
        return weight
    writes = {name: part._replace(file=file) for name, part in weight.writes.items()}
    return weight._replace(writes=writes)


def index_name(files: Iterable[str]) -> str:
    """Return what loaders of these files call their index."""
    stem = DIFFUSERS if any(name.startswith(DIFFUSERS) for name in files) else "model"
    return f"{stem}.safetensors.index.json"
