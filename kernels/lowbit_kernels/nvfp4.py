"""NVFP4: E2M1 elements, an E4M3 scale for 16 columns of a row, an FP32 scale over all.

    w ~= value * fl(scale * global_scale)

    global_scale = fl(amax(w) / 2688)                               amax = 0 -> 1
    scale = e4m3(clamp(fl(a / fl(6 * global_scale)), 2^-9, 448))    a: the block's amax; quotient 0 -> 1
    code  = e2m1(fl(w / fl(scale * global_scale)))                  scale as stored; ties to even

| | data | scale | global_scale |
|---|---|---|---|
| NVFP4 | uint8 `[*, R, C/2]`, low nibble first | e4m3 `[*, R, C/16]` | fp32 `[*]` |

-0.0 has code 0; a negative number that rounds to zero has code 8, which decodes to -0.0. An amax so
small that amax / 2688 is zero gets the smallest subnormal, 2^-149; where scale * global_scale
underflows to zero every code of the block is 0 or 8. A matrix that holds a NaN has global_scale
NaN, scales 0x7F and magnitudes 7; one that holds an Inf has global_scale Inf, the block with the
Inf scale 0x7F. Both decode to NaN where the infinite product is. Same bytes as ModelOpt 0.47
`NVFP4QTensor.quantize`, but for a matrix of zeros.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from lowbit_kernels import amax as amax_of
from lowbit_kernels import rounding
from lowbit_kernels.formats import E2M1_VALUES
from lowbit_kernels.ops import Ops

BLOCK = 16


def global_scale_of(amax: Tensor) -> Tensor:
    """Return fp32 fl(amax / 2688) of fp32 `amax`: 1 for 0, never 0."""
    scale = amax / torch.full_like(amax, 2688.0)
    scale = torch.where(scale == 0, 2.0**-149, scale)
    return torch.where(amax == 0, 1.0, scale)


def scales_of(amax: Tensor, global_scale: Tensor) -> Tensor:
    """Return the E4M3 scales of blocks with largest magnitudes `amax`; `global_scale` broadcasts
    over them.
    """
    quotient = amax / (global_scale * 6.0)
    quotient = torch.where(quotient == 0, 1.0, quotient)
    return rounding.to_e4m3(quotient.clamp(2.0**-9, 448.0))


def encode(blocks: Tensor, step: Tensor) -> Tensor:
    """Return packed E2M1 codes `[..., 8]` of `blocks [..., 16]`; `step [...]` is what a code of
    value 1 stands for.
    """
    step = step.unsqueeze(-1)
    x = blocks.float()
    q = torch.where(step == 0, 0.0, x / step)
    return rounding.pack(rounding.to_e2m1(q, x < 0))


def quantize(
    w: Tensor, global_scale: Tensor | None = None, rule: str = "amax"
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize `w [*, R, C]` to NVFP4; return packed uint8 `[*, R, C/2]`, scale e4m3, global_scale
    fp32 `[*]`.

    `global_scale` is the value that a reader will multiply by, where that is not fl(amax / 2688).
    Raises ValueError for a dtype or shape that is no weight, columns that are no multiple of 16, an
    unknown rule.
    """
    amax_of.check_weight(w, BLOCK)
    _check_rule(rule)
    if global_scale is None:
        global_scale = global_scale_of(amax_of.matrix(w))
    shared = global_scale[..., None, None]
    scale = scales_of(amax_of.blocks(w, BLOCK), shared)
    packed = encode(
        w.contiguous().unflatten(-1, (w.shape[-1] // BLOCK, BLOCK)), scale.float() * shared
    )
    return packed.flatten(-2), scale, global_scale


def dequantize(
    packed: Tensor, scale: Tensor, global_scale: Tensor, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Return `[*, R, C]` in `dtype` of NVFP4 parts; one rounding of scale * global_scale, one of
    the product.
    """
    step = scale.float() * global_scale[..., None, None]
    values = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=packed.device)
    element = values[rounding.unpack(packed).int()].unflatten(-1, (scale.shape[-1], BLOCK))
    return (element * step.unsqueeze(-1)).to(dtype).flatten(-2)


def _check_rule(rule: str) -> None:
    if rule != "amax":
        raise ValueError(f"no rule {rule!r} for these scales; there is amax")


def _shared(amax: Tensor, rule: str) -> Tensor | None:
    _check_rule(rule)
    return global_scale_of(amax)


def _quantize(w: Tensor, shared: Tensor | None, rule: str) -> dict[str, Tensor]:
    packed, scale, global_scale = quantize(w, shared, rule)
    return {"data": packed, "scale": scale, "global_scale": global_scale}


def _dequantize(parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    return dequantize(parts["data"], parts["scale"], parts["global_scale"], dtype)


NVFP4 = Ops(amax_of.matrix, _shared, _quantize, _dequantize)
