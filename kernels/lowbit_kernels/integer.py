"""Integers with an FP32 scale for each row, or each group of columns of a row: `w ~= data * scale`.

    scale = fl(amax / max)                          amax = 0 -> 1
    data = clamp(round(fl(w / scale)), -max, max)   ties to even; -max - 1 is not used

| | max | data | scale |
|---|---|---|---|
| INT8 per channel | 127 | int8 `[*, R, C]` | fp32 `[*, R, 1]` |
| INT4 in groups of G: 32, 64, 128 | 7 | uint8 `[*, R, C/2]` | fp32 `[*, R, C/G]` |

INT4 are nibbles in two's complement, the even column in the low one; C is a multiple of G. An amax
so small that amax / max is zero gets the smallest subnormal, 2^-149. Scales of groups may be
rounded to bf16 or fp16, nearest even, for readers that keep them so: codes are then made for what
they were rounded to, and the least is that dtype's smallest subnormal.
What is no number shows in the scale of its row or group alone: NaN where that holds a NaN, else Inf
where it holds an Inf or magnitudes whose scale is too large for fp16; every code there is 0, and
decodes to NaN.
INT8: same bytes as ModelOpt 0.47 `get_scaling_factor` + `to_quantized_weight`, but for amax below
the dtype's tiny.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from lowbit_kernels import amax as amax_of
from lowbit_kernels import cpu, rounding, rows
from lowbit_kernels.checks import check_codes, check_scale
from lowbit_kernels.formats import INT4, INT8, Format
from lowbit_kernels.jit import COMPILED, OPTIONS, jit, loadable, tl, use_kernel
from lowbit_kernels.ops import Ops
from lowbit_kernels.rounding import encode_integer, magnitude, narrow, pack_nibbles, patterns, widen
from lowbit_kernels.typed import typed

GROUPS = (32, 64, 128)
# What scales are rounded to -> its smallest subnormal.
LEAST = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def scale_of(amax: Tensor, element: Format = INT8, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return fp32 scales fl(amax / max) of fp32 `amax`, rounded to `dtype`: 1 for 0, never 0."""
    scale = amax / torch.full_like(amax, element.max)
    scale = scale.to(dtype).float()
    scale = torch.where(scale == 0, LEAST[dtype], scale)
    return torch.where(amax == 0, 1.0, scale)


def _quantize_reference(w: Tensor) -> tuple[Tensor, Tensor]:
    scale = scale_of(amax_of.rows(w)).unsqueeze(-1)
    return _codes(w.contiguous().float() / scale, INT8), scale


def _codes(q: Tensor, element: Format) -> Tensor:
    """Round fp32 `q`, which is overwritten, to int8 codes."""
    return q.clamp_(-element.max, element.max).round_().nan_to_num_(0.0).to(torch.int8)


