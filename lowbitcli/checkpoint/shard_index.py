"""`*.safetensors.index.json`: which shard holds which tensor.

    {"metadata": {"total_size": bytes of all tensors, ...}, "weight_map": {tensor name: file name}}

Source: what huggingface_hub writes (huggingface_hub 2.4, `serialization/_torch.py`). Readers
elsewhere follow whatever path the map holds; here a value is a plain file name that ends in
`.safetensors`, or the index is refused.
"""

import json
from collections.abc import Mapping
from typing import Any

from lowbitcli.checkpoint import strict_json
from lowbitcli.checkpoint.header import Entry
from lowbitcli.errors import CheckpointError
from lowbitcli.tensors import safe

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"


def parse(raw: bytes, where: str) -> dict[str, Any]:
    """Return an index whose `weight_map` is known to hold plain file names.

    Raises:
        CheckpointError: no JSON object, no usable weight_map, or a value that is no file name.
    """
    found = strict_json.parse_object(raw, where)
    weight_map = found.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{where}: no weight_map")
    if not isinstance(found.get("metadata", {}), dict):
        raise CheckpointError(f"{where}: metadata is not an object")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not is_plain(file):
            raise CheckpointError(
                f'{where}: tensor "{safe(name)}" is said to be in {safe(repr(file))}, '
                f"which is not a plain file name ending in {SUFFIX}",
                hint="nothing outside the checkpoint's directory is opened",
            )
    return found


def is_plain(file: str) -> bool:
    """Is this a file name and nothing else, and that of a safetensors file?"""
    return (
        file.endswith(SUFFIX)
        and not file.startswith(".")
        and not any(c in file for c in "/\\\0")
        and safe(file) == file
    )


def index(
    files: Mapping[str, Mapping[str, Entry]], source: Mapping[str, Any] | None = None
) -> bytes:
    """Return the index of `files` (file name -> tensors), with what else the source's index said.

    Raises:
        ValueError: a tensor is in two files.
    """
    weight_map: dict[str, str] = {}
    total = 0
    for file, entries in sorted(files.items()):
        for name, entry in entries.items():
            if name in weight_map:
                raise ValueError(f'tensor "{safe(name)}" in {weight_map[name]} and in {file}')
            weight_map[name] = file
            total += entry.stop - entry.start
    kept = dict(source or {})
    document = {
        **kept,
        "metadata": {**(kept.get("metadata") or {}), "total_size": total},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return (json.dumps(document, ensure_ascii=False, indent=2) + "\n").encode()
