"""The files that stand beside the weights of an output, and whether they are those that were
written: sha256 of each, in the manifest's `beside`."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from lowbitcli.checkpoint import directory, strict_json
from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.checkpoint.shard_index import INDEX_SUFFIX
from lowbitcli.errors import CheckpointError, OutputError

_SLICE = 8 << 20
_MOST = 1 << 30  # larger ones are not what stands beside weights


class Changed(NamedTuple):
    """A file that is not the one that was written; `matters` where readers of the weights go by
    it."""

    file: str
    message: str
    matters: bool


def digest(size: int, read: Callable[[int, int], bytes | bytearray]) -> str:
    """Return the sha256 of `size` bytes, which `read(offset, length)` returns."""
    found = hashlib.sha256()
    for start in range(0, size, _SLICE):
        found.update(read(start, min(_SLICE, size - start)))
    return found.hexdigest()


def check(checkpoint: Checkpoint, beside: Mapping[str, str]) -> Iterator[Changed]:
    """Yield the files that differ from `beside` (path in the directory -> sha256)."""
    # A path of a stranger's manifest is not opened for its own sake; `inside` holds an index to
    # the directory.
    if not checkpoint.is_directory:
        return
    for name, expected in sorted(beside.items()):
        matters = name.endswith(INDEX_SUFFIX)
        if not matters and name not in checkpoint.sidecars:
            yield Changed(name, "written beside the weights, and not there", matters)
            continue
        try:
            path = directory.inside(checkpoint.root, name)
            raw = strict_json.read_bytes(path, name, _MOST)
        except (CheckpointError, OutputError) as error:
            yield Changed(name, error.message, matters)
            continue
        if hashlib.sha256(raw).hexdigest() != expected:
            yield Changed(name, "not the file that was written", matters)
