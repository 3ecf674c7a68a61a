"""NVFP4 of bf16 and fp16 weights on Hopper and later: the codes of `nvfp4`, in half the
instructions.

A thread takes words of two elements, and works on pairs where an instruction can. For MXFP4 the
reciprocal of a scale is a power of two, and nothing is rounded before the codes are. For NVFP4
every code is that of fl(|w| / step), though nothing is divided:

    r = fl(1 / step),  e = 1 - step r (exact),  r' = fl(e r + e fl(e r))
    q = fl(|w| r + fl(|w| r'))

q may be one unit in the last place beside fl(|w| / step), but lies on the same side of every tie
of E2M1. Both are roundings of numbers that differ by less than 3 |w| / step 2^-48, so they could
only be parted by a tie's edge, a number m halfway between the tie and a neighbouring float. For
|w| of 11 bits (fp16; bf16 has 8) and a step of 24 bits, |w| - m step is that small for one pair
only: step = 2 - 2^-23, |w| a power of two. There r' makes q right. This was enumerated over all
2^23 steps; tests/kernels/test_fp4_pairs.py does it again. Where global_scale is so small or large
that r or e is no normal number, |w| (1 / step) in fp64 is as good: it is wrong by 2^-52 at most.

| what | how |
|---|---|
| block's amax | maximum of magnitudes of pairs, NaN stays |
| sign | pairs compared with 0, so that -0 has code 0 |
| E2M1 | the least of three lines, see `rounding`; their constants cancel in the packed word |

Source of the instructions: PTX ISA 8.7, `max.xorsign.abs`, `set.lt`, `cvt.e4m3x2`, `rcp.rn`.
"""

# Triton's stubs know neither constants as assembly nor that a reduction gives a tensor.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from lowbit_kernels.jit import jit, tl
from lowbit_kernels.layout import store_scales
from lowbit_kernels.mx_scales import scale_codes
from lowbit_kernels.rounding import fp8_bytes, reciprocal_e8m0, swap_nibbles

# Written once for bf16, once for fp16.
_LARGER = "max.NaN.xorsign.abs.{0}x2 $0, $1, $2;"
_LARGER_BF16 = tl.constexpr(_LARGER.format("bf16"))
_LARGER_FP16 = tl.constexpr(_LARGER.format("f16"))

# Four words in, the word of their eight signs out (bit 3 of each nibble), and three zeros.
_SIGNS = """{{
    .reg .b32 a, b, c, d, e, f, zero;
    mov.b32 zero, 0;
    set.lt.u32.{0}x2 a, $4, zero;
    set.lt.u32.{0}x2 b, $5, zero;
    set.lt.u32.{0}x2 c, $6, zero;
    set.lt.u32.{0}x2 d, $7, zero;
    prmt.b32 e, a, b, 0x6420;
    prmt.b32 f, c, d, 0x6420;
    prmt.b32 a, e, f, 0x6420;
    prmt.b32 b, e, f, 0x7531;
    lop3.b32 a, a, b, 0x0F0F0F0F, 0xE4;
    and.b32 $0, a, 0x88888888;
    mov.b32 $1, 0;
    mov.b32 $2, 0;
    mov.b32 $3, 0;
}}"""
_SIGNS_BF16 = tl.constexpr(_SIGNS.format("bf16"))
_SIGNS_FP16 = tl.constexpr(_SIGNS.format("f16"))

_DECODE_E4M3 = tl.constexpr("""{
    .reg .b16 code, low, high;
    .reg .b32 pair;
    cvt.u16.u32 code, $1;
    cvt.rn.f16x2.e4m3x2 pair, code;
    mov.b32 {low, high}, pair;
    cvt.f32.f16 $0, low;
}""")
_HALF = tl.constexpr("""{
    .reg .b16 low, high;
    mov.b32 {low, high}, $1;
    cvt.f32.f16 $0, low;
}""")


@jit
def _larger_bf16(a, b):
    return tl.inline_asm_elementwise(_LARGER_BF16, "=r,r,r", [a, b], tl.int32, True, 1)


@jit
def _larger_fp16(a, b):
    return tl.inline_asm_elementwise(_LARGER_FP16, "=r,r,r", [a, b], tl.int32, True, 1)


@jit
def _first(words, BF16: tl.constexpr):
    """Return the lower elements of words as fp32; in assembly, so that |x| stays an operand's."""
    if BF16:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $1, 16;", "=r,r", [words], tl.float32, True, 1
        )
    else:
        return tl.inline_asm_elementwise(_HALF, "=r,r", [words], tl.float32, True, 1)


