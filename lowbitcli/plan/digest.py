"""The name of a plan: equal digests mean equal output bytes, so that a run can prove it goes on
with its own."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from json.encoder import encode_basestring_ascii
from operator import attrgetter
from typing import Any

from lowbitcli import __version__
from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.tensors import Shape, TensorSpec


def digest(
    checkpoint: Checkpoint,
    recipe: Mapping[str, Any],
    specs: Mapping[str, Iterable[TensorSpec]],
    metadata: Mapping[str, Mapping[str, str]],
    config: bytes | None,
) -> str:
    """Return the sha256, in hex, over lowbit's version, the recipe, the source's headers, and the
    tensors (file -> specs), header metadata and config of the output.

    Weights are not read: that a source's numbers changed under an equal header is found by the
    checksums of what was read, not here.
    """
    first = {
        "config": hashlib.sha256(config or b"").hexdigest(),
        "metadata": {file: dict(said) for file, said in metadata.items()},
    }
    last = {
        "recipe": dict(recipe),
        "source": {
            name: [header.size, hashlib.sha256(header.raw).hexdigest()]
            for name, header in checkpoint.headers.items()
        },
        "version": __version__,
    }
    found = hashlib.sha256(_json(first)[:-1].encode())
    for piece in _output(specs):
        found.update(piece.encode())
    found.update(f",{_json(last)[1:]}".encode())
    return found.hexdigest()


def _output(specs: Mapping[str, Iterable[TensorSpec]]) -> Iterator[str]:
    """Yield the JSON of the key `output` file by file: all of it at once would take as much memory
    as the rest of a plan."""
    gap = ""
    yield ',"output":{'
    for file, listed in sorted(specs.items()):
        yield f"{gap}{_json(file)}:"
        ordered = sorted(listed, key=attrgetter("name"))
        lines = [f"[{encode_basestring_ascii(x)},{_kind(dtype, of)}" for x, dtype, of in ordered]
        yield f"[{','.join(lines)}]"
        gap = ","
    yield "}"


@lru_cache(maxsize=4096)  # a model has few different shapes
def _kind(dtype: str, shape: Shape) -> str:
    return _json([dtype, list(shape)])[1:]


_json = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
