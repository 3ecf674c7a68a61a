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
from lowbit_kernels.fp8_block import BLOCK128
from lowbit_kernels.jit import OPTIONS, jit, loadable, tl, use_kernel
from lowbit_kernels.ops import Ops
from lowbit_kernels.rounding import (
    decode_e4m3,
    divide,
    encode_e4m3,
    magnitude_bits,
    narrow,
    pack_bytes,
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
def _store_codes(data_ptr, offset, mask, codes, column, EIGHTS: tl.constexpr):  # noqa: N803
    """Store codes `[N, 8]`; EIGHTS says that rows start at multiples of eight bytes."""
    if EIGHTS:
        tl.store(data_ptr + offset // 8, pack_bytes(codes, column, 1), mask=mask)
    else:
        tl.store(data_ptr + offset[:, None] + column, codes.to(tl.uint8), mask=mask)


@jit
def _cast_kernel(
    w_ptr,  # [groups, size] fp32, fp16, or bf16 as int16
    data_ptr,  # [groups, size] E4M3 as uint8, or as int64 where size is a multiple of 8
    scale_ptr,  # [groups] fp32
    size,
    programs,
    BF16: tl.constexpr,  # noqa: N803
    EIGHTS: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
):
    """Cast TILE times eight elements of a group that shares a scale."""
    group = (tl.program_id(0) // programs).to(tl.int64)
    start = (tl.program_id(0) % programs).to(tl.int64) * (TILE * 8)
    base = group * size + start
    offset = tl.arange(0, TILE) * 8
    column = tl.arange(0, 8)[None, :]
    if EIGHTS:
        mask = offset < size - start
        x = tl.load(w_ptr + base + offset[:, None] + column, mask=mask[:, None], other=0)
        data_ptr += base // 8
    else:
        mask = offset[:, None] + column < size - start
        x = tl.load(w_ptr + base + offset[:, None] + column, mask=mask, other=0)
        data_ptr += base
    codes = encode_e4m3(divide(widen(x, BF16), tl.load(scale_ptr + group)))
    _store_codes(data_ptr, offset, mask, codes, column, EIGHTS)


@jit
def _row_kernel(
    w_ptr,  # [rows, cols] fp32, fp16, or bf16 as int16
    data_ptr,  # [rows, cols] E4M3 as uint8, or as int64 where cols is a multiple of 8
    scale_ptr,  # [rows] fp32
    cols,
    BF16: tl.constexpr,  # noqa: N803
    EIGHTS: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
):
    """Quantize one row: its amax, its scale, then its codes."""
    row = tl.program_id(0).to(tl.int64)
    w_ptr += row * cols
    offset = tl.arange(0, TILE) * 8
    column = tl.arange(0, 8)[None, :]
    top = tl.zeros([TILE, 8], tl.int32)
    for start in range(0, cols, TILE * 8):
        index = start + offset[:, None] + column
        mask = start + offset[:, None] < cols if EIGHTS else index < cols
        top = tl.maximum(top, magnitude_bits(widen(tl.load(w_ptr + index, mask, other=0), BF16)))
    amax = tl.cast(tl.max(tl.max(top, axis=1), axis=0), tl.float32, bitcast=True)
    scale = tl.math.div_rn(amax, 448.0)
    scale = tl.where(scale == 0, 2.0**-149, scale)
    scale = tl.where(amax == 0, 1.0, scale)
    tl.store(scale_ptr + row, scale)

    data_ptr += row * cols // 8 if EIGHTS else row * cols
    for start in range(0, cols, TILE * 8):
        index = start + offset[:, None] + column
        if EIGHTS:
            mask = start + offset < cols
            x = tl.load(w_ptr + index, mask[:, None], other=0)
        else:
            mask = index < cols
            x = tl.load(w_ptr + index, mask, other=0)
        codes = encode_e4m3(divide(widen(x, BF16), scale))
        _store_codes(data_ptr, start + offset, mask, codes, column, EIGHTS)


@jit
def _dequantize_kernel(
    data_ptr,  # [groups, size] E4M3 as uint8
    scale_ptr,  # [groups] fp32
    out_ptr,  # [groups, size] fp32, fp16 or bf16
    size,
    programs,
    EIGHTS: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
):
    """Dequantize TILE times eight elements of a group that shares a scale."""
    group = (tl.program_id(0) // programs).to(tl.int64)
    start = (tl.program_id(0) % programs).to(tl.int64) * (TILE * 8)
    base = group * size + start
    offset = tl.arange(0, TILE)[:, None] * 8
    index = offset + tl.arange(0, 8)[None, :]
    mask = offset < size - start if EIGHTS else index < size - start
    code = tl.load(data_ptr + base + index, mask=mask, other=0).to(tl.int32)
    value = decode_e4m3(code) * tl.load(scale_ptr + group)
    tl.store(out_ptr + base + index, narrow(value, out_ptr.dtype.element_ty), mask=mask)


def _codes_like(w: Tensor, eights: bool) -> tuple[Tensor, Tensor]:
    """Return empty E4M3 data for `w`, and the same as a kernel stores it."""
    data = torch.empty(w.shape, dtype=torch.float8_e4m3fn, device=w.device)
    return data, data.view(-1).view(torch.int64 if eights else torch.uint8)


def _launch_cast(w: Tensor, scale: Tensor) -> Tensor:
    """Cast `w` with a scale for each equal share of its elements, in order."""
    size = w.numel() // scale.numel()
    eights, tile = size % 8 == 0, 128
    data, stored = _codes_like(w, eights)
    programs = -(-size // (tile * 8))
    with torch.cuda.device_of(w):
        _cast_kernel[(scale.numel() * programs,)](
            loadable(w),
            stored,
            scale.contiguous(),
            size,
            programs,
            BF16=w.dtype == torch.bfloat16,
            EIGHTS=eights,
            TILE=tile,
            **OPTIONS,
        )
    return data


def _launch_rows(w: Tensor) -> tuple[Tensor, Tensor]:
    cols = w.shape[-1]
    eights = cols % 8 == 0
    data, stored = _codes_like(w, eights)
    scale = torch.empty((*w.shape[:-1], 1), dtype=torch.float32, device=w.device)
    with torch.cuda.device_of(w):
        _row_kernel[(scale.numel(),)](
            loadable(w),
            stored,
            scale,
            cols,
            BF16=w.dtype == torch.bfloat16,
            EIGHTS=eights,
            TILE=128,
            **OPTIONS,
        )
    return data, scale


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
            EIGHTS=size % 8 == 0,
            TILE=tile,
            **OPTIONS,
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
    return _cast_reference(w, scale[..., None, None]), scale


def quantize_channel(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize `w [*, R, C]` with a scale for each row; return data e4m3 `[*, R, C]` and scale fp32
    `[*, R, 1]`.

    Raises ValueError for a dtype or shape that is no weight.
    """
    amax_of.check_weight(w)
    if use_kernel(w):
        return _launch_rows(w)
    scale = scale_of(amax_of.rows(w)).unsqueeze(-1)
    return _cast_reference(w, scale), scale


def dequantize_tensor(data: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return `[*, R, C]` in `dtype` of e4m3 `data` and a scale for each matrix."""
    if use_kernel(data):
        return _launch_dequantize(data, scale, dtype)
    return (data.float() * scale[..., None, None]).to(dtype)


def dequantize_channel(data: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return `[*, R, C]` in `dtype` of e4m3 `data` and a scale for each row."""
    if use_kernel(data):
        return _launch_dequantize(data, scale, dtype)
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
