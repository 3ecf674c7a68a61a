"""Round fp32 to E4M3, E5M2, E2M1 and E8M0: once in torch, once in integers for use inside kernels.

| to | rule | out of range | NaN |
|---|---|---|---|
| E4M3 | nearest, ties to even | saturates at 448, Inf too | 0x7F, without a sign |
| E5M2 | nearest, ties to even | saturates at 57344, Inf too | 0x7F, without a sign |
| E2M1 | nearest, ties to even | saturates at 6, Inf too | 7 (the value 6) |
| E8M0 | the next power of two up | 0 and below 2^-127: code 0; Inf: 254 | 255 |

E2M1: with a the magnitude, the code is the least of 2a, a + 2, a/2 + 4 and 7, since that is a
concave chain of lines through the eight values. Adding 2^23 in the same operation leaves fp32 no
bits below the integer, so one addition rounds to nearest, ties to even code. Sources: OCP 8-bit
Floating Point Specification 1.0 (E4M3, E5M2), OCP Microscaling Formats 1.0 (E2M1, E8M0), PTX ISA
`cvt.rn.satfinite.e2m1x2.f32`, `cvt.rp.satfinite.ue8m0x2.f32`.
"""

import torch
from torch import Tensor

from lowbit_kernels.formats import E4M3, Format
from lowbit_kernels.jit import COMPILED, jit, tl

# What FP8 elements are kept in.
FP8_DTYPES = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}

_MAGIC = float(2**23)
_MAGIC_BITS = 0x4B000000  # the pattern of 2^23, so 2^23 + n has the pattern of this plus n


def to_e4m3(x: Tensor) -> Tensor:
    """Round fp32 `x` to E4M3."""
    # Clamped first: torch before 2.12 turns what lies above 464 into NaN.
    data = x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    codes = data.view(torch.uint8)
    codes.masked_fill_(codes == 0xFF, 0x7F)
    return data


def to_e5m2(x: Tensor) -> Tensor:
    """Round fp32 `x` to E5M2, saturating at 57344."""
    data = x.clamp(-57344.0, 57344.0).to(torch.float8_e5m2)
    codes = data.view(torch.uint8)
    codes.masked_fill_(torch.isnan(x), 0x7F)
    return data


def e2m1_magnitude(a: Tensor) -> Tensor:
    """Return the E2M1 codes 0 to 7, as uint8, of magnitudes `a` in fp32."""
    steep = a * 2.0 + _MAGIC
    middle = a + (_MAGIC + 2.0)
    flat = a * 0.5 + (_MAGIC + 4.0)
    # Least by pattern, not by value: so NaN, the largest pattern, ends as 7.
    least = torch.minimum(steep.view(torch.int32), middle.view(torch.int32))
    least = torch.minimum(least, flat.view(torch.int32))
    return least.clamp_(max=_MAGIC_BITS + 7).to(torch.uint8) & 7


def to_fp8(x: Tensor, element: Format) -> Tensor:
    """Round fp32 `x` to E4M3 or E5M2."""
    return to_e4m3(x) if element is E4M3 else to_e5m2(x)


def to_e2m1(q: Tensor, negative: Tensor) -> Tensor:
    """Return the E2M1 codes 0 to 15, as uint8, of fp32 `q`; bit 3 is set where `negative`."""
    return e2m1_magnitude(q.abs()) | (negative.to(torch.uint8) << 3)


def e8m0_ceil(x: Tensor) -> Tensor:
    """Return the E8M0 code, as uint8, of the least power of two not below fp32 `x` >= 0."""
    bits = x.view(torch.int32)
    exponent = bits >> 23
    mantissa = bits & 0x7FFFFF
    # 2^-127, code 0, is the fp32 subnormal 0x400000.
    up = torch.where(exponent == 0, mantissa > 0x400000, mantissa > 0)
    code = torch.clamp(exponent + up, max=254)
    return torch.where(torch.isnan(x), 255, code).to(torch.uint8)