@jit
def _second(words, BF16: tl.constexpr):
    """Return the upper elements of words as fp32."""
    if BF16:
        return tl.inline_asm_elementwise(
            "and.b32 $0, $1, 0xFFFF0000;", "=r,r", [words], tl.float32, True, 1
        )
    else:
        return tl.inline_asm_elementwise(_HALF, "=r,r", [words >> 16], tl.float32, True, 1)


@jit
def _codes(x, r, rest, HOW: tl.constexpr):
    """Return E2M1 codes 0 to 7, plus the pattern of 2^23, of |x| times a reciprocal: r where it is
    EXACT, r + rest where it is in TWO parts, r in fp64 where it is WIDE.
    """
    a = tl.abs(x)
    if HOW == "EXACT":
        q = a * r
    elif HOW == "TWO":
        q = tl.fma(a, r, a * rest)
    else:
        q = (a.to(tl.float64) * r).to(tl.float32)
        q = tl.where(r == float("inf"), 0.0, q)
    steep = tl.fma(q, 2.0, 8388608.0).to(tl.int32, bitcast=True)
    middle = (q + 8388610.0).to(tl.int32, bitcast=True)
    flat = tl.fma(q, 0.5, 8388612.0).to(tl.int32, bitcast=True)
    return tl.minimum(tl.minimum(steep, middle), tl.minimum(flat, 0x4B000007))


@jit
def _word(words, r, rest, BF16: tl.constexpr, HOW: tl.constexpr):
    """Return int32 `[N]` of eight E2M1 codes of words `[N, 4]`, the first in the lowest bits; the
    four words of a row have to be in one thread, see `takes`.
    """
    even = _codes(_first(words, BF16), r, rest, HOW)
    odd = _codes(_second(words, BF16), r, rest, HOW)
    signs = tl.inline_asm_elementwise(
        _SIGNS_BF16 if BF16 else _SIGNS_FP16, "=r,=r,=r,=r,r,r,r,r", [words], tl.int32, True, 4
    )
    shifted = (odd * 16 + even) * (1 << (tl.arange(0, 4)[None, :] * 8)) + signs
    # Eight patterns of 2^23, each shifted to its nibble, are -0x05000000 modulo 2^32.
    return tl.sum(shifted, axis=1) + 0x05000000


@jit
def _top(words, BF16: tl.constexpr):
    """Return fp32 `[N]`: the largest magnitudes of words `[N, K]`."""
    top = tl.reduce(words, 1, _larger_bf16 if BF16 else _larger_fp16)
    top &= 0x7FFF7FFF
    return tl.maximum(_first(top, BF16), _second(top, BF16), propagate_nan=tl.PropagateNan.ALL)


@jit
def _amax(low, high, BF16: tl.constexpr):
    """Return fp32 `[N]`: the largest magnitudes of blocks, given as two halves `[N, 4]`."""
    return _top(_larger_bf16(low, high) if BF16 else _larger_fp16(low, high), BF16)


@jit
def _placed(index, left, across, down, TILED: tl.constexpr):
    """Return where blocks lie after the first and which are there: `left` in a line, or, TILED,
    those of `down` rows and `left` columns of a tile of 128 x 4 in rows of `across`.
    """
    if TILED:
        row, column = index // 4, index % 4
        return row * across + column, (row < down) & (column < left)
    else:
        return index, index < left


