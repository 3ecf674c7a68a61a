"""Tensors on paper: name, dtype, shape and size, without the numbers and without a tensor library.

Dtypes are the strings of the safetensors header (safetensors 0.8, `safetensors/src/tensor.rs`,
enum Dtype).
"""

import math
import re
from functools import lru_cache
from typing import NamedTuple

# The parts that a quantized weight is stored in. A container says what each is called in a file.
DATA = "data"
SCALE = "scale"
GLOBAL_SCALE = "global_scale"
PARTS = (DATA, SCALE, GLOBAL_SCALE)

# name in a header -> (bits of one element, attribute of torch that holds its dtype; "" where torch
# has none)
DTYPES: dict[str, tuple[int, str]] = {
    "BOOL": (8, "bool"),
    "F4": (4, ""),
    "F6_E2M3": (6, ""),
    "F6_E3M2": (6, ""),
    "U8": (8, "uint8"),
    "I8": (8, "int8"),
    "F8_E5M2": (8, "float8_e5m2"),
    "F8_E4M3": (8, "float8_e4m3fn"),
    "F8_E8M0": (8, "float8_e8m0fnu"),
    "F8_E4M3FNUZ": (8, "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": (8, "float8_e5m2fnuz"),
    "I16": (16, "int16"),
    "U16": (16, "uint16"),
    "F16": (16, "float16"),
    "BF16": (16, "bfloat16"),
    "I32": (32, "int32"),
    "U32": (32, "uint32"),
    "F32": (32, "float32"),
    "C64": (64, "complex64"),
    "F64": (64, "float64"),
    "I64": (64, "int64"),
    "U64": (64, "uint64"),
}

# The dtypes that an unquantized weight may have: what quantize reads and dequantize writes.
FLOATING = ("F32", "BF16", "F16")
FP8 = ("F8_E4M3", "F8_E5M2")  # with no scale these may be numbers, or codes whose scale is lost

Shape = tuple[int, ...]

# What a terminal or a page could obey instead of showing: C0, DEL and C1; lone surrogates; zero-
# width and invisible characters; bidirectional marks and overrides; line and paragraph separators;
# tags; the byte order mark.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f"
    "\u2028-\u202e\u2060-\u206f\u3164\ud800-\udfff\ufeff\uffa0\ufff0-\ufffb\U000e0000-\U000e0fff]"
)


def safe(name: str) -> str:
    """Return `name` with everything that is not plainly visible written as `\\xNN`, `\\uNNNN`
    or `\\UNNNNNNNN`."""
    return _UNSAFE.sub(_escape, name)


def _escape(match: "re.Match[str]") -> str:
    code = ord(match.group())
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


@lru_cache(maxsize=4096)  # a model has few different shapes
def nbytes(dtype: str, shape: Shape) -> int:
    """Return the bytes that `shape` elements of `dtype` take; raise ValueError where that is
    not whole."""
    bits = DTYPES[dtype][0] * math.prod(shape)
    if bits % 8:
        raise ValueError(f"{dtype} {list(shape)} is not a whole number of bytes")
    return bits // 8


class TensorSpec(NamedTuple):
    """One tensor of a file: `name`, safetensors `dtype`, `shape`."""

    name: str
    dtype: str
    shape: Shape

    @property
    def nbytes(self) -> int:
        return nbytes(self.dtype, self.shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def named(self, name: str) -> "TensorSpec":
        return self._replace(name=name)