def e8m0_value(code: Tensor) -> Tensor:
    """Return fp32 2^(code - 127) of E8M0 codes: 0 is 2^-127, 255 is NaN."""
    exponent = code.to(torch.int32)
    bits = torch.where(exponent == 0, 0x400000, exponent << 23)
    return torch.where(exponent == 255, 0x7FC00000, bits).view(torch.float32)


def e8m0_reciprocal(code: Tensor) -> Tensor:
    """Return fp32 2^(127 - code) of E8M0 codes, exact; 255 is NaN."""
    exponent = code.to(torch.int32)
    bits = torch.where(exponent == 254, 0x400000, (254 - exponent) << 23)
    return torch.where(exponent == 255, 0x7FC00000, bits).view(torch.float32)


def tree_sum_of(e: Tensor) -> Tensor:
    """Sum fp32 `[..., 2^n]` over the last axis in a fixed order: the upper half onto the lower."""
    while e.shape[-1] > 1:
        half = e.shape[-1] // 2
        e = e[..., :half] + e[..., half:]
    return e.squeeze(-1)


def pack(codes: Tensor) -> Tensor:
    """Pack 4-bit codes `[..., C]` into bytes `[..., C/2]`, the even column in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """Unpack bytes `[..., C/2]` into 4-bit codes `[..., C]`, the low nibble first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def unpack_int4(packed: Tensor) -> Tensor:
    """Unpack bytes `[..., C/2]` into INT4 `[..., C]` as int8, the low nibble first."""
    return (unpack(packed) ^ 8).view(torch.int8) - 8


# From here on: the same roundings for use inside kernels, int32 codes out of fp32 tiles.


@jit
def widen(x, BF16: tl.constexpr):
    """Return a loaded tile as fp32; bf16 is loaded as int16 and widened by a shift."""
    if BF16:
        return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@jit
def narrow(x, DTYPE: tl.constexpr):
    """Return fp32 x in a floating DTYPE: nearest, ties to even."""
    if COMPILED or tl.bfloat16 != DTYPE:
        return x.to(DTYPE)
    else:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
        return rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)


