"""The name of a plan: equal digests mean equal output bytes, so that a run can prove it goes on
with its own."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from lowbitcli import __version__
from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.tensors import TensorSpec


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
    said = {
        "version": __version__,
        "recipe": dict(recipe),
        "source": {
            name: [header.size, hashlib.sha256(header.raw).hexdigest()]
            for name, header in checkpoint.headers.items()
        },
        "output": {
            file: sorted([spec.name, spec.dtype, list(spec.shape)] for spec in listed)
            for file, listed in specs.items()
        },
        "metadata": {file: dict(said) for file, said in metadata.items()},
        "config": hashlib.sha256(config or b"").hexdigest(),
    }
    text = json.dumps(said, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
