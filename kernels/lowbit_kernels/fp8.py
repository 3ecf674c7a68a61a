"""FP8 E4M3 with one FP32 scale for each matrix or each row: `w ~= data * scale`.

    scale = fl(amax / 448)                          amax = 0 -> 1
    data  = e4m3(clamp(fl(w / scale), -448, 448))   nearest, ties to even

| | data | scale |
|---|---|---|
| per tensor | e4m3 `[*, R, C]` | fp32 `[*]` |
| per channel | e4m3 `[*, R, C]` | fp32 `[*, R, 1]` |

All in fp32 whatever the dtype of `w`, every division a true one. An amax so small that amax / 448
is zero gets the smallest subnormal as its scale, 2^-149: such a matrix loses all but its largest
values. NaN becomes code 0x7F; where a matrix (row) holds a NaN or an Inf its scale is NaN or Inf,
and decoding it gives NaN. Same bytes as ModelOpt 0.47 `get_scaling_factor` + `to_quantized_weight`
on the CPU, but for amax below the dtype's tiny.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from lowbit_kernels import amax as amax_of
from lowbit_kernels import rounding
from lowbit_kernels.ops import Ops


def scale_of(amax: Tensor) -> Tensor:
    """Return fp32 scales fl(amax / 448) of fp32 `amax`: 1 for 0, never 0."""
    # Tensor by tensor: torch on CUDA multiplies by the reciprocal of a Python scalar.
    scale = amax / torch.full_like(amax, 448.0)
    scale = torch.where(scale == 0, 2.0**-149, scale)
    return torch.where(amax == 0, 1.0, scale)


def _cast(w: Tensor, scale: Tensor) -> Tensor:
    """Return e4m3(w / scale), `scale` in the shape that broadcasts over `w`."""
    return rounding.to_e4m3(w.float() / scale)


def quantize_tensor(w: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize `w [*, R, C]` with a scale for each matrix; return data e4m3 `[*, R, C]` and scale
    fp32 `[*]`.

    Raises ValueError for a dtype or shape that is no weight.
    """
    amax_of.check_weight(w)
    if scale is None:
        scale = scale_of(amax_of.matrix(w))
    return _cast(w, scale[..., None, None]), scale


def quantize_channel(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize `w [*, R, C]` with a scale for each row; return data e4m3 `[*, R, C]` and scale fp32
    `[*, R, 1]`.

    Raises ValueError for a dtype or shape that is no weight.
    """
    scale = scale_of(amax_of.rows(w)).unsqueeze(-1)
    return _cast(w, scale), scale


def dequantize_tensor(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `[*, R, C]` in `dtype` of e4m3 `data` and a scale for each matrix."""
    return (data.float() * scale[..., None, None]).to(dtype)


def dequantize_channel(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `[*, R, C]` in `dtype` of e4m3 `data` and a scale for each row."""
    return (data.float() * scale).to(dtype)


def _check_rule(rule: str, known: tuple[str, ...]) -> None:
    if rule not in known:
        raise ValueError(f"no rule {rule!r} for these scales; there is {', '.join(known)}")


def _shared_tensor(amax: Tensor, rule: str) -> Tensor | None:
    _check_rule(rule, ("amax",))
    return scale_of(amax)


def _shared_channel(amax: Tensor, rule: str) -> Tensor | None:
    _check_rule(rule, ("amax",))
    return None


def _quantize_tensor(w: Tensor, shared: Tensor | None, rule: str) -> dict[str, Tensor]:
    _check_rule(rule, ("amax",))
    data, scale = quantize_tensor(w, shared)
    return {"data": data, "scale": scale}


def _quantize_channel(w: Tensor, shared: Tensor | None, rule: str) -> dict[str, Tensor]:
    _check_rule(rule, ("amax",))
    data, scale = quantize_channel(w)
    return {"data": data, "scale": scale}


def _dequantize_tensor(parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    return dequantize_tensor(parts["data"], parts["scale"], dtype)


def _dequantize_channel(parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    return dequantize_channel(parts["data"], parts["scale"], dtype)


TENSOR = Ops(amax_of.matrix, _shared_tensor, _quantize_tensor, _dequantize_tensor)
CHANNEL = Ops(amax_of.matrix, _shared_channel, _quantize_channel, _dequantize_channel)