@jit
def magnitude_bits(x):
    """Return the patterns of |x|, which order as |x| does, NaN above all."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def patterns(x):
    """Return the patterns of |x| as loaded, int32: they order as |x| does, NaN above all."""
    if x.dtype == tl.int16:
        return (x & 0x7FFF).to(tl.int32)
    elif x.dtype == tl.float16:
        return (x.to(tl.int16, bitcast=True) & 0x7FFF).to(tl.int32)
    else:
        return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def magnitude(pattern, DTYPE: tl.constexpr):
    """Return the fp32 magnitude with a pattern of `patterns`, of elements loaded as DTYPE."""
    if tl.int16 == DTYPE:
        return (pattern << 16).to(tl.float32, bitcast=True)
    elif tl.float16 == DTYPE:
        return pattern.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return pattern.to(tl.float32, bitcast=True)


@jit
def divide(x, s):
    """Return x / s, exact wherever a rounding to E4M3, E5M2 or E2M1 could tell; `s` is a scalar.

    One correction by the exact remainder replaces the division. It needs a reciprocal and a
    remainder that are normal numbers, so a scale near the ends of fp32 takes the true division.
    """
    if COMPILED:
        if (s > 2.0**-80) & (s < 2.0**100):
            r = tl.math.div_rn(1.0, s)
            q = x * r
            fixed = tl.fma(tl.fma(-q, s, x), r, q)
            # An infinite q has no remainder: it and NaN stay as they are.
            q = tl.where(tl.abs(q) < float("inf"), fixed, q)
            # -0 has lost its sign to the sums of the correction.
            sign = x.to(tl.int32, bitcast=True) & -2147483648
            q = (q.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
        else:
            q = tl.math.div_rn(x, s)
    else:
        q = tl.math.div_rn(x, s)
    return q


@jit
def _encode_fp8(x, MANTISSA: tl.constexpr, LEAST: tl.constexpr, MAX: tl.constexpr):
    """Return the FP8 code of fp32 x: nearest, ties to even; saturates; NaN is 0x7F.

    MANTISSA is its bits of mantissa, LEAST and MAX the fp32 patterns of its smallest normal and
    its largest number.
    """
    bits = x.to(tl.int32, bitcast=True)
    a = bits & 0x7FFFFFFF
    clamped = tl.minimum(a, MAX)
    # Adding 2^(e + 23 - MANTISSA) leaves the bits that a number with exponent e keeps; below the
    # smallest exponent the step stays that of the subnormals.
    exponent = tl.maximum(clamped & 0x7F800000, LEAST)
    magic = exponent + ((23 - MANTISSA) << 23)
    total = clamped.to(tl.float32, bitcast=True) + magic.to(tl.float32, bitcast=True)
    code = total.to(tl.int32, bitcast=True) - magic + ((exponent - LEAST) >> (23 - MANTISSA))
    return tl.where(a > 0x7F800000, 0x7F, code | ((bits >> 24) & 0x80))


@jit
def encode_e4m3(x):
    """Return the E4M3 codes of fp32 x."""
    return _encode_fp8(x, 3, 0x3C800000, 0x43E00000)


@jit
def encode_e5m2(x):
    """Return the E5M2 codes of fp32 x, never Inf."""
    return _encode_fp8(x, 2, 0x38800000, 0x47600000)


# Four fp32 to four FP8 codes in one register; saturates, NaN is 0x7F.
_FOUR = """{{
    .reg .b16 low, high;
    cvt.rn.satfinite.{0}x2.f32 low, $2, $1;
    cvt.rn.satfinite.{0}x2.f32 high, $4, $3;
    mov.b32 $0, {{low, high}};
}}"""
_FOUR_E4M3 = tl.constexpr(_FOUR.format("e4m3"))
_FOUR_E5M2 = tl.constexpr(_FOUR.format("e5m2"))


@jit
def fp8_bytes(x, ELEMENT: tl.constexpr, NATIVE: tl.constexpr):
    """Return the FP8 codes of fp32 x as uint8; NATIVE: the device has an instruction for it."""
    if NATIVE:
        code: tl.constexpr = _FOUR_E4M3 if ELEMENT == "E4M3" else _FOUR_E5M2
        return tl.inline_asm_elementwise(code, "=r,r,r,r,r", [x], tl.uint8, True, 4)  # pyright: ignore[reportArgumentType]
    elif ELEMENT == "E4M3":
        return encode_e4m3(x).to(tl.uint8)
    else:
        return encode_e5m2(x).to(tl.uint8)


# Four E4M3 codes in one register to four fp32, by way of fp16, which holds them all.
_FOUR_VALUES = tl.constexpr("""{
    .reg .b16 low, high, a, b, c, d;
    .reg .b32 first, second;
    mov.b32 {low, high}, $4;
    cvt.rn.f16x2.e4m3x2 first, low;
    cvt.rn.f16x2.e4m3x2 second, high;
    mov.b32 {a, b}, first;
    mov.b32 {c, d}, second;
    cvt.f32.f16 $0, a;
    cvt.f32.f16 $1, b;
    cvt.f32.f16 $2, c;
    cvt.f32.f16 $3, d;
}""")


@jit
def decode_fp8(code, ELEMENT: tl.constexpr, NATIVE: tl.constexpr):
    """Return fp32 values of uint8 codes of E4M3 or E5M2; NATIVE: the device has an instruction."""
    if ELEMENT == "E5M2":
        return decode_e5m2(code.to(tl.int32))
    elif NATIVE:
        return tl.inline_asm_elementwise(
            _FOUR_VALUES,  # pyright: ignore[reportArgumentType]
            "=f,=f,=f,=f,r",
            [code],
            tl.float32,
            True,
            4,
        )
    else:
        return decode_e4m3(code.to(tl.int32))


@jit
def decode_e4m3(code):
    """Return fp32 values of E4M3 codes 0 to 255."""
    # As the pattern of a number 2^-120 times as large, so that subnormals need no case.
    value = ((code & 0x7F) << 20).to(tl.float32, bitcast=True) * 2.0**120
    bits = value.to(tl.int32, bitcast=True) | ((code & 0x80) << 24)
    bits = tl.where((code & 0x7F) == 0x7F, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@jit
def decode_e5m2(code):
    """Return fp32 values of E5M2 codes 0 to 255, which are the upper halves of fp16 patterns."""
    return (code << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@jit
def encode_e2m1(q):
    """Return the E2M1 codes 0 to 7 of fp32 magnitudes q: nearest, ties to even; NaN is 7."""
    steep = tl.fma(q, 2.0, 8388608.0).to(tl.int32, bitcast=True)
    middle = (q + 8388610.0).to(tl.int32, bitcast=True)
    flat = tl.fma(q, 0.5, 8388612.0).to(tl.int32, bitcast=True)
    return tl.minimum(tl.minimum(steep, middle), tl.minimum(flat, 0x4B000007)) & 7


@jit
def decode_e2m1(code):
    """Return fp32 values of E2M1 codes 0 to 15."""
    value = ((code & 7) << 22).to(tl.float32, bitcast=True) * 2.0**126
    bits = value.to(tl.int32, bitcast=True) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True)


@jit
def encode_integer(q, LARGEST: tl.constexpr):
    """Return int32 of fp32 q: nearest, ties to even, within LARGEST of 0; NaN is 0."""
    q = tl.where(q > LARGEST, LARGEST, tl.where(q < -LARGEST, -LARGEST, tl.where(q == q, q, 0.0)))
    # Adding 1.5 * 2^23 leaves no bits below the integer.
    return (q + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@jit
def encode_e8m0(x):
    """Return the E8M0 code of the least power of two not below fp32 x >= 0; NaN is 255."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = bits >> 23
    mantissa = bits & 0x7FFFFF
    threshold = tl.where(exponent == 0, 0x400000, 0)
    code = tl.minimum(exponent + (mantissa > threshold).to(tl.int32), 254)
    return tl.where(bits > 0x7F800000, 255, code)