def _quantize_groups_reference(w: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    blocks = w.contiguous().unflatten(-1, (w.shape[-1] // group, group)).float()
    scale = scale_of(amax_of.blocks(w, group), INT4, dtype)
    codes = _codes(blocks / scale.unsqueeze(-1), INT4)
    return rounding.pack(codes.view(torch.uint8) & 15).flatten(-2), scale


def _dequantize_reference(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    if data.dtype == torch.uint8:
        data = rounding.unpack_int4(data)
    if data.numel() == 0:
        return data.to(dtype)
    shares = data.unflatten(-1, (scale.shape[-1], -1))
    return (shares.float() * scale.unsqueeze(-1)).to(dtype).flatten(-2)


@jit
def _quantize_groups_kernel(
    w_ptr,  # [groups, GROUP] fp32, fp16, or bf16 as int16
    data_ptr,  # [groups, GROUP / 8] int32 of INT4 codes
    scale_ptr,  # [groups] fp32
    groups,
    BF16: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    SCALE: tl.constexpr,
    LEAST: tl.constexpr,
):
    """Quantize TILE groups to INT4, eight elements to a thread at a time; scales are rounded to
    SCALE, whose smallest subnormal is LEAST."""
    first = tl.program_id(0).to(tl.int64) * TILE
    share: tl.constexpr = GROUP // 8
    eighth, column = tl.arange(0, TILE * share), tl.arange(0, 8)[None, :]
    mask = eighth // share < groups - first
    w_ptr += first * GROUP
    x = tl.load(w_ptr + eighth[:, None] * 8 + column, mask=mask[:, None], other=0)
    top = tl.max(tl.reshape(tl.max(patterns(x), axis=1), [TILE, share]), axis=1)
    amax = magnitude(top, tl.int16 if BF16 else w_ptr.dtype.element_ty)
    scale = tl.math.div_rn(amax, tl.full([TILE], 7.0, tl.float32))
    if SCALE == "BF16":
        scale = widen(narrow(scale, tl.bfloat16).to(tl.int16, bitcast=True), True)
    elif SCALE == "F16":
        scale = narrow(scale, tl.float16).to(tl.float32)
    scale = tl.where(scale == 0, LEAST, scale)
    scale = tl.where(amax == 0, 1.0, scale)
    index = tl.arange(0, TILE)
    tl.store(scale_ptr + first + index, scale, mask=index < groups - first)

    s = tl.reshape(tl.broadcast_to(scale[:, None], [TILE, share]), [TILE * share])[:, None]
    x = widen(x, BF16)
    if COMPILED:
        # One correction by the exact remainder replaces the division, see rounding.divide.
        low, high = tl.min(scale, axis=0), tl.max(scale, axis=0)
        if (low > 2.0**-80) & (high < 2.0**100):  # pyright: ignore[reportOperatorIssue]
            r = tl.math.div_rn(tl.full(s.shape, 1.0, tl.float32), s)
            q = x * r
            q = tl.fma(tl.fma(-q, s, x), r, q)
        else:
            q = tl.math.div_rn(x, tl.broadcast_to(s, x.shape))
    else:
        q = tl.math.div_rn(x, tl.broadcast_to(s, x.shape))
    word = pack_nibbles(encode_integer(q, 7.0) & 15, column, 1)
    tl.store(data_ptr + first * share + eighth, word, mask=mask)


@jit
def _dequantize_groups_kernel(
    data_ptr,  # [eighths] int64 of INT8 codes, or int32 of INT4 codes
    scale_ptr,  # [eighths / SHARE] fp32
    out_ptr,  # [eighths, 8] fp32, fp16 or bf16
    eighths,
    PACKED: tl.constexpr,
    SHARE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Dequantize TILE times eight elements, SHARE times eight of which share a scale."""
    first = tl.program_id(0).to(tl.int64) * TILE
    index = tl.arange(0, TILE)
    mask = index < eighths - first
    column = tl.arange(0, 8)[None, :]
    word = tl.load(data_ptr + first + index, mask=mask, other=0)[:, None]
    scale = tl.load(scale_ptr + (first + index) // SHARE, mask=mask, other=0)
    if PACKED:
        code = ((word >> (column * 4)) & 15 ^ 8) - 8
    else:
        code = ((word >> (column * 8)) & 255 ^ 128).to(tl.int32) - 128
    out = narrow(code.to(tl.float32) * scale[:, None], out_ptr.dtype.element_ty)
    tl.store(out_ptr + (first + index)[:, None] * 8 + column, out, mask=mask[:, None])


@jit
def _dequantize_kernel(
    data_ptr,  # [rows, cols] int8
    scale_ptr,  # [rows] fp32
    out_ptr,  # [rows, cols] fp32, fp16 or bf16
    cols,
    programs,
    TILE: tl.constexpr,
):
    """Dequantize TILE elements of a row, or of what else shares a scale."""
    row = (tl.program_id(0) // programs).to(tl.int64)
    start = (tl.program_id(0) % programs).to(tl.int64) * TILE
    first = row * cols + start
    index = tl.arange(0, TILE)
    mask = index < cols - start
    code = tl.load(data_ptr + first + index, mask=mask, other=0)
    value = code.to(tl.float32) * tl.load(scale_ptr + row)
    tl.store(out_ptr + first + index, narrow(value, out_ptr.dtype.element_ty), mask=mask)


def _launch_dequantize(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(data.shape, dtype=dtype, device=data.device)
    share = data.numel() // scale.numel()
    programs = -(-share // 1024)
    with torch.cuda.device_of(data):
        _dequantize_kernel[(scale.numel() * programs,)](
            data.contiguous(),
            scale.contiguous(),
            out,
            share,
            programs,
            TILE=1024,
            **OPTIONS,
        )
    return out


def _launch_quantize_groups(w: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    data = torch.empty((*w.shape[:-1], w.shape[-1] // 2), dtype=torch.uint8, device=w.device)
    shape = (*w.shape[:-1], w.shape[-1] // group)
    scale = torch.empty(shape, dtype=torch.float32, device=w.device)
    tile = 2048 // group
    with torch.cuda.device_of(w):
        _quantize_groups_kernel[(-(-scale.numel() // tile),)](
            loadable(w),
            data.view(-1).view(torch.int32),
            scale,
            scale.numel(),
            BF16=w.dtype == torch.bfloat16,
            GROUP=group,
            TILE=tile,
            SCALE=NAMES[dtype],
            LEAST=LEAST[dtype],
            **OPTIONS,
        )
    return data, scale


def _launch_dequantize_groups(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    packed = data.dtype == torch.uint8
    cols = data.shape[-1] * (2 if packed else 1)
    out = torch.empty((*data.shape[:-1], cols), dtype=dtype, device=data.device)
    eighths, tile = out.numel() // 8, 256
    with torch.cuda.device_of(data):
        _dequantize_groups_kernel[(-(-eighths // tile),)](
            data.contiguous().view(-1).view(torch.int32 if packed else torch.int64),
            scale.contiguous(),
            out,
            eighths,
            PACKED=packed,
            SHARE=cols // scale.shape[-1] // 8,
            TILE=tile,
            **{**OPTIONS, "num_warps": 2},
        )
    return out


@typed
def quantize_channel(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize `w [*, R, C]` to INT8 with a scale for each row; return data int8 and scale fp32
    `[*, R, 1]`.

    What NaN and Inf give stands at the head of this module.
    Raises ValueError for a dtype or shape that is no weight.
    """
    amax_of.check_weight(w)
    w = w.detach()
    if use_kernel(w):
        return rows.launch(w, INT8)
    if not cpu.takes(w):
        return _quantize_reference(w)
    scale = torch.empty((*w.shape[:-1], 1), dtype=torch.float32)
    data = torch.empty(w.shape, dtype=torch.int8)
    cpu.by_rows(_quantize_reference, 1, (w,), (data, scale), ("quantize_int8",))
    return data, scale


@typed
def quantize_int4(
    w: Tensor, group: int = 128, scale_dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Quantize `w [*, R, C]` to INT4 with a scale for each `group` columns of a row; return packed
    uint8 `[*, R, C/2]` and scale fp32 `[*, R, C/group]`, whose numbers are those of `scale_dtype`:
    fp32, bf16 or fp16.

    What NaN and Inf give stands at the head of this module.
    Raises ValueError for a dtype or shape that is no weight, columns that are no multiple of
    `group`, another group than 32, 64 or 128, or another dtype of scales.
    """
    if group not in GROUPS:
        raise ValueError(f"a group is 32, 64 or 128 columns, not {group}")
    if scale_dtype not in LEAST:
        raise ValueError(f"scales are fp32, bf16 or fp16, not {scale_dtype}")
    amax_of.check_weight(w, group)
    w = w.detach()
    if use_kernel(w):
        return _launch_quantize_groups(w, group, scale_dtype)
    if not cpu.takes(w):
        return _quantize_groups_reference(w, group, scale_dtype)
    data = torch.empty((*w.shape[:-1], w.shape[-1] // 2), dtype=torch.uint8)
    scale = torch.empty((*w.shape[:-1], w.shape[-1] // group), dtype=torch.float32)
    reference = partial(_quantize_groups_reference, group=group, dtype=scale_dtype)
    cpu.by_rows(reference, 1, (w,), (data, scale))
    return data, scale


@typed
def dequantize(data: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return `[*, R, C]` in `dtype` of int8 `data [*, R, C]`, or of INT4, uint8 `[*, R, C/2]`, and
    scales for equal shares of each row, `[*, R, n]`.

    Raises ValueError for parts that do not belong together, columns that are no multiple of n,
    shares of INT4 that are none of eight, or another dtype than fp32, bf16, fp16.
    """
    check_codes(data, (torch.int8, torch.uint8), dtype)
    check_scale(scale, (*data.shape[:-1], *scale.shape[-1:]), data.device)
    packed = data.dtype == torch.uint8
    cols = data.shape[-1] * (2 if packed else 1)
    share = cols // max(scale.shape[-1], 1)
    if share * scale.shape[-1] != cols or (packed and share % 8):
        raise ValueError(f"{scale.shape[-1]} scales do not belong to a row of {cols} columns")
    if use_kernel(data) and (share % 8 or (not packed and scale.shape[-1] == 1)):
        return _launch_dequantize(data, scale, dtype)
    if use_kernel(data):
        return _launch_dequantize_groups(data, scale, dtype)
    if not cpu.takes(data):
        return _dequantize_reference(data, scale, dtype)
    if not packed:
        return cpu.dequantize_blocks(data, scale, None, "F32", dtype)
    out = torch.empty((*data.shape[:-1], cols), dtype=dtype)
    cpu.by_rows(lambda d, s: _dequantize_reference(d, s, dtype), 1, (data, scale), (out,))
    return out


@typed
def dequantize_channel(data: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return `[*, R, C]` in `dtype` of int8 `data` and a scale for each row.

    Raises ValueError as `dequantize` does.
    """
    return dequantize(data, scale, dtype)


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


def _quantize_int4(
    w: Tensor, shared: Tensor | None, rule: str, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    _check_rule(rule)
    data, scale = quantize_int4(w, scale_dtype=dtype)
    return {"data": data, "scale": scale}


def _dequantize(parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    return dequantize(parts["data"], parts["scale"], dtype)


def _int4_with(dtype: torch.dtype) -> Ops:
    return Ops(amax_of.matrix, _shared, partial(_quantize_int4, dtype=dtype), _dequantize)


INT4_G128 = _int4_with(torch.float32)
INT4_G128_BF16 = _int4_with(torch.bfloat16)
INT4_G128_F16 = _int4_with(torch.float16)
INT8_CHANNEL = Ops(amax_of.matrix, _shared, _quantize, _dequantize)
