"""The loops of `cpu_numba`, compiled when they are first called.

Rounding is that of `rounding`, in integers; no fast-math, so nothing is contracted or reordered.
Loops run over strips that fit the first cache, by simple passes that the compiler turns into vector
instructions. NVFP4 of bf16 takes no division for an element: fl(m / step) exceeds a midpoint t of
E2M1 exactly where m exceeds step * t', t' being t moved by half a unit of its last place, up where
the tie goes down and down where it goes up. In fp64 that product is exact, and no m of bf16 meets
it; cut to the bits of bf16 it is the last pattern below. So the code is the number of such
boundaries below m, seven comparisons of 16-bit integers.

All that is compiled is in this file: numba looks at the file of a function, not at those of its
callees, to see whether what it kept is stale.
"""

from collections.abc import Callable
from typing import Any

import numba  # pyright: ignore[reportMissingImports]
from numba import float32, float64, int8, int32, int64, uint8, uint16  # pyright: ignore[reportMissingImports]
from numba.extending import intrinsic  # pyright: ignore[reportMissingImports]

STRIP = 4096  # elements; a multiple of 32


def _jit(function: Callable[..., Any]) -> Any:
    """Compile `function` when it is first called, keep the code, and hold no lock while it runs."""
    options = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # nowhere to keep it: an installation that is read-only, and no home
        return numba.njit(**options)(function)


def _bitcast(target: Any, source: Any) -> Any:
    def typed(_: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, __: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], context.get_value_type(target))

        return target(source), generate

    return intrinsic(typed)


_bits = _bitcast(int32, float32)
_float = _bitcast(float32, int32)
_bits64 = _bitcast(int64, float64)


@_jit
def _encode_fp8(x, mantissa, least, largest):
    """Return the FP8 code of fp32 x, see rounding._encode_fp8."""
    bits = _bits(x)
    a = int32(bits & int32(0x7FFFFFFF))
    clamped = min(a, largest)
    exponent = max(int32(clamped & int32(0x7F800000)), least)
    magic = int32(exponent + int32((int32(23) - mantissa) << int32(23)))
    total = _bits(_float(clamped) + _float(magic))
    code = int32(int32(total - magic) + int32((exponent - least) >> (int32(23) - mantissa)))
    code = int32(code | int32((bits >> int32(24)) & int32(0x80)))
    return int32(0x7F) if a > int32(0x7F800000) else code


@_jit
def _e4m3(x):
    return _encode_fp8(x, int32(3), int32(0x3C800000), int32(0x43E00000))


@_jit
def _e5m2(x):
    return _encode_fp8(x, int32(2), int32(0x38800000), int32(0x47600000))


@_jit
def _e2m1(q):
    """Return the E2M1 code of |q|, see rounding.e2m1_magnitude."""
    a = _float(int32(_bits(q) & int32(0x7FFFFFFF)))
    steep = _bits(a * float32(2.0) + float32(8388608.0))
    middle = _bits(a + float32(8388610.0))
    flat = _bits(a * float32(0.5) + float32(8388612.0))
    return int32(min(min(steep, middle), min(flat, int32(0x4B000007))) & int32(7))


@_jit
def _e8m0_ceil(x):
    bits = _bits(x)
    exponent = int32(bits >> int32(23))
    threshold = int32(0x400000) if exponent == int32(0) else int32(0)
    up = int32(1) if int32(bits & int32(0x7FFFFF)) > threshold else int32(0)
    code = min(int32(exponent + up), int32(254))
    return int32(255) if bits > int32(0x7F800000) else code


@_jit
def _widen(w, shift, x):
    """Write the fp32 patterns of `w`, bf16 or fp32 as unsigned integers, to int32 `x`."""
    for i in range(w.shape[0]):
        x[i] = int32(w[i]) << shift


@_jit
def _fold(x, y):
    """Write the larger of each two of `x` to `y`."""
    for i in range(y.shape[0]):
        y[i] = max(x[2 * i], x[2 * i + 1])


@_jit
def _fold_magnitudes(x, mask, y):
    for i in range(y.shape[0]):
        y[i] = max(x[2 * i] & mask, x[2 * i + 1] & mask)


@_jit
def _pack(pairs, out):
    """Pack two codes of a byte each, read as one uint16, into a byte."""
    for i in range(out.shape[0]):
        out[i] = uint8(pairs[i] | (pairs[i] >> uint16(4)))


