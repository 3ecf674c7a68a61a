"""A row with a scale of its own, in FP8 or INT8: the kernel under `fp8.quantize_channel` and
`integer.quantize_channel`, which hold its equations and its references.

| | data | scale |
|---|---|---|
| E4M3 | e4m3 `[*, R, C]` | fp32 `[*, R, 1]` = fl(amax / 448) |
| E5M2 | e5m2 `[*, R, C]` | fp32 `[*, R, 1]` = fl(amax / 57344) |
| INT8 | int8 `[*, R, C]` | fp32 `[*, R, 1]` = fl(amax / 127) |

A program takes a row. Up to 16,384 columns it holds all of it in registers and reads it once.
"""

# ONCE is known when this is compiled: what it leaves unset is not used.
# pyright: reportPossiblyUnboundVariable=false

import torch
from torch import Tensor

from lowbit_kernels.formats import INT8, Format
from lowbit_kernels.jit import COMPILED, converts_fp8, jit, loadable, tl
from lowbit_kernels.rounding import (
    FP8_DTYPES,
    divide,
    encode_integer,
    fp8_bytes,
    magnitude,
    patterns,
    widen,
)

HELD = 16384  # columns that a program of eight warps holds, 64 to a thread


# Four fp32 to four integers in one register, the lowest bytes of their sums with 1.5 * 2^23.
_FOUR_INTEGERS = tl.constexpr("""{
    .reg .f32 a, b, c, d;
    .reg .b32 e, f, g, h;
    add.rn.f32 a, $1, 0f4B400000;
    add.rn.f32 b, $2, 0f4B400000;
    add.rn.f32 c, $3, 0f4B400000;
    add.rn.f32 d, $4, 0f4B400000;
    mov.b32 e, a;
    mov.b32 f, b;
    mov.b32 g, c;
    mov.b32 h, d;
    prmt.b32 e, e, f, 0x0040;
    prmt.b32 g, g, h, 0x0040;
    prmt.b32 $0, e, g, 0x5410;
}""")


@jit
def _codes(x, scale, ELEMENT: tl.constexpr, NATIVE: tl.constexpr):
    """Return the codes of x / scale, the scale of a row that holds x: FP8 as uint8, or int8 in -127
    to 127, NaN 0.
    """
    if ELEMENT != "INT8":
        return fp8_bytes(divide(x, scale), ELEMENT, NATIVE)
    elif COMPILED:
        # As `divide` does it, after both sides are moved to where that is exact. A quotient that
        # loses bits of x by that is zero.
        factor = tl.where(scale < 2.0**-80, 2.0**100, tl.where(scale > 2.0**80, 2.0**-60, 1.0))
        moved, divisor = x * factor, scale * factor
        r = tl.math.div_rn(1.0, divisor)
        q = moved * r
        q = tl.fma(tl.fma(-q, divisor, moved), r, q)
        q = tl.minimum(tl.maximum(q, -127.0), 127.0)
        q = tl.where(scale < float("inf"), q, 0.0)
        return tl.inline_asm_elementwise(_FOUR_INTEGERS, "=r,f,f,f,f", [q], tl.int8, True, 4)  # pyright: ignore[reportArgumentType]
    else:
        return encode_integer(tl.math.div_rn(x, scale), 127.0).to(tl.int8)


@jit
def quantize_row(
    w_ptr,
    data_ptr,
    scale_ptr,
    cols,
    BF16: tl.constexpr,
    ELEMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    NATIVE: tl.constexpr,
    ONCE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Quantize one row: its amax, its scale, then its codes. ONCE: TILE times eight elements hold
    all of it, and it is read once.
    """
    offset = tl.arange(0, TILE)[:, None] * 8
    column = tl.arange(0, 8)[None, :]
    if ONCE:
        mask = offset < cols if ALIGNED else offset + column < cols
        x = tl.load(w_ptr + offset + column, mask, other=0)
        top = tl.max(tl.max(patterns(x), axis=1), axis=0)
    else:
        tops = tl.zeros([TILE, 8], tl.int32)
        for start in range(0, cols, TILE * 8):
            mask = start + offset < cols if ALIGNED else start + offset + column < cols
            x = tl.load(w_ptr + start + offset + column, mask, other=0)
            tops = tl.maximum(tops, patterns(x))
        top = tl.max(tl.max(tops, axis=1), axis=0)
    amax = magnitude(top, tl.int16 if BF16 else w_ptr.dtype.element_ty)
    largest = 448.0 if ELEMENT == "E4M3" else (57344.0 if ELEMENT == "E5M2" else 127.0)
    scale = tl.math.div_rn(amax, largest)
    scale = tl.where(scale == 0, 2.0**-149, scale)
    scale = tl.where(amax == 0, 1.0, scale)
    tl.store(scale_ptr, scale)
    if ONCE:
        codes = _codes(widen(x, BF16), scale, ELEMENT, NATIVE)
        tl.store(data_ptr + offset + column, codes, mask)
    else:
        for start in range(0, cols, TILE * 8):
            mask = start + offset < cols if ALIGNED else start + offset + column < cols
            x = tl.load(w_ptr + start + offset + column, mask, other=0)
            codes = _codes(widen(x, BF16), scale, ELEMENT, NATIVE)
            tl.store(data_ptr + start + offset + column, codes, mask)


@jit
def _row_kernel(
    w_ptr,  # [rows, cols] fp32, fp16, or bf16 as int16
    data_ptr,  # [rows, cols] FP8 codes as uint8, or int8
    scale_ptr,  # [rows] fp32
    cols,
    BF16: tl.constexpr,
    ELEMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    NATIVE: tl.constexpr,
    ONCE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Quantize one row of a matrix."""
    row = tl.program_id(0).to(tl.int64)
    w_ptr += row * cols
    data_ptr += row * cols
    quantize_row(w_ptr, data_ptr, scale_ptr + row, cols, BF16, ELEMENT, ALIGNED, NATIVE, ONCE, TILE)


def shape_of_launch(cols: int, aligned: bool, size: int) -> dict[str, int | bool]:
    """Return how many warps take a row of `cols` elements of `size` bytes, and in what shape."""
    tile = max(4, (1 << (min(cols, HELD) - 1).bit_length()) // 8) if cols <= HELD else 1024
    # 128 bytes to a thread: loads in flight count for more than threads. Rows that are not aligned
    # are read element by element, which takes more registers.
    warps = max(1, tile * size // (512 if aligned else 256))
    return {
        "ALIGNED": aligned,
        "ONCE": cols <= HELD,
        "TILE": tile,
        "num_warps": min(16, warps),
        "enable_fp_fusion": False,
    }


def launch(w: Tensor, element: Format) -> tuple[Tensor, Tensor]:
    """Quantize the rows of `w` to FP8 or INT8; return data `[*, R, C]` and scale `[*, R, 1]`."""
    cols = w.shape[-1]
    dtype = FP8_DTYPES.get(element.name, torch.int8)
    data = torch.empty(w.shape, dtype=dtype, device=w.device)
    scale = torch.empty((*w.shape[:-1], 1), dtype=torch.float32, device=w.device)
    with torch.cuda.device_of(w):
        _row_kernel[(scale.numel(),)](
            loadable(w),
            data if element is INT8 else data.view(torch.uint8),
            scale,
            cols,
            BF16=w.dtype == torch.bfloat16,
            ELEMENT=element.name,
            NATIVE=converts_fp8(w),
            **shape_of_launch(cols, cols % 16 == 0, w.element_size()),
        )
    return data, scale
