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
from lowbit_kernels.jit import OPTIONS, jit, loadable, tl, use_kernel
from lowbit_kernels.ops import Ops
from lowbit_kernels.rounding import magnitude_bits, narrow, widen


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
def _row_kernel(
    w_ptr,  # [rows, cols] fp32, fp16, or bf16 as int16
    data_ptr,  # [rows, cols] int8
    scale_ptr,  # [rows] fp32
    cols,
    BF16: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
):
    """Quantize one row: its amax, its scale, then its codes."""
    row = tl.program_id(0).to(tl.int64)
    w_ptr += row * cols
    data_ptr += row * cols
    top = tl.zeros([TILE], tl.int32)
    for start in range(0, cols, TILE):
        index = start + tl.arange(0, TILE)
        x = widen(tl.load(w_ptr + index, mask=index < cols, other=0), BF16)
        top = tl.maximum(top, magnitude_bits(x))
    amax = tl.cast(tl.max(top, axis=0), tl.float32, bitcast=True)
    scale = tl.math.div_rn(amax, 127.0)
    scale = tl.where(scale == 0, 2.0**-149, scale)
    scale = tl.where(amax == 0, 1.0, scale)
    tl.store(scale_ptr + row, scale)
    for start in range(0, cols, TILE):
        index = start + tl.arange(0, TILE)
        x = widen(tl.load(w_ptr + index, mask=index < cols, other=0), BF16)
        q = tl.math.div_rn(x, tl.zeros([TILE], tl.float32) + scale)
        q = tl.where(q > 127.0, 127.0, tl.where(q < -127.0, -127.0, tl.where(q == q, q, 0.0)))
        # Adding 1.5 * 2^23 leaves no bits below the integer: nearest, ties to even.
        code = (q + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
        tl.store(data_ptr + index, code.to(tl.int8), mask=index < cols)


@jit
def _dequantize_kernel(
    data_ptr,  # [rows, cols] int8
    scale_ptr,  # [rows] fp32
    out_ptr,  # [rows, cols] fp32, fp16 or bf16
    cols,
    programs,
    TILE: tl.constexpr,  # noqa: N803
):
    """Dequantize TILE elements of a row."""
    row = (tl.program_id(0) // programs).to(tl.int64)
    index = (tl.program_id(0) % programs) * TILE + tl.arange(0, TILE)
    mask = index < cols
    code = tl.load(data_ptr + row * cols + index, mask=mask, other=0)
    value = code.to(tl.float32) * tl.load(scale_ptr + row)
    tl.store(out_ptr + row * cols + index, narrow(value, out_ptr.dtype.element_ty), mask=mask)


def _launch_quantize(w: Tensor) -> tuple[Tensor, Tensor]:
    data = torch.empty(w.shape, dtype=torch.int8, device=w.device)
    scale = torch.empty((*w.shape[:-1], 1), dtype=torch.float32, device=w.device)
    bf16 = w.dtype == torch.bfloat16
    with torch.cuda.device_of(w):
        _row_kernel[(scale.numel(),)](
            loadable(w), data, scale, w.shape[-1], BF16=bf16, TILE=1024, **OPTIONS
        )
    return data, scale


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
    return _launch_quantize(w) if use_kernel(w) else _quantize_reference(w)


def dequantize_channel(data: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return `[*, R, C]` in `dtype` of int8 `data` and a scale for each row."""
    if use_kernel(data):
        return _launch_dequantize(data, scale, dtype)
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
