"""Named pairs of functions between the canonical layout in memory and what an ecosystem stores.

`decode(encode(x))` gives the canonical tensor back, but for the reciprocal, whose two roundings
lose up to an ulp; that is why codes are made for the decoded value. Only tensor methods are used:
this module imports no tensor library.

| layout | stored |
|---|---|
| identity | as it is |
| vector1 | a scalar as `[1]` |
| reciprocal1 | a scalar as the `[1]` tensor of its reciprocal, at most the largest fp32 |

Source of the last two: compressed-tensors 0.20.1, `quantization/utils/helpers.py`
(generate_gparam) and the checkpoints that llm-compressor 0.14 writes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lowbitcli.tensors import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """`encode` canonical to stored, `decode` back, `spec` the stored tensor on paper from the
    canonical one."""

    name: str
    encode: "Callable[[Tensor], Tensor]"
    decode: "Callable[[Tensor], Tensor]"
    spec: Callable[[TensorSpec], TensorSpec]


def _same(value):
    return value


def _as_vector(spec: TensorSpec) -> TensorSpec:
    return TensorSpec(spec.name, spec.dtype, (1,) if not spec.shape else spec.shape)


def _to_vector(scalar: "Tensor") -> "Tensor":
    return scalar.reshape(1) if scalar.dim() == 0 else scalar


def _from_vector(vector: "Tensor") -> "Tensor":
    return vector.reshape(()) if tuple(vector.shape) == (1,) else vector


F32_MAX = 3.4028234663852886e38


def _reciprocal(scalar: "Tensor") -> "Tensor":
    return scalar.float().reciprocal().clamp(max=F32_MAX)


IDENTITY = Layout("identity", _same, _same, _same)
VECTOR1 = Layout("vector1", _to_vector, _from_vector, _as_vector)
RECIPROCAL1 = Layout(
    "reciprocal1",
    lambda scalar: _to_vector(_reciprocal(scalar)),
    lambda vector: _reciprocal(_from_vector(vector)),
    _as_vector,
)

LAYOUTS = (IDENTITY, VECTOR1, RECIPROCAL1)
