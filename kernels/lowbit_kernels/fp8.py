"""FP8, E4M3 or E5M2, with one FP32 scale for each matrix or each row: `w ~= data * scale`.

    scale = fl(amax / max)                          amax = 0 -> 1
    data  = element(clamp(fl(w / scale), -max, max))   nearest, ties to even

| | data | scale |
|---|---|---|
| per tensor | e4m3 or e5m2 `[*, R, C]` | fp32 `[*]` |
| per channel | e4m3 or e5m2 `[*, R, C]` | fp32 `[*, R, 1]` |

max is 448 for E4M3, 57344 for E5M2, which is never Inf. All in fp32 whatever the dtype of `w`,
every division a true one. An amax so small that amax / max is zero gets the smallest subnormal as
its scale, 2^-149: such a matrix loses all but its largest values.
What is no number, in either element: a matrix (row) that holds a NaN has scale NaN and every code
0x7F, so it decodes to NaN. One that holds an Inf and no NaN has scale Inf: codes of zero with the
element's sign, but 0x7F where it is infinite, and all decodes to NaN. Where the scale is given, NaN
becomes 0x7F and an Inf the largest number with its sign (0x7E, 0xFE; of E5M2 0x7B, 0xFB). A code
of Inf, which E5M2 has and nothing here writes, decodes to Inf.
Same bytes of E4M3 as ModelOpt 0.47 `get_scaling_factor` + `to_quantized_weight` on the CPU, but for
amax below the dtype's tiny.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from lowbit_kernels import amax as amax_of
from lowbit_kernels import cpu, rounding, rows
from lowbit_kernels.checks import check_codes, check_scale
from lowbit_kernels.formats import E4M3, E5M2, Format
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
    FP8_DTYPES,
    decode_fp8,
    divide,
    fp8_bytes,
    narrow,
    widen,
)
from lowbit_kernels.typed import typed


def scale_of(amax: Tensor, element: Format = E4M3) -> Tensor:
    """Return fp32 scales fl(amax / max) of fp32 `amax`: 1 for 0, never 0."""
    # Tensor by tensor: torch on CUDA multiplies by the reciprocal of a Python scalar.
    scale = amax / torch.full_like(amax, element.max)
    scale = torch.where(scale == 0, 2.0**-149, scale)
    return torch.where(amax == 0, 1.0, scale)


def _cast_reference(w: Tensor, scale: Tensor, element: Format = E4M3) -> Tensor:
    """Return element(w / scale), `scale` in the shape that broadcasts over `w`."""
    return rounding.to_fp8(w.contiguous().float() / scale, element)


def _cast_here(w: Tensor, scale: Tensor, element: Format) -> Tensor:
    """Cast on the CPU slice by slice, elsewhere by the reference; `scale [*]` or `[*, R, 1]`."""
    spread = scale if scale.dim() == w.dim() else scale[..., None, None]
    if not cpu.takes(w):
        return _cast_reference(w, spread, element)
    if element is E4M3:
        return cpu.cast_fp8(w, scale, _cast_reference)
    data = torch.empty(w.shape, dtype=torch.float8_e5m2)
    each = spread.expand(*w.shape[:-1], 1)
    cpu.by_rows(lambda part, s: _cast_reference(part, s, element), 1, (w, each), (data,))
    return data


@jit
def cast_tile(
    w_ptr,
    data_ptr,
    scale,
    left,
    ELEMENT: tl.constexpr,
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
    tl.store(data_ptr + index, fp8_bytes(divide(x, scale), ELEMENT, NATIVE), mask=mask)


@jit
def _cast_kernel(
    w_ptr,  # [groups, size] fp32, fp16, or bf16 as int16
    data_ptr,  # [groups, size] FP8 codes as uint8
    scale_ptr,  # [groups] fp32
    size,
    programs,
    ELEMENT: tl.constexpr,
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
    w_ptr, data_ptr, left = w_ptr + base, data_ptr + base, size - start
    cast_tile(w_ptr, data_ptr, scale, left, ELEMENT, BF16, ALIGNED, NATIVE, TILE)


@jit
def _dequantize_kernel(
    data_ptr,  # [groups, size] FP8 codes as uint8
    scale_ptr,  # [groups] fp32
    out_ptr,  # [groups, size] fp32, fp16 or bf16
    size,
    programs,
    ELEMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    NATIVE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Dequantize TILE times eight elements of a group that shares a scale."""
    group = (tl.program_id(0) // programs).to(tl.int64)
    start = (tl.program_id(0) % programs).to(tl.int64) * (TILE * 8)
    base = group * size + start
    offset = tl.arange(0, TILE)[:, None] * 8
    index = offset + tl.arange(0, 8)[None, :]
    mask = offset < size - start if ALIGNED else index < size - start
    code = tl.load(data_ptr + base + index, mask=mask, other=0)
    value = decode_fp8(code, ELEMENT, NATIVE) * tl.load(scale_ptr + group)
    tl.store(out_ptr + base + index, narrow(value, out_ptr.dtype.element_ty), mask=mask)


def _launch_cast(w: Tensor, scale: Tensor, element: Format) -> Tensor:
    """Cast `w` with a scale for each equal share of its elements, in order."""
    size, tile = w.numel() // scale.numel(), 256
    data = torch.empty(w.shape, dtype=FP8_DTYPES[element.name], device=w.device)
    programs = -(-size // (tile * 8))
    with torch.cuda.device_of(w):
        _cast_kernel[(scale.numel() * programs,)](
            loadable(w),
            data.view(torch.uint8),
            scale.contiguous(),
            size,
            programs,
            ELEMENT=element.name,
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
            ELEMENT="E5M2" if data.dtype == torch.float8_e5m2 else "E4M3",
            ALIGNED=size % 16 == 0,
            NATIVE=converts_fp8(data),
            TILE=tile,
            **{**OPTIONS, "num_warps": 2},
        )
    return out


@typed
def quantize_tensor(
    w: Tensor, scale: Tensor | None = None, element: Format = E4M3
) -> tuple[Tensor, Tensor]:
    """Quantize `w [*, R, C]` to E4M3 or E5M2 with a scale for each matrix; return data
    `[*, R, C]` and scale fp32 `[*]`.

    `scale` is what a reader will multiply by, where that is not fl(amax / max). What NaN and Inf
    give stands at the head of this module.
    Raises ValueError for a dtype or shape that is no weight, a scale that is not fp32 `[*]`,
    another element.
    """
    _check_element(element)
    amax_of.check_weight(w)
    w = w.detach()
    if scale is not None:
        check_scale(scale, w.shape[:-2], w.device)
    if scale is None and use_kernel(w):
        scale = amax_of.launch_scale(w, element.max)
    elif scale is None:
        scale = scale_of(amax_of.matrix(w), element)
    if use_kernel(w):
        return _launch_cast(w, scale, element), scale
    return _cast_here(w, scale, element), scale


@typed
def quantize_channel(w: Tensor, element: Format = E4M3) -> tuple[Tensor, Tensor]:
    """Quantize `w [*, R, C]` to E4M3 or E5M2 with a scale for each row; return data `[*, R, C]` and
    scale fp32 `[*, R, 1]`.

    What NaN and Inf give stands at the head of this module.
    Raises ValueError for a dtype or shape that is no weight, another element.
    """
    _check_element(element)
    amax_of.check_weight(w)
    w = w.detach()
    if use_kernel(w):
        return rows.launch(w, element)
    scale = scale_of(amax_of.rows(w), element).unsqueeze(-1)
    return _cast_here(w, scale, element), scale


@typed
def dequantize_tensor(data: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return `[*, R, C]` in `dtype` of e4m3 or e5m2 `data` and a scale for each matrix.

    Raises ValueError for parts that do not belong together, or another dtype than fp32, bf16, fp16.
    """
    check_codes(data, tuple(FP8_DTYPES.values()), dtype)
    check_scale(scale, data.shape[:-2], data.device)
    if use_kernel(data):
        return _launch_dequantize(data, scale, dtype)
    spread = scale[..., None, None]
    if cpu.takes(data) and data.dtype == torch.float8_e4m3fn:
        return cpu.dequantize_shared(data, scale, dtype)
    if cpu.takes(data):
        each = spread.expand(*data.shape[:-1], 1)
        return cpu.dequantize_blocks(data, each, None, "F32", dtype)
    return (data.float() * spread).to(dtype)


@typed
def dequantize_channel(data: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return `[*, R, C]` in `dtype` of e4m3 or e5m2 `data` and a scale for each row.

    Raises ValueError for parts that do not belong together, or another dtype than fp32, bf16, fp16.
    """
    check_codes(data, tuple(FP8_DTYPES.values()), dtype)
    check_scale(scale, (*data.shape[:-1], 1), data.device)
    if use_kernel(data):
        return _launch_dequantize(data, scale, dtype)
    if cpu.takes(data):
        return cpu.dequantize_blocks(data, scale, None, "F32", dtype)
    return (data.float() * scale).to(dtype)


def _check_element(element: Format) -> None:
    if element.name not in FP8_DTYPES:
        raise ValueError(f"an FP8 element is E4M3 or E5M2, not {element.name}")


def _check_rule(rule: str) -> None:
    if rule != "amax":
        raise ValueError(f"no rule {rule!r} for these scales; there is amax")


def _tensor_ops(element: Format) -> Ops:
    def shared_of(amax: Tensor, rule: str) -> Tensor | None:
        _check_rule(rule)
        return scale_of(amax, element)

    def quantize(w: Tensor, shared: Tensor | None, rule: str) -> dict[str, Tensor]:
        _check_rule(rule)
        data, scale = quantize_tensor(w, shared, element)
        return {"data": data, "scale": scale}

    return Ops(amax_of.matrix, shared_of, quantize, _dequantize_tensor)


def _shared_channel(amax: Tensor, rule: str) -> Tensor | None:
    _check_rule(rule)
    return None


def _quantize_channel(w: Tensor, shared: Tensor | None, rule: str) -> dict[str, Tensor]:
    _check_rule(rule)
    data, scale = quantize_channel(w)
    return {"data": data, "scale": scale}


def _dequantize_tensor(parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    return dequantize_tensor(parts["data"], parts["scale"], dtype)


def _dequantize_channel(parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    return dequantize_channel(parts["data"], parts["scale"], dtype)


TENSOR, TENSOR_E5M2 = _tensor_ops(E4M3), _tensor_ops(E5M2)
CHANNEL = Ops(amax_of.matrix, _shared_channel, _quantize_channel, _dequantize_channel)

__all__ = [
    "BLOCK128",
    "CHANNEL",
    "TENSOR",
    "TENSOR_E5M2",
    "dequantize_channel",
    "dequantize_tensor",
    "quantize_channel",
    "quantize_tensor",
    "scale_of",
]
