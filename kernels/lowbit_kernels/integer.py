"""INT8 with one FP32 scale for each row: `w ~= data * scale`.

    scale = fl(amax / 127)                          amax = 0 -> 1
    data = clamp(round(fl(w / scale)), -127, 127)   ties to even; -128 is not used

| | data | scale |
|---|---|---|
| INT8 per channel | int8 `[*, R, C]` | fp32 `[*, R, 1]` |

An amax so small that amax / 127 is zero gets the smallest subnormal, 2^-149. A NaN has code 0; a
row that holds a NaN or an Inf has such a scale.
Same bytes as ModelOpt 0.47 `get_scaling_factor` + `to_quantized_weight`, but for amax below the
dtype's tiny.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from lowbit_kernels import amax as amax_of
from lowbit_kernels import cpu, rows
from lowbit_kernels.formats import INT8
from lowbit_kernels.jit import OPTIONS, jit, tl, use_kernel
from lowbit_kernels.ops import Ops
from lowbit_kernels.rounding import narrow


def scale_of(amax: Tensor) -> Tensor:
    """Return fp32 scales fl(amax / 127) of fp32 `amax`: 1 for 0, never 0."""
    scale = amax / torch.full_like(amax, 127.0)
    scale = torch.where(scale == 0, 2.0**-149, scale)
    return torch.where(amax == 0, 1.0, scale)


def _quantize_reference(w: Tensor) -> tuple[Tensor, Tensor]:
    scale = scale_of(amax_of.rows(w)).unsqueeze(-1)
    q = (w.float() / scale).clamp_(-127.0, 127.0).round_()
    return q.nan_to_num_(0.0).to(torch.int8), scale


@jit
def _dequantize_kernel(
    data_ptr,  # [rows, cols] int8
    scale_ptr,  # [rows] fp32
    out_ptr,  # [rows, cols] fp32, fp16 or bf16
    cols,
    programs,
    TILE: tl.constexpr,
):
    """Dequantize TILE elements of a row."""
    row = (tl.program_id(0) // programs).to(tl.int64)
    index = (tl.program_id(0) % programs) * TILE + tl.arange(0, TILE)
    mask = index < cols
    code = tl.load(data_ptr + row * cols + index, mask=mask, other=0)
    value = code.to(tl.float32) * tl.load(scale_ptr + row)
    tl.store(out_ptr + row * cols + index, narrow(value, out_ptr.dtype.element_ty), mask=mask)


def _launch_dequantize(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(data.shape, dtype=dtype, device=data.device)
    programs = -(-data.shape[-1] // 1024)
    with torch.cuda.device_of(data):
        _dequantize_kernel[(scale.numel() * programs,)](
            data.contiguous(),
            scale.contiguous(),
            out,
            data.shape[-1],
            programs,
            TILE=1024,
            **OPTIONS,
        )
    return out


def quantize_channel(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize `w [*, R, C]` with a scale for each row; return data int8 and scale fp32
    `[*, R, 1]`.

    Raises ValueError for a dtype or shape that is no weight.
    """
    amax_of.check_weight(w)
    if use_kernel(w):
        return rows.launch(w, INT8)
    if not cpu.takes(w):
        return _quantize_reference(w)
    scale = torch.empty((*w.shape[:-1], 1), dtype=torch.float32)
    data = torch.empty(w.shape, dtype=torch.int8)
    cpu.by_rows(_quantize_reference, 1, (w,), (data, scale))
    return data, scale


def dequantize_channel(data: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return `[*, R, C]` in `dtype` of int8 `data` and a scale for each row."""
    if use_kernel(data):
        return _launch_dequantize(data, scale, dtype)
    if cpu.takes(data):
        return cpu.dequantize_blocks(data, scale, None, "F32", dtype)
    return (data.float() * scale).to(dtype)


def _check_rule(rule: str) -> None:
    if rule != "amax":
        raise ValueError(f"no rule {rule!r} for these scales; there is amax")


def _shared(amax: Tensor, rule: str) -> Tensor | None:
    _check_rule(rule)
    return None


def _quantize(w: Tensor, shared: Tensor | None, rule: str) -> dict[str, Tensor]:
    _check_rule(rule)
    data, scale = quantize_channel(w)
    return {"data": data, "scale": scale}


def _dequantize(parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    return dequantize_channel(parts["data"], parts["scale"], dtype)


INT8_CHANNEL = Ops(amax_of.matrix, _shared, _quantize, _dequantize)
