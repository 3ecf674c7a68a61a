"""The roundings of `rounding` for the loops of the CPU, in vectors: floats of elements, codes of
floats, and the largest of a few magnitudes.

Elements are patterns: int16 of bf16 and fp16, int32 of fp32.
"""

from numba import float32, int32, uint8  # pyright: ignore[reportMissingImports]

from lowbit_kernels.cpu_vectors import F32, I8, I16, I32, Lanes, Memory, jit, vectors, where


def pack_sixteen(codes: Lanes) -> Lanes:
    """Return 8 bytes of 16 E2M1 codes in lanes of 16 bits, the even ones in the low nibbles."""
    pairs = codes.read_as(I32)
    return (pairs | (pairs >> 12)).to(I8)


def magnitudes(w: Memory, at: Lanes, count: int) -> Lanes:
    x = w.load(at, count)
    return x & (0x7FFF if x.one == I16 else 0x7FFFFFFF)


def floats(w: Memory, at: Lanes, count: int) -> Lanes:
    """Return fp32 of elements: bf16 as int16, or fp32 as int32."""
    x = w.load(at, count)
    return (x if x.one == I32 else x.to(I32) << 16).read_as(F32)


def _fp8(x: Lanes, mantissa: int, least: int, largest: int) -> Lanes:
    """Return FP8 codes of fp32 x, see rounding._encode_fp8."""
    bits = x.read_as(I32)
    a = bits & 0x7FFFFFFF
    clamped = a.least(largest)
    exponent = (clamped & 0x7F800000).most(least)
    magic = exponent + ((23 - mantissa) << 23)
    total = (clamped.read_as(F32) + magic.read_as(F32)).read_as(I32)
    code = total - magic + ((exponent - least) >> (23 - mantissa))
    return where(a.above(0x7F800000), 0x7F, code | ((bits >> 24) & 0x80)).to(I8)


def encode_e4m3(x: Lanes) -> Lanes:
    return _fp8(x, 3, 0x3C800000, 0x43E00000)


def encode_e5m2(x: Lanes) -> Lanes:
    return _fp8(x, 2, 0x38800000, 0x47600000)


def encode_e2m1(q: Lanes) -> Lanes:
    """Return E2M1 codes of |q|, see rounding.e2m1_magnitude."""
    a = (q.read_as(I32) & 0x7FFFFFFF).read_as(F32)
    steep = (a * 2.0 + 8388608.0).read_as(I32)
    middle = (a + 8388610.0).read_as(I32)
    flat = (a * 0.5 + 8388612.0).read_as(I32)
    return steep.least(middle).least(flat.least(0x4B000007)) & 7


def encode_int8(q: Lanes) -> Lanes:
    """Return codes -127 to 127 of fp32 q: nearest, ties to even; NaN is 0."""
    bits = q.read_as(I32)
    a = bits & 0x7FFFFFFF
    rounded = (a.least(0x42FE0000).read_as(F32) + 8388608.0).read_as(I32) & 0xFF
    signed = where((bits & 0x80000000).equals(0), rounded, rounded * -1)
    return where(a.above(0x7F800000), 0, signed).to(I8)


def decode_e2m1(code: Lanes) -> Lanes:
    """Return fp32 of E2M1 codes in lanes of 32 bits."""
    a = code & 7
    bits = where((a * -1).above(-2), a * 0x3F000000, (a << 22) + (126 << 23))
    return (bits | ((code & 8) << 28)).read_as(F32)


def half_floats(pattern: Lanes) -> Lanes:
    """Return fp32 of the patterns of magnitudes of fp16 in lanes of 32 bits."""
    bits = ((pattern << 13).read_as(F32) * 2.0**112).read_as(I32)
    return where(pattern.above(0x7BFF), (pattern << 13) | 0x7F800000, bits).read_as(F32)


def times(w: Memory, at: Lanes, step: Lanes) -> Lanes:
    return floats(w, at, 16) * step.spread(16)


@vectors
def e4m3_times(w: Memory, at: Lanes, step: Lanes, out: Memory, to: Lanes):
    out.store(to, encode_e4m3(times(w, at, step)))


def _top(w: Memory, at: Lanes, count: int) -> Lanes:
    top = magnitudes(w, at, count).largest()
    return top.to(I32) if top.one == I16 else top


top16 = vectors(lambda w, at: _top(w, at, 16), int32)
top32 = vectors(lambda w, at: _top(w, at, 32), int32)
top128 = vectors(lambda w, at: _top(w, at, 128), int32)
bits_of = vectors(lambda x: x.read_as(I32), int32)
float_of = vectors(lambda x: x.read_as(F32), float32)
e4m3_of = vectors(lambda x: encode_e4m3(x), uint8)


@jit
def e8m0_ceil(x):
    bits = bits_of(x)
    exponent = int32(bits >> int32(23))
    threshold = int32(0x400000) if exponent == int32(0) else int32(0)
    up = int32(1) if int32(bits & int32(0x7FFFFF)) > threshold else int32(0)
    code = min(int32(exponent + up), int32(254))
    return int32(255) if bits > int32(0x7F800000) else code