@_jit
def look_up(index, table, out):
    for i in range(out.shape[0]):
        out[i] = table[index[i]]


@_jit
def _cast(w, shift, scale, out):
    for i in range(out.shape[0]):
        out[i] = uint8(_e4m3(_float(int32(int32(w[i]) << shift)) / scale))


@_jit
def cast_groups(w, shift, scale, out):
    for group in range(w.shape[0]):
        _cast(w[group], shift, scale[group], out[group])


@_jit
def _nvfp4_scales(tops, g, decoded, scale, steps):
    """Write scales and steps of blocks with amax patterns `tops`, see nvfp4.scales_of."""
    g6 = float32(g * float32(6.0))
    for b in range(tops.shape[0]):
        q = float32(_float(tops[b]) / g6)
        q = float32(1.0) if q == float32(0.0) else q
        q = float32(2.0**-9) if q < float32(2.0**-9) else q
        scale[b] = uint8(_e4m3(q))
    for b in range(tops.shape[0]):
        steps[b] = decoded[scale[b]] * g


@_jit
def _spread(steps, width, wide):
    """Write each step `width` times."""
    if width == 16:
        for b in range(steps.shape[0]):
            step, block = steps[b], wide[16 * b : 16 * b + 16]
            for i in range(16):
                block[i] = step
    elif width == 32:
        for b in range(steps.shape[0]):
            step, block = steps[b], wide[32 * b : 32 * b + 32]
            for i in range(32):
                block[i] = step
    else:
        for b in range(steps.shape[0]):
            wide[b * width : (b + 1) * width] = steps[b]


@_jit
def _nvfp4_codes(w, shift, steps, codes):
    """Write E2M1 codes of `w` with a step each, whatever these are."""
    for i in range(w.shape[0]):
        value = _float(int32(int32(w[i]) << shift))
        mask = int32(0) if steps[i] == float32(0.0) else int32(7)
        sign = int32(8) if value < float32(0.0) else int32(0)
        codes[i] = uint8(int32(_e2m1(float32(value / steps[i])) & mask) | sign)


@_jit
def _boundary(step, midpoint):
    """Return the largest pattern of bf16 below fp64 step * midpoint, a product within its range."""
    return uint16((_bits64(step * midpoint) >> int64(45)) - int64((1023 - 127) << 7))


@_jit
def _nvfp4_bounds(steps, bounds):
    """Write the seven boundaries of each block to uint16 `bounds [7, blocks]`."""
    half = 2.0**-24  # half a unit in the last place of 1.0
    for b in range(steps.shape[0]):
        step = float64(steps[b])
        # Ties go to the even code: a midpoint itself belongs to the lower code of 0, 2, 4, 6.
        bounds[0, b] = _boundary(step, 0.25 * (1 + half))
        bounds[1, b] = _boundary(step, 0.75 - 0.5 * half)
        bounds[2, b] = _boundary(step, 1.25 + half)
        bounds[3, b] = _boundary(step, 1.75 - half)
        bounds[4, b] = _boundary(step, 2.5 + 2 * half)
        bounds[5, b] = _boundary(step, 3.5 - 2 * half)
        bounds[6, b] = _boundary(step, 5.0 + 4 * half)


@_jit
def _nvfp4_count(w, bounds, codes):
    """Write E2M1 codes of finite bf16 patterns `w`: how many boundaries lie below each."""
    for b in range(bounds.shape[1]):
        b0, b1, b2, b3 = bounds[0, b], bounds[1, b], bounds[2, b], bounds[3, b]
        b4, b5, b6 = bounds[4, b], bounds[5, b], bounds[6, b]
        block, into = w[16 * b : 16 * b + 16], codes[16 * b : 16 * b + 16]
        for i in range(16):
            m = block[i] & uint16(0x7FFF)
            code = uint16(m > b0) + uint16(m > b1) + uint16(m > b2) + uint16(m > b3)
            code += uint16(m > b4) + uint16(m > b5) + uint16(m > b6)
            sign = uint16(8) if block[i] > uint16(0x8000) else uint16(0)
            into[i] = uint8(code | sign)


