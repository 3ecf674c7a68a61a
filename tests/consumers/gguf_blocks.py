"""A small reader of GGUF files: metadata, and tensors of four block types as fp32.

| type | block of 32 elements | value |
|---|---|---|
| F32, F16 | | as stored |
| Q4_1 | fp16 d, fp16 m, 16 bytes | d * nibble + m; low nibbles are elements 0 to 15 |
| Q8_0 | fp16 d, 32 int8 | d * code |

Source: the GGUF specification of ggml (docs/gguf.md) and the block layouts of ggml-common.h.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i",
    6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
STRING, ARRAY = 8, 9
F32, F16, Q4_1, Q8_0 = 0, 1, 3, 8
BLOCK_BYTES = {F32: (1, 4), F16: (1, 2), Q4_1: (32, 20), Q8_0: (32, 34)}


@dataclass(frozen=True)
class Gguf:
    """Metadata by key and tensors by name, each in the order of its file."""

    metadata: dict[str, Any]
    tensors: dict[str, np.ndarray]


class _Cursor:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def string(self) -> str:
        size = self.scalar("<Q")
        self.at += size
        return self.data[self.at - size : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            inner, count = self.scalar("<I"), self.scalar("<Q")
            return [self.value(inner) for _ in range(count)]
        return self.scalar(SCALARS[kind])


def read(path: Path) -> Gguf:
    """Read a GGUF file of version 2 or 3; raise ValueError for anything else."""
    cursor = _Cursor(path.read_bytes())
    if cursor.scalar("<I") != 0x46554747 or cursor.scalar("<I") not in (2, 3):
        raise ValueError(f"{path} is no GGUF file of version 2 or 3")
    tensors, pairs = cursor.scalar("<Q"), cursor.scalar("<Q")
    metadata = {cursor.string(): cursor.value(cursor.scalar("<I")) for _ in range(pairs)}
    listed = []
    for _ in range(tensors):
        name = cursor.string()
        shape = [cursor.scalar("<Q") for _ in range(cursor.scalar("<I"))]
        listed.append((name, shape[::-1], cursor.scalar("<I"), cursor.scalar("<Q")))
    alignment = metadata.get("general.alignment", 32)
    start = -(-cursor.at // alignment) * alignment
    return Gguf(
        metadata,
        {
            name: _decode(cursor.data, start + offset, kind, shape)
            for name, shape, kind, offset in listed
        },
    )


def _decode(data: bytes, start: int, kind: int, shape: list[int]) -> np.ndarray:
    if kind not in BLOCK_BYTES:
        raise ValueError(f"no reader for GGUF type {kind}")
    elements, size = BLOCK_BYTES[kind]
    blocks = int(np.prod(shape)) // elements
    raw = np.frombuffer(data, np.uint8, blocks * size, start).reshape(blocks, size)
    if kind == F32:
        return raw.view("<f4").reshape(shape)
    if kind == F16:
        return raw.view("<f2").astype(np.float32).reshape(shape)
    d = raw[:, :2].copy().view("<f2").astype(np.float32)
    if kind == Q8_0:
        return (d * raw[:, 2:].view(np.int8)).reshape(shape)
    m = raw[:, 2:4].copy().view("<f2").astype(np.float32)
    nibbles = np.concatenate((raw[:, 4:] & 15, raw[:, 4:] >> 4), axis=1)
    return (d * nibbles + m).reshape(shape)
