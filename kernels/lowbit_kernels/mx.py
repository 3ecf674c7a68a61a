"""MX formats: elements with one power-of-two E8M0 scale for 32 columns of a row, `w ~= data *
2^(scale - 127)`.

    scale = the E8M0 code of the least power of two not below fl(amax / 448)   by bits
    data  = e4m3(clamp(w * 2^(127 - scale), -448, 448))                        ties to even

| | data | scale |
|---|---|---|
| MXFP8 | e4m3 `[*, R, C]` | uint8 (E8M0) `[*, R, C/32]` |

A block of zeros has scale code 0 (2^-127). A block that holds a NaN has scale code 255 (NaN) and
all its codes 0x7F; one that holds an Inf and no NaN has scale code 254 and Inf saturates. Source:
OCP Microscaling Formats 1.0 for the format; the scale's rounding is that of the PTX instruction
`cvt.rp.satfinite.ue8m0x2.f32`, as in TransformerEngine 2.20 `common/cast/mxfp8`.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from lowbit_kernels import amax as amax_of
from lowbit_kernels import rounding
from lowbit_kernels.ops import Ops

BLOCK = 32


def quantize_mxfp8(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize `w [*, R, C]` to MXFP8; return data e4m3 `[*, R, C]` and scale uint8 (E8M0) `[*, R,
    C/32]`.

    Raises ValueError for a dtype or shape that is no weight, or columns that are no multiple of 32.
    """
    amax = amax_of.blocks(w, BLOCK)
    scale = rounding.e8m0_ceil(amax / torch.full_like(amax, 448.0))
    multiplier = rounding.e8m0_reciprocal(scale).unsqueeze(-1)
    x = w.contiguous().unflatten(-1, (w.shape[-1] // BLOCK, BLOCK)).float() * multiplier
    return rounding.to_e4m3(x).flatten(-2), scale


def dequantize_mxfp8(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `[*, R, C]` in `dtype` of e4m3 `data` and E8M0 `scale`."""
    step = rounding.e8m0_value(scale).unsqueeze(-1)
    return (data.unflatten(-1, (scale.shape[-1], BLOCK)).float() * step).to(dtype).flatten(-2)


def _check_rule(rule: str) -> None:
    if rule != "amax":
        raise ValueError(f"no rule {rule!r} for these scales; there is amax")


def _shared(amax: Tensor, rule: str) -> Tensor | None:
    _check_rule(rule)
    return None


def _quantize_mxfp8(w: Tensor, shared: Tensor | None, rule: str) -> dict[str, Tensor]:
    _check_rule(rule)
    data, scale = quantize_mxfp8(w)
    return {"data": data, "scale": scale}


def _dequantize_mxfp8(parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    return dequantize_mxfp8(parts["data"], parts["scale"], dtype)


MXFP8 = Ops(amax_of.matrix, _shared, _quantize_mxfp8, _dequantize_mxfp8)
