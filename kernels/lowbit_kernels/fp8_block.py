"""FP8, E4M3 or E5M2, with an FP32 scale for a block of 128 x 128, or of 1 x 128:
`w ~= data * scale`.

    a = max(amax of the block, 1e-4)
    scale = fl(a / max)                                rule amax; max 448, of E5M2 57344
    scale = the least power of two not below that      rule ue8m0, from 2^-126 to 2^127
    data = element(clamp(fl(w * fl(1 / scale))))       nearest, ties to even

| | data | scale |
|---|---|---|
| 128 x 128 | e4m3 or e5m2 `[*, R, C]` | fp32 `[*, ceil(R/128), ceil(C/128)]` |
| 1 x 128 | e4m3 or e5m2 `[*, R, C]` | fp32 `[*, R, ceil(C/128)]` |

Blocks at the lower and right edge hold what is left. The floor of 1e-4 flushes blocks that lie
below it.
What is no number shows in its block alone. One that holds a NaN has scale NaN and every code 0x7F.
One that holds an Inf and no NaN has scale Inf and codes of zero with the element's sign, 0x7F where
it is infinite, and all of it decodes to NaN; by rule ue8m0 it has scale 2^127, in whose units an
Inf saturates (0x7E, 0xFE; of E5M2 0x7B, 0xFB).
Source: DeepGEMM `deep_gemm/utils/math.py` `per_block_cast_to_fp8`, `per_token_cast_to_fp8`, whose
scales DeepSeek's checkpoints call `weight_scale_inv` though they multiply.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from lowbit_kernels import amax as amax_of
from lowbit_kernels import cpu, rounding
from lowbit_kernels.checks import check_codes, check_scale
from lowbit_kernels.formats import E4M3, E5M2, Format
from lowbit_kernels.jit import OPTIONS, converts_fp8, jit, loadable, tl, use_kernel
from lowbit_kernels.ops import Ops
from lowbit_kernels.rounding import (
    FP8_DTYPES,
    decode_e8m0,
    decode_fp8,
    encode_e8m0,
    fp8_bytes,
    magnitude,
    narrow,
    patterns,
    widen,
)
from lowbit_kernels.typed import typed

BLOCK = 128
RULES = ("amax", "ue8m0")


def scale_of(amax: Tensor, rule: str, element: Format = E4M3) -> Tensor:
    """Return fp32 scales of blocks with largest magnitudes `amax`."""
    scale = amax.clamp(min=1e-4) / torch.full_like(amax, element.max)
    if rule == "ue8m0":
        code = rounding.e8m0_ceil(scale)
        scale = rounding.e8m0_value(torch.where(code == 0, 1, code))
    return scale


def _tiles(w: Tensor, high: int) -> Tensor:
    """Return fp32 `[*, row blocks, high, column blocks, 128]`, the edges filled with zeros."""
    rows, cols = w.shape[-2:]
    padded = functional.pad(w.float(), (0, -cols % BLOCK, 0, -rows % high))
    padded = padded.unflatten(-2, (padded.shape[-2] // high, high))
    return padded.unflatten(-1, (padded.shape[-1] // BLOCK, BLOCK))


def _crop(tiles: Tensor, rows: int, cols: int) -> Tensor:
    return tiles.flatten(-2).flatten(-3, -2)[..., :rows, :cols].contiguous()


def _quantize_reference(w: Tensor, high: int, rule: str, element: Format) -> tuple[Tensor, Tensor]:
    tiles = _tiles(w, high)
    blocks = tiles.transpose(-3, -2).flatten(-2)
    scale = scale_of(amax_of.rows(blocks), rule, element)
    inverse = (torch.ones_like(scale) / scale).unsqueeze(-2).unsqueeze(-1)
    return _crop(rounding.to_fp8(tiles * inverse, element), *w.shape[-2:]), scale


def _dequantize_reference(data: Tensor, scale: Tensor, high: int, dtype: torch.dtype) -> Tensor:
    value = _tiles(data, high) * scale.unsqueeze(-2).unsqueeze(-1)
    return _crop(value.to(dtype), *data.shape[-2:])


@jit
def _quantize_kernel(
    w_ptr,  # [matrices, rows, cols] fp32, fp16, or bf16 as int16
    data_ptr,  # the same in FP8 codes as uint8
    scale_ptr,  # [matrices, row blocks, column blocks] fp32
    rows,
    cols,
    down,  # tiles of HIGH x 128 in a column
    across,  # and in a row
    BF16: tl.constexpr,
    ALIGNED: tl.constexpr,
    NATIVE: tl.constexpr,
    ELEMENT: tl.constexpr,
    RULE: tl.constexpr,
    HIGH: tl.constexpr,
    PER_ROW: tl.constexpr,
    FAR: tl.constexpr,  # places within a tile need 64 bits
):
    """Quantize HIGH x 128 elements, with a scale for all of them or for each row."""
    tile = tl.program_id(0) // across
    column = tl.program_id(0) % across
    matrix = (tile // down).to(tl.int64)
    top_row = (tile % down) * HIGH
    # One 64-bit place for the tile, 32-bit places within it; eight elements to a thread at a time.
    base = (matrix * rows + top_row) * cols + column * 128
    eighth = tl.arange(0, HIGH * 16)
    row, col = eighth // 16, (eighth % 16) * 8
    line = row.to(tl.int64) if FAR else row
    offset = (line * cols + col)[:, None] + tl.arange(0, 8)[None, :]
    inside = top_row + row < rows
    if ALIGNED:
        mask = (inside & (column * 128 + col < cols))[:, None]
    else:
        mask = inside[:, None] & (column * 128 + col[:, None] + tl.arange(0, 8)[None, :] < cols)
    x = tl.load(w_ptr + base + offset, mask=mask, other=0)

    top = tl.max(patterns(x), axis=1)
    top = tl.max(tl.reshape(top, [HIGH, 16]), axis=1) if PER_ROW else tl.max(top, axis=0)
    amax = magnitude(top, tl.int16 if BF16 else w_ptr.dtype.element_ty)
    largest = 448.0 if ELEMENT == "E4M3" else 57344.0
    scale = tl.math.div_rn(tl.where(amax < 1e-4, 1e-4, amax), largest)
    if RULE == "ue8m0":
        scale = decode_e8m0(tl.maximum(encode_e8m0(scale), 1))
    inverse = tl.math.div_rn(1.0, scale)
    if PER_ROW:
        index = top_row + tl.arange(0, HIGH)
        tl.store(scale_ptr + (matrix * rows + index) * across + column, scale, mask=index < rows)
        inverse = tl.reshape(tl.broadcast_to(inverse[:, None], [HIGH, 16]), [HIGH * 16])[:, None]
    else:
        tl.store(scale_ptr + tl.program_id(0), scale)
    tl.store(data_ptr + base + offset, fp8_bytes(widen(x, BF16) * inverse, ELEMENT, NATIVE), mask)


@jit
def _dequantize_kernel(
    data_ptr,  # [matrices, rows, cols] FP8 codes as uint8
    scale_ptr,  # [matrices, row blocks, column blocks] fp32
    out_ptr,  # [matrices, rows, cols] fp32, fp16 or bf16
    rows,
    cols,
    down,  # tiles of 32 x 128 in a column
    across,  # and in a row
    ELEMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    NATIVE: tl.constexpr,
    HIGH: tl.constexpr,
    FAR: tl.constexpr,  # places within a tile need 64 bits
):
    """Dequantize 32 x 128 elements, eight to a thread at a time."""
    tile = tl.program_id(0) // across
    column = tl.program_id(0) % across
    matrix = (tile // down).to(tl.int64)
    top_row = (tile % down) * 32
    base = (matrix * rows + top_row) * cols + column * 128
    eighth = tl.arange(0, 512)
    row, col = eighth // 16, (eighth % 16) * 8
    line = row.to(tl.int64) if FAR else row
    offset = (line * cols + col)[:, None] + tl.arange(0, 8)[None, :]
    inside = top_row + row < rows
    if ALIGNED:
        mask = (inside & (column * 128 + col < cols))[:, None]
    else:
        mask = inside[:, None] & (column * 128 + col[:, None] + tl.arange(0, 8)[None, :] < cols)
    first = matrix * ((rows + HIGH - 1) // HIGH)
    if HIGH == 128:
        scale = tl.load(scale_ptr + (first + top_row // HIGH) * across + column)
    else:
        place = (first + (top_row + row) // HIGH) * across + column
        scale = tl.load(scale_ptr + place, mask=inside, other=0)[:, None]
    code = tl.load(data_ptr + base + offset, mask=mask, other=0)
    out = narrow(decode_fp8(code, ELEMENT, NATIVE) * scale, out_ptr.dtype.element_ty)
    tl.store(out_ptr + base + offset, out, mask=mask)


def _launch_quantize(w: Tensor, high: int, rule: str, element: Format) -> tuple[Tensor, Tensor]:
    lead, (rows, cols) = w.shape[:-2], w.shape[-2:]
    tall = 128 if high == BLOCK else 32
    down, across = -(-rows // tall), -(-cols // BLOCK)
    data = torch.empty(w.shape, dtype=FP8_DTYPES[element.name], device=w.device)
    shape = (*lead, -(-rows // high), across)
    scale = torch.empty(shape, dtype=torch.float32, device=w.device)
    with torch.cuda.device_of(w):
        _quantize_kernel[(lead.numel() * down * across,)](
            loadable(w),
            data.view(torch.uint8),
            scale,
            rows,
            cols,
            down,
            across,
            BF16=w.dtype == torch.bfloat16,
            ALIGNED=cols % 16 == 0,
            NATIVE=converts_fp8(w),
            ELEMENT=element.name,
            RULE=rule,
            HIGH=tall,
            PER_ROW=high == 1,
            FAR=tall * cols >= 2**31,
            # 256 bytes to a thread, a quarter of that where it reads element by element.
            num_warps=max(1, tall * w.element_size() // (64 if cols % 16 == 0 else 16)),
            enable_fp_fusion=False,
        )
    return data, scale


def _launch_dequantize(data: Tensor, scale: Tensor, high: int, dtype: torch.dtype) -> Tensor:
    lead, (rows, cols) = data.shape[:-2], data.shape[-2:]
    down, across = -(-rows // 32), -(-cols // BLOCK)
    out = torch.empty(data.shape, dtype=dtype, device=data.device)
    with torch.cuda.device_of(data):
        _dequantize_kernel[(lead.numel() * down * across,)](
            data.contiguous().view(torch.uint8),
            scale.contiguous(),
            out,
            rows,
            cols,
            down,
            across,
            ELEMENT="E5M2" if data.dtype == torch.float8_e5m2 else "E4M3",
            ALIGNED=cols % 16 == 0,
            NATIVE=converts_fp8(data),
            HIGH=high,
            FAR=32 * cols >= 2**31,
            **{**OPTIONS, "num_warps": 8},
        )
    return out


@typed
def quantize(
    w: Tensor, rule: str = "amax", high: int = BLOCK, element: Format = E4M3
) -> tuple[Tensor, Tensor]:
    """Quantize `w [*, R, C]` to E4M3 or E5M2 by blocks of `high` x 128; return data and scale fp32.

    What NaN and Inf give stands at the head of this module.
    Raises ValueError for a dtype or shape that is no weight, an unknown rule, another height than
    128 or 1, another element.
    """
    amax_of.check_weight(w)
    w = w.detach()
    _check(rule, high)
    if element not in (E4M3, E5M2):
        raise ValueError(f"an FP8 element is E4M3 or E5M2, not {element.name}")
    if use_kernel(w) or not cpu.takes(w):
        run = _launch_quantize if use_kernel(w) else _quantize_reference
        return run(w, high, rule, element)
    rows, cols = w.shape[-2:]
    data = torch.empty(w.shape, dtype=FP8_DTYPES[element.name])
    scale = torch.empty((*w.shape[:-2], -(-rows // high), -(-cols // BLOCK)))

    def run_slice(part: Tensor) -> tuple[Tensor, Tensor]:
        return _quantize_reference(part, high, rule, element)

    loop = ("quantize_fp8_blocks", high, rule) if element is E4M3 else ()
    cpu.by_rows(run_slice, high, (w,), (data, scale), loop)
    return data, scale


@typed
def dequantize(
    data: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16, high: int = BLOCK
) -> Tensor:
    """Return `[*, R, C]` in `dtype` of FP8 `data` and scales for blocks of `high` x 128.

    Raises ValueError for parts that do not belong together, another dtype than fp32, bf16, fp16, or
    another height than 128 or 1.
    """
    _check("amax", high)
    check_codes(data, tuple(FP8_DTYPES.values()), dtype)
    rows, cols = data.shape[-2:]
    check_scale(scale, (*data.shape[:-2], -(-rows // high), -(-cols // BLOCK)), data.device)
    if use_kernel(data) or not cpu.takes(data):
        run = _launch_dequantize if use_kernel(data) else _dequantize_reference
        return run(data, scale, high, dtype)
    out = torch.empty(data.shape, dtype=dtype)

    def run_slice(data: Tensor, scale: Tensor) -> Tensor:
        return _dequantize_reference(data, scale, high, dtype)

    loop = ("dequantize_fp8_blocks", high) if data.dtype == torch.float8_e4m3fn else ()
    cpu.by_rows(run_slice, high, (data, scale), (out,), loop)
    return out


def _check(rule: str, high: int) -> None:
    if rule not in RULES:
        raise ValueError(f"no rule {rule!r} for these scales; there is {', '.join(RULES)}")
    if high not in (1, BLOCK):
        raise ValueError(f"a block is 1 x 128 or 128 x 128, not {high} x 128")


def _shared(amax: Tensor, rule: str) -> Tensor | None:
    _check(rule, BLOCK)
    return None


def _quantize(w: Tensor, shared: Tensor | None, rule: str) -> dict[str, Tensor]:
    data, scale = quantize(w, rule)
    return {"data": data, "scale": scale}


def _dequantize(parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    return dequantize(parts["data"], parts["scale"], dtype)


BLOCK128 = Ops(amax_of.matrix, _shared, _quantize, _dequantize)
