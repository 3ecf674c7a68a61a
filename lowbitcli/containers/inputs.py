"""Where scales of activations are stored: of the inputs of a weight, and of keys and values.

A scale is fl(amax / largest value of the format), and multiplies; see `Static.reciprocal`.

| scheme | format of the inputs | largest |
|---|---|---|
| fp8_tensor | E4M3 | 448 |
| nvfp4 | NVFP4: E2M1, an E4M3 scale for 16 columns, a global scale | 6 * 448 |
| a cache of keys and values | E4M3 | 448 |

Source: compressed-tensors 0.20.1 `quantization/utils/helpers.py`; ModelOpt 0.47
`torch/export/quant_utils.py`; ComfyUI 0.38 `comfy/ops.py`.
"""

import struct
from dataclasses import dataclass

from lowbitcli.tensors import Shape, TensorSpec

LARGEST = {"fp8_tensor": 448.0, "nvfp4": 2688.0}  # scheme of a weight -> of its static inputs
LARGEST_CACHED = 448.0


@dataclass(frozen=True)
class Static:
    """How the scale of a weight's inputs is stored: the suffix that takes the place of `.weight`,
    F32 of this shape, and whether readers divide by it (`reciprocal`)."""

    suffix: str
    shape: Shape
    reciprocal: bool = False

    def stored(self, module: str, scale: float) -> tuple[TensorSpec, bytes]:
        """Return the tensor that stores an fp32 scale, and its bytes."""
        number = rounded(1.0 / scale) if self.reciprocal else scale
        return TensorSpec(module + self.suffix, "F32", self.shape), struct.pack("<f", number)


@dataclass(frozen=True)
class Cache:
    """What the scales of keys and values are called, behind the name of the attention they are of;
    F32 of this shape, multipliers."""

    key: str
    value: str
    shape: Shape

    def stored(self, attention: str, scales: tuple[float, float]) -> list[tuple[TensorSpec, bytes]]:
        """Return the tensors that store the scales of keys and of values, and their bytes."""
        return [
            (TensorSpec(attention + suffix, "F32", self.shape), struct.pack("<f", scale))
            for suffix, scale in zip((self.key, self.value), scales, strict=True)
        ]


def rounded(number: float) -> float:
    """Return the fp32 that is nearest, infinite where none is; a quotient of two fp32 numbers
    comes out as if it had been rounded once."""
    try:
        return struct.unpack("<f", struct.pack("<f", number))[0]
    except OverflowError:
        return float("inf")