@jit
def _store_tile(scale_ptr, code, mask, index, WHOLE: tl.constexpr):
    """Store scales of a tile of 128 x 4, the WHOLE of it in a line, zeros where no block is."""
    code = tl.where(mask, code.to(tl.int32), 0).to(tl.uint8)
    if WHOLE:
        code = tl.permute(tl.reshape(code, [4, 32, 4]), (1, 0, 2))
        tl.store(scale_ptr + tl.arange(0, 512), tl.reshape(code, [512]))
    else:
        row, column = index // 4, index % 4
        tl.store(scale_ptr + (row % 32) * 16 + (row // 32) * 4 + column, code)


@jit
def _store_block(
    low,
    high,
    quotient,
    g,
    packed_ptr,
    scale_ptr,
    index,
    place,
    mask,
    BF16: tl.constexpr,
    TILED: tl.constexpr,
    HIGH: tl.constexpr,
    HOW: tl.constexpr,
):
    """Store the scale and the codes of blocks, whose amax over six global scales is `quotient`."""
    quotient = tl.where(quotient == 0, 1.0, quotient)
    quotient = tl.where(quotient < 2.0**-9, 2.0**-9, quotient)
    code = fp8_bytes(quotient, "E4M3", True)
    if TILED:
        _store_tile(scale_ptr, code, mask, index, HOW == "TWO")
    else:
        tl.store(scale_ptr + index, code, mask=mask)
    step = tl.inline_asm_elementwise(_DECODE_E4M3, "=r,r", [code.to(tl.int32)], tl.float32, True, 1)
    step = (step * g)[:, None]
    if HOW == "TWO":
        r = tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=r,r", [step], tl.float32, True, 1)
        rest = tl.fma(-step, r, 1.0)
        rest = tl.fma(rest, rest * r, rest * r)
    else:
        r = 1.0 / step.to(tl.float64)
        rest = r
    low_word = _word(low, r, rest, BF16, HOW)
    high_word = _word(high, r, rest, BF16, HOW)
    if HIGH:
        low_word, high_word = swap_nibbles(low_word), swap_nibbles(high_word)
    packed = (low_word.to(tl.int64) & 0xFFFFFFFF) | (high_word.to(tl.int64) << 32)
    tl.store(packed_ptr + place, packed, mask=mask)


@jit
def quantize_pairs(
    w_ptr,
    packed_ptr,
    scale_ptr,
    g,
    left,
    across,
    down,
    BF16: tl.constexpr,
    TILED: tl.constexpr,
    HIGH: tl.constexpr,
    TILE: tl.constexpr,
    FEW: tl.constexpr,
):
    """Quantize TILE blocks, see `_placed` for which, a block to a thread at a time; where numbers
    are extreme, FEW at once. Pointers are those of the first block, that of scales of its tile.
    """
    index = tl.arange(0, TILE)
    place, mask = _placed(index, left, across, down, TILED)
    offset = place[:, None] * 8 + tl.arange(0, 4)[None, :]
    low = tl.load(w_ptr + offset, mask=mask[:, None], other=0)
    high = tl.load(w_ptr + offset + 4, mask=mask[:, None], other=0)
    six = g * 6.0
    if (g > 2.0**-80) & (g < 2.0**100):
        amax = _amax(low, high, BF16)
        sixth = tl.math.div_rn(1.0, six)
        quotient = amax * sixth
        fixed = tl.fma(tl.fma(-quotient, six, amax), sixth, quotient)
        quotient = tl.where(quotient < float("inf"), fixed, quotient)
        _store_block(
            low,
            high,
            quotient,
            g,
            packed_ptr,
            scale_ptr,
            index,
            place,
            mask,
            BF16,
            TILED,
            HIGH,
            "TWO",
        )
    else:
        for begin in range(0, TILE, FEW):
            few = begin + tl.arange(0, FEW)
            spot, there = _placed(few, left, across, down, TILED)
            words = spot[:, None] * 8 + tl.arange(0, 4)[None, :]
            lower = tl.load(w_ptr + words, mask=there[:, None], other=0)
            upper = tl.load(w_ptr + words + 4, mask=there[:, None], other=0)
            tops = _amax(lower, upper, BF16)
            ratio = tl.math.div_rn(tops, tl.full([FEW], 1.0, tl.float32) * six)
            _store_block(
                lower,
                upper,
                ratio,
                g,
                packed_ptr,
                scale_ptr,
                few,
                spot,
                there,
                BF16,
                TILED,
                HIGH,
                "WIDE",
            )


@jit
def quantize_mxfp4_pairs(
    w_ptr,
    packed_ptr,
    scale_ptr,
    left,
    first,
    rows,
    across,
    BF16: tl.constexpr,
    SWIZZLED: tl.constexpr,
    HIGH: tl.constexpr,
    RULE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Quantize TILE blocks of 32, of which `left` are there; four threads hold a block. Pointers
    are those of the first block, but for scales: it is `first` of the stack.
    """
    quarter = tl.arange(0, TILE * 4)
    mask = quarter < left * 4
    place = quarter[:, None] * 4 + tl.arange(0, 4)[None, :]
    words = tl.load(w_ptr + place, mask=mask[:, None], other=0)
    top = tl.reshape(_top(words, BF16).to(tl.int32, bitcast=True), [TILE, 4])
    code = scale_codes(tl.max(top, axis=1).to(tl.float32, bitcast=True), "E2M1", RULE)
    index = tl.arange(0, TILE)
    store_scales(scale_ptr, code, first, index, index < left, rows, across, SWIZZLED)
    unit = tl.broadcast_to(reciprocal_e8m0(code)[:, None], [TILE, 4])
    unit = tl.reshape(unit, [TILE * 4])[:, None]
    word = _word(words, unit, unit, BF16, "EXACT")
    if HIGH:
        word = swap_nibbles(word)
    tl.store(packed_ptr + quarter, word, mask=mask)
