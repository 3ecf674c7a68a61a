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
from lowbit_kernels import cpu, rounding, rows
from lowbit_kernels.formats import E4M3
from lowbit_kernels.fp8_block import BLOCK128
from lowbit_kernels.jit import (
    OPTIONS,
    converts_fp8,
    jit,
    loadable,
    tl,
    use_kernel,
)
from lowbit_kernels.ops import Ops
from lowbit_kernels.rounding import (
    decode_e4m3,
    divide,
    fp8_bytes,
    narrow,
    widen,
)


def scale_of(amax: Tensor) -> Tensor:
    """Return fp32 scales fl(amax / 448) of fp32 `amax`: 1 for 0, never 0."""
    # Tensor by tensor: torch on CUDA multiplies by the reciprocal of a Python scalar.
    scale = amax / torch.full_like(amax, 448.0)
    scale = torch.where(scale == 0, 2.0**-149, scale)
    return torch.where(amax == 0, 1.0, scale)


def _cast_reference(w: Tensor, scale: Tensor) -> Tensor:
    """Return e4m3(w / scale), `scale` in the shape that broadcasts over `w`."""
    return rounding.to_e4m3(w.float() / scale)


@jit
def cast_tile(
    w_ptr,
    data_ptr,
    scale,
    left,
    BF16: tl.constexpr,
    ALIGNED: tl.constexpr,
    NATIVE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Cast TILE times eight elements, of which `left` are there; ALIGNED: a multiple of sixteen."""
    offset = tl.arange(0, TILE)[:, None] * 8
    index = offset + tl.arange(0, 8)[None, :]
    mask = offset < left if ALIGNED else index < left
    x = widen(tl.load(w_ptr + index, mask=mask, other=0), BF16)
    tl.store(data_ptr + index, fp8_bytes(divide(x, scale), "E4M3", NATIVE), mask=mask)


@jit
def _cast_kernel(
    w_ptr,  # [groups, size] fp32, fp16, or bf16 as int16
    data_ptr,  # [groups, size] E4M3 as uint8
    scale_ptr,  # [groups] fp32
    size,
    programs,
    BF16: tl.constexpr,
    ALIGNED: tl.constexpr,
    NATIVE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Cast TILE times eight elements of a group that shares a scale."""
    group = (tl.program_id(0) // programs).to(tl.int64)
    start = (tl.program_id(0) % programs).to(tl.int64) * (TILE * 8)
    base = group * size + start
    scale = tl.load(scale_ptr + group)
    cast_tile(w_ptr + base, data_ptr + base, scale, size - start, BF16, ALIGNED, NATIVE, TILE)


@jit
def _dequantize_kernel(
    data_ptr,  # [groups, size] E4M3 as uint8
    scale_ptr,  # [groups] fp32
    out_ptr,  # [groups, size] fp32, fp16 or bf16
    size,
    programs,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Dequantize TILE times eight elements of a group that shares a scale."""
    group = (tl.program_id(0) // programs).to(tl.int64)
    start = (tl.program_id(0) % programs).to(tl.int64) * (TILE * 8)
    base = group * size + start
    offset = tl.arange(0, TILE)[:, None] * 8
    index = offset + tl.arange(0, 8)[None, :]
    mask = offset < size - start if ALIGNED else index < size - start
    code = tl.load(data_ptr + base + index, mask=mask, other=0).to(tl.int32)
    value = decode_e4m3(code) * tl.load(scale_ptr + group)
    tl.store(out_ptr + base + index, narrow(value, out_ptr.dtype.element_ty), mask=mask)


def _launch_cast(w: Tensor, scale: Tensor) -> Tensor:
    """Cast `w` with a scale for each equal share of its elements, in order."""
    size, tile = w.numel() // scale.numel(), 256
    data = torch.empty(w.shape, dtype=torch.float8_e4m3fn, device=w.device)
    programs = -(-size // (tile * 8))
    with torch.cuda.device_of(w):
        _cast_kernel[(scale.numel() * programs,)](
            loadable(w),
            data.view(torch.uint8),
            scale.contiguous(),
            size,
            programs,
            BF16=w.dtype == torch.bfloat16,
            ALIGNED=size % 16 == 0,
            NATIVE=converts_fp8(w),
            TILE=tile,
            **OPTIONS,
        )
    return data


def _launch_dequantize(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(data.shape, dtype=dtype, device=data.device)
    size, tile = data.numel() // scale.numel(), 128
    programs = -(-size // (tile * 8))
    with torch.cuda.device_of(data):
        _dequantize_kernel[(scale.numel() * programs,)](
            data.contiguous().view(torch.uint8),
            scale.contiguous(),
            out,
            size,
            programs,
            ALIGNED=size % 16 == 0,
            TILE=tile,
            **{**OPTIONS, "num_warps": 2},
        )
    return out


def quantize_tensor(w: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize `w [*, R, C]` with a scale for each matrix; return data e4m3 `[*, R, C]` and scale
    fp32 `[*]`.

    Raises ValueError for a dtype or shape that is no weight.
    """
    amax_of.check_weight(w)
    if scale is None:
        scale = scale_of(amax_of.matrix(w))
    if use_kernel(w):
        return _launch_cast(w, scale), scale
    if cpu.takes(w):
        return cpu.cast_fp8(w, scale, _cast_reference), scale
    return _cast_reference(w, scale[..., None, None]), scale


def quantize_channel(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize `w [*, R, C]` with a scale for each row; return data e4m3 `[*, R, C]` and scale fp32
    `[*, R, 1]`.

    Raises ValueError for a dtype or shape that is no weight.
    """
    amax_of.check_weight(w)
    if use_kernel(w):
        return rows.launch(w, E4M3)
    scale = scale_of(amax_of.rows(w)).unsqueeze(-1)
    if cpu.takes(w):
        return cpu.cast_fp8(w, scale, _cast_reference), scale
    return _cast_reference(w, scale), scale


def dequantize_tensor(data: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return `[*, R, C]` in `dtype` of e4m3 `data` and a scale for each matrix."""
    if use_kernel(data):
        return _launch_dequantize(data, scale, dtype)
    if cpu.takes(data):
        return cpu.dequantize_shared(data, scale, dtype)
    return (data.float() * scale[..., None, None]).to(dtype)


def dequantize_channel(data: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return `[*, R, C]` in `dtype` of e4m3 `data` and a scale for each row."""
    if use_kernel(data):
        return _launch_dequantize(data, scale, dtype)
    if cpu.takes(data):
        return cpu.dequantize_blocks(data, scale, None, "F32", dtype)
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

__all__ = [
    "BLOCK128",
    "CHANNEL",
    "TENSOR",
    "dequantize_channel",
    "dequantize_tensor",
    "quantize_channel",
    "quantize_tensor",
    "scale_of",
]