@jit
def decode_e8m0(code):
    """Return fp32 2^(code - 127): code 0 is a subnormal, 255 NaN."""
    bits = tl.where(code == 0, 0x400000, code << 23)
    return tl.where(code == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@jit
def reciprocal_e8m0(code):
    """Return fp32 2^(127 - code), exact; 255 is NaN."""
    bits = tl.where(code == 254, 0x400000, (254 - code) << 23)
    return tl.where(code == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@jit
def pack_nibbles(codes, column, AXIS: tl.constexpr):
    """Pack int32 codes of four bits into int32 along AXIS of length 8, the first lowest."""
    return tl.sum(codes << (column * 4), axis=AXIS)


@jit
def swap_nibbles(word):
    """Return int32 words with the nibbles of each byte exchanged."""
    return ((word >> 4) & 0x0F0F0F0F) | ((word & 0x0F0F0F0F) << 4)


@jit
def tree_sum(e):
    """Sum fp32 `[N, 8]` over its columns in a fixed order: halves added to each other, thrice."""
    rows: tl.constexpr = e.shape[0]
    a, b = tl.split(tl.permute(tl.reshape(e, [rows, 2, 4]), (0, 2, 1)))
    a, b = tl.split(tl.permute(tl.reshape(a + b, [rows, 2, 2]), (0, 2, 1)))
    a, b = tl.split(a + b)
    return a + b