@_jit
def _tops(w, mask, shift, halves, tops):
    """Write the fp32 patterns of the largest magnitudes of blocks of `w`: of 16 elements, or of 32
    where `halves` are five.
    """
    n = w.shape[0]
    a, b, c, d, e = halves
    _fold_magnitudes(w, mask, a[: n // 2])
    _fold(a, b[: n // 4])
    _fold(b, c[: n // 8])
    _fold(c, d[: n // 16])
    if tops.shape[0] == n // 16:
        _widen(d[: n // 16], shift, tops)
    else:
        _fold(d, e[: n // 32])
        _widen(e[: n // 32], shift, tops)


@_jit
def _nvfp4(w, mask, shift, g, decoded, packed, scale, scratch):
    """Quantize blocks `w [n * 16]`; shift is 16 for bf16 and 0 for fp32."""
    halves, tops, steps, bounds, wide, codes, pairs = scratch
    ordinary = shift == int32(16) and g > float32(2.0**-80) and g < float32(2.0**100)
    for start in range(0, w.shape[0], STRIP):
        strip = w[start : start + STRIP]
        n = strip.shape[0]
        blocks = n // 16
        top = tops[:blocks]
        _tops(strip, mask, shift, halves, top)
        found = scale[start // 16 : start // 16 + blocks]
        _nvfp4_scales(top, g, decoded, found, steps)
        if ordinary and top.max() < int32(0x7F800000):
            _nvfp4_bounds(steps[:blocks], bounds[:, :blocks])
            _nvfp4_count(strip, bounds[:, :blocks], codes)
        else:
            _spread(steps[:blocks], 16, wide)
            _nvfp4_codes(strip, shift, wide, codes)
        _pack(pairs, packed[start // 2 : start // 2 + n // 2])


@_jit
def nvfp4_groups(w, mask, shift, g, decoded, packed, scale, scratch):
    for group in range(w.shape[0]):
        _nvfp4(w[group], mask, shift, g[group], decoded, packed[group], scale[group], scratch)


@_jit
def _mx_scales(tops, rule, largest, emax, half, scale, steps):
    """Write scales of blocks with amax patterns `tops` and what to multiply by, see mx_scales."""
    for b in range(tops.shape[0]):
        bits = tops[b]
        if rule == int32(0):
            code = _e8m0_ceil(float32(_float(bits) / largest))
        else:
            up = int32(1) if rule == int32(2) and int32(bits & int32(0x7FFFFF)) else int32(0)
            raised = int32(bits + half) if rule == int32(3) else bits
            code = int32(int32(raised >> int32(23)) + up)
            code = max(int32(min(code, int32(255)) - emax), int32(0))
            code = int32(255) if bits > int32(0x7F800000) else code
        scale[b] = uint8(code)
        inverse = int32(int32(int32(254) - code) << int32(23))
        inverse = int32(0x400000) if code == int32(254) else inverse
        steps[b] = _float(int32(0x7FC00000) if code == int32(255) else inverse)


@_jit
def _mx_e4m3(w, shift, steps, codes):
    for b in range(steps.shape[0]):
        step = steps[b]
        block, into = w[32 * b : 32 * b + 32], codes[32 * b : 32 * b + 32]
        for i in range(32):
            into[i] = uint8(_e4m3(_float(int32(int32(block[i]) << shift)) * step))


@_jit
def _mx_e5m2(w, shift, steps, codes):
    for b in range(steps.shape[0]):
        step = steps[b]
        block, into = w[32 * b : 32 * b + 32], codes[32 * b : 32 * b + 32]
        for i in range(32):
            into[i] = uint8(_e5m2(_float(int32(int32(block[i]) << shift)) * step))


@_jit
def _mx_e2m1(w, shift, steps, codes):
    for b in range(steps.shape[0]):
        step = steps[b]
        block, into = w[32 * b : 32 * b + 32], codes[32 * b : 32 * b + 32]
        for i in range(32):
            value = _float(int32(int32(block[i]) << shift))
            sign = int32(8) if value < float32(0.0) else int32(0)
            into[i] = uint8(_e2m1(float32(value * step)) | sign)


@_jit
def mx(w, mask, shift, element, rule, numbers, data, scale, scratch):
    """Quantize blocks `w [n * 32]` to E4M3, E5M2 or E2M1, which are element 0, 1, 2."""
    halves, tops, steps, _, _, codes, pairs = scratch
    largest, emax, half = numbers
    for start in range(0, w.shape[0], STRIP):
        strip = w[start : start + STRIP]
        n = strip.shape[0]
        blocks = n // 32
        top, step = tops[:blocks], steps[:blocks]
        _tops(strip, mask, shift, halves, top)
        _mx_scales(top, rule, largest, emax, half, scale[start // 32 :], step)
        if element == int32(0):
            _mx_e4m3(strip, shift, step, data[start : start + n])
        elif element == int32(1):
            _mx_e5m2(strip, shift, step, data[start : start + n])
        else:
            _mx_e2m1(strip, shift, step, codes)
            _pack(pairs, data[start // 2 : start // 2 + n // 2])


@_jit
def _store(value, narrow):
    """Return the pattern of fp32 `value`: of bf16, rounded to nearest even, where narrow."""
    bits = _bits(value)
    if narrow:
        rounded = int32(bits + int32(0x7FFF) + int32(int32(bits >> int32(16)) & int32(1)))
        rounded = int32(rounded >> int32(16))
        nan = int32(bits & int32(0x7FFFFFFF)) > int32(0x7F800000)
        return int32(0x7FC0) if nan else rounded
    return bits


@_jit
def _decode_e4m3(code):
    """Return the fp32 value of an E4M3 code; a subnormal on the way would be slow."""
    a = int32(code & int32(0x7F))
    small = float32(a) * float32(2.0**-9)
    bits = int32(int32(a << int32(20)) + int32(120 << 23))
    bits = _bits(small) if a < int32(8) else bits
    bits = int32(0x7FC00000) if a == int32(0x7F) else bits
    return _float(int32(bits | int32(int32(code & int32(0x80)) << int32(24))))


@_jit
def _decode_e5m2(code):
    """Return the fp32 value of an E5M2 code."""
    a = int32(code & int32(0x7F))
    small = float32(a) * float32(2.0**-16)
    bits = int32(int32(a << int32(21)) + int32(112 << 23))
    bits = _bits(small) if a < int32(4) else bits
    # Inf, and NaN of whichever mantissa.
    bits = int32(int32(a << int32(21)) + int32(224 << 23)) if a >= int32(0x7C) else bits
    return _float(int32(bits | int32(int32(code & int32(0x80)) << int32(24))))


@_jit
def _decode_e2m1(code):
    """Return the fp32 value of an E2M1 code."""
    a = int32(code & int32(7))
    bits = int32(int32(a << int32(22)) + int32(126 << 23))
    bits = int32(a * int32(0x3F000000)) if a < int32(2) else bits
    return _float(int32(bits | int32(int32(code & int32(8)) << int32(28))))


@_jit
def _values(data, kind, steps, narrow, out):
    """Write patterns of values of E4M3, E5M2, E2M1, INT8 codes, kind 0 to 3, with a step each."""
    if kind == 0:
        for i in range(data.shape[0]):
            out[i] = _store(float32(_decode_e4m3(int32(data[i])) * steps[i]), narrow)
    elif kind == 1:
        for i in range(data.shape[0]):
            out[i] = _store(float32(_decode_e5m2(int32(data[i])) * steps[i]), narrow)
    elif kind == 2:
        for i in range(data.shape[0]):
            low, high = int32(data[i] & uint8(15)), int32(data[i] >> uint8(4))
            out[2 * i] = _store(float32(_decode_e2m1(low) * steps[2 * i]), narrow)
            out[2 * i + 1] = _store(float32(_decode_e2m1(high) * steps[2 * i + 1]), narrow)
    else:
        for i in range(data.shape[0]):
            out[i] = _store(float32(float32(int8(data[i])) * steps[i]), narrow)


@_jit
def dequantize(data, kind, steps, narrow, out, wide):
    """Write patterns of values `[groups, n]`; a step holds for an equal share of a group."""
    per_byte = 2 if kind == 2 else 1
    groups, blocks = steps.shape
    width = out.shape[1] // blocks
    at_once = max(1, STRIP // width)
    for group in range(groups):
        for block in range(0, blocks, at_once):
            chosen = steps[group, block : block + at_once]
            first, end = block * width, (block + chosen.shape[0]) * width
            _spread(chosen, min(width, STRIP), wide)
            for start in range(first, end, STRIP):
                stop = min(end, start + STRIP)
                codes = data[group, start // per_byte : stop // per_byte]
                _values(codes, kind, wide, narrow, out[group, start:stop])
