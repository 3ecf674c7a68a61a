"""`*.safetensors.index.json`: which shard holds which tensor.

    {"metadata": {"total_size": bytes of all tensors, ...}, "weight_map": {tensor name: file name}}

Source: what huggingface_hub writes (huggingface_hub 2.4, `serialization/_torch.py`). Readers
elsewhere follow whatever path the map holds; here a value is a plain file name that ends in
`.safetensors`, or the index is refused.
"""

import io
import json
from collections.abc import Mapping
from json.encoder import encode_basestring
from typing import Any

from lowbitcli.checkpoint import strict_json
from lowbitcli.checkpoint.header import Entry
from lowbitcli.errors import CheckpointError
from lowbitcli.tensors import safe

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"

_LINES = 10_000  # that are text and bytes at the same time


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
    plain: set[str] = set()  # there are few files, each named by many tensors
    for name, file in weight_map.items():
        if isinstance(file, str) and (file in plain or is_plain(file)):
            plain.add(file)
        else:
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
    """Return the index of `files` (file name -> tensors), one tensor a line, with what else the
    source's index said.

    Raises:
        ValueError: a tensor is in two files.
    """
    weight_map: dict[str, str] = {}
    total = 0
    for file, entries in sorted(files.items()):
        if not weight_map.keys().isdisjoint(entries):
            name = next(name for name in entries if name in weight_map)
            raise ValueError(f'tensor "{safe(name)}" in {weight_map[name]} and in {file}')
        weight_map.update(dict.fromkeys(entries, file))
        total += sum([stop - start for _, start, stop in entries.values()])
    kept = {key: value for key, value in (source or {}).items() if key != "weight_map"}
    kept["metadata"] = {**(kept.get("metadata") or {}), "total_size": total}
    # An encoder that indents is written in Python, and slow: only what is short goes through it.
    head = json.dumps(kept, ensure_ascii=False, indent=2).removesuffix("\n}")
    document = io.BytesIO()  # which gives away what it holds without a copy
    document.write(f'{head},\n  "weight_map": {{'.encode())
    shown = {file: encode_basestring(file) for file in files}
    names, gap = sorted(weight_map), "\n"
    for first in range(0, len(names), _LINES):
        some = names[first : first + _LINES]
        lines = [f"    {encode_basestring(name)}: {shown[weight_map[name]]}" for name in some]
        document.write((gap + ",\n".join(lines)).encode())
        gap = ",\n"
    document.write(b"\n  }\n}\n")
    return document.getvalue()
