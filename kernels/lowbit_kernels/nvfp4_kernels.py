"""The kernels of `nvfp4`, which holds their equations and references: quantize by amax or by a
search, and dequantize.
"""

from lowbit_kernels.jit import COMPILED, jit, tl
from lowbit_kernels.layout import store_scales
from lowbit_kernels.nvfp4_search import best_codes
from lowbit_kernels.rounding import (
    decode_e2m1,
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
    magnitude_bits,
    narrow,
    pack_nibbles,
    swap_nibbles,
    widen,
)


@jit
def _codes(x, step, FAST: tl.constexpr):
    """Return E2M1 codes `[N, 8]` of x `[N, 8]` with a step `[N]` for each row."""
    a = tl.abs(x)
    if FAST:
        # fl(a / step) by one correction with the exact remainder, see rounding.divide; an
        # infinite quotient turns into NaN, and both have the code 7.
        r = tl.math.div_rn(1.0, step)[:, None]
        q = a * r
        q = tl.fma(tl.fma(-q, step[:, None], a), r, q)
    else:
        q = tl.math.div_rn(a, tl.broadcast_to(step[:, None], a.shape))
        q = tl.where(step[:, None] == 0, 0.0, q)
    return encode_e2m1(q) | tl.where(x < 0, 8, 0)


@jit
def quantize_tile(
    w_ptr,
    packed_ptr,
    scale_ptr,
    h_ptr,
    g,
    start,
    left,
    first,
    rows,
    across,
    BF16: tl.constexpr,
    SWIZZLED: tl.constexpr,
    HIGH: tl.constexpr,
    WEIGHTED: tl.constexpr,
    RADIUS: tl.constexpr,
    COUNT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Quantize TILE blocks, of which `left` are there, the first of them the matrix's `start` and
    `first` of the stack; pointers are those of the first block, but for scales and h.
    """
    index = tl.arange(0, TILE)
    mask = index < left
    column = tl.arange(0, 8)[None, :]
    offset = index[:, None] * 16 + column
    low = widen(tl.load(w_ptr + offset, mask=mask[:, None], other=0), BF16)
    high = widen(tl.load(w_ptr + offset + 8, mask=mask[:, None], other=0), BF16)
    top = tl.max(tl.maximum(magnitude_bits(low), magnitude_bits(high)), axis=1)

    amax = tl.cast(top, tl.float32, bitcast=True)
    quotient = tl.math.div_rn(amax, tl.full([TILE], 1.0, tl.float32) * (g * 6.0))
    quotient = tl.where(quotient == 0, 1.0, quotient)
    code = encode_e4m3(tl.where(quotient < 2.0**-9, 2.0**-9, quotient))
    if COUNT > 0:
        low_h, high_h = 1.0, 1.0
        if WEIGHTED:
            h_offset = ((start + index) % across)[:, None] * 16 + column
            low_h, high_h = tl.load(h_ptr + h_offset), tl.load(h_ptr + h_offset + 8)
        code = best_codes(low, high, low_h, high_h, amax, code, g, RADIUS, COUNT)
    store_scales(scale_ptr, code, first, index, mask, rows, across, SWIZZLED)

    step = decode_e4m3(code) * g
    # Here 1 / step and every remainder that decides a code are normal numbers.
    if COMPILED:
        if (g > 2.0**-80) & (g < 2.0**100):
            low_codes = _codes(low, step, True)
            high_codes = _codes(high, step, True)
        else:
            low_codes = _codes(low, step, False)
            high_codes = _codes(high, step, False)
    else:
        low_codes = _codes(low, step, False)
        high_codes = _codes(high, step, False)
    low_word = pack_nibbles(low_codes, column, 1)
    high_word = pack_nibbles(high_codes, column, 1)
    if HIGH:
        low_word, high_word = swap_nibbles(low_word), swap_nibbles(high_word)
    word = (low_word.to(tl.int64) & 0xFFFFFFFF) | (high_word.to(tl.int64) << 32)
    tl.store(packed_ptr + index, word, mask=mask)


@jit
def _quantize_kernel(
    w_ptr,  # [matrices, blocks, 16] fp32, fp16, or bf16 as int16
    packed_ptr,  # [matrices, blocks] int64
    scale_ptr,  # [matrices, blocks] E4M3 as uint8
    global_scale_ptr,  # [matrices] fp32
    h_ptr,  # [blocks of a row, 16] fp32, see importance; read where WEIGHTED
    blocks,
    programs,
    rows,
    across,  # blocks of a row
    BF16: tl.constexpr,
    SWIZZLED: tl.constexpr,
    HIGH: tl.constexpr,
    WEIGHTED: tl.constexpr,
    RADIUS: tl.constexpr,
    COUNT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Quantize TILE blocks; a thread holds a block as two halves of eight elements.

    COUNT scales of each block are tried, RADIUS to each side of the first, none where it is 0.
    """
    matrix = (tl.program_id(0) // programs).to(tl.int64)
    start = (tl.program_id(0) % programs).to(tl.int64) * TILE
    first = matrix * blocks + start
    quantize_tile(
        w_ptr + first * 16,
        packed_ptr + first,
        scale_ptr,
        h_ptr,
        tl.load(global_scale_ptr + matrix),
        start,
        blocks - start,
        first,
        rows,
        across,
        BF16,
        SWIZZLED,
        HIGH,
        WEIGHTED,
        RADIUS,
        COUNT,
        TILE,
    )


@jit
def _dequantize_kernel(
    packed_ptr,  # [matrices, blocks, 2] int32
    scale_ptr,  # [matrices, blocks] E4M3 as uint8
    global_scale_ptr,  # [matrices] fp32
    out_ptr,  # [matrices, blocks, 16] fp32, fp16 or bf16
    halves,
    programs,
    TILE: tl.constexpr,
):
    """Dequantize TILE half blocks, eight elements to a thread."""
    matrix = (tl.program_id(0) // programs).to(tl.int64)
    start = (tl.program_id(0) % programs).to(tl.int64) * TILE
    first = matrix * halves + start
    index = tl.arange(0, TILE)
    mask = index < halves - start
    word = tl.load(packed_ptr + first + index, mask=mask, other=0)
    scale = tl.load(scale_ptr + first // 2 + index // 2, mask=mask, other=0)
    step = decode_e4m3(scale.to(tl.int32)) * tl.load(global_scale_ptr + matrix)
    column = tl.arange(0, 8)[None, :]
    value = decode_e2m1((word[:, None] >> (column * 4)) & 15) * step[:, None]
    out = narrow(value, out_ptr.dtype.element_ty)
    place = out_ptr + first * 8 + index[:, None] * 8 + column
    tl.store(place, out, mask=mask[:, None], cache_modifier=".cs")
