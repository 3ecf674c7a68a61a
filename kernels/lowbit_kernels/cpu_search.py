"""The loops of `cpu_numba` that search scales: of NVFP4 as `nvfp4_search` does, of MXFP4 as `mx`
does; compiled when they are first called.
"""

from numba import float32, int32, int64, uint8  # pyright: ignore[reportMissingImports]

from lowbit_kernels.cpu_loops import BOUNDS, count_below, mx_floats, nvfp4_floats
from lowbit_kernels.cpu_rounding import (
    bits_of,
    decode_e2m1,
    e4m3_of,
    e8m0_ceil,
    encode_e2m1,
    float_of,
    floats,
    top16,
    top32,
)
from lowbit_kernels.cpu_vectors import F32, I32, Lanes, Memory, jit, vectors, where


def _block_error(
    w: Memory, at: Lanes, step: Lanes, divisor: Lanes, unit: Lanes, h: Memory, column: Lanes
) -> Lanes:
    """Return the sum of squared errors of 16 elements, see nvfp4_search._error."""
    a = (floats(w, at, 16).read_as(I32) & 0x7FFFFFFF).read_as(F32)
    wide = divisor.spread(16)
    codes = where(wide.equals(0.0), 0, encode_e2m1(a / wide))
    d = (decode_e2m1(codes) * step.spread(16) - a) * unit.spread(16)
    e = d * d * h.load(column, 16)
    for half in (8, 4, 2, 1):
        e = e.chosen([*range(half)]) + e.chosen([*range(half, 2 * half)])
    return e


_error = vectors(_block_error, float32)


@jit
def _inverse(code):
    """Return what an E8M0 code's scale divides by, see rounding.e8m0_reciprocal."""
    inverse = int32(int32(int32(254) - code) << int32(23))
    inverse = int32(0x400000) if code == int32(254) else inverse
    return float_of(int32(0x7FC00000) if code == int32(255) else inverse)


@jit
def _best(w, at, amax, g, decoded, radius, h, column):
    """Return the best E4M3 code of a block, see nvfp4_search.best_codes_of."""
    q = float32(amax / float32(g * float32(6.0)))
    q = float32(1.0) if q == float32(0.0) else q
    first = int32(e4m3_of(float32(2.0**-9) if q < float32(2.0**-9) else q))
    if radius == 0:
        best, least = int32(127) if first == int32(127) else int32(1), float32(float("inf"))
        for code in range(1, 127):
            step = float32(decoded[code] * g)
            divisor = float32(1.0) if step < float32(1e-5) else step
            error = _error(w, at, step, divisor, float32(1.0), h, column)
            if error < least:
                best, least = int32(code), error
        return int32(126) if float32(decoded[best] * g) == float32(0.0) else best
    unit = _inverse(int32(bits_of(amax) >> int32(23)))
    step = float32(decoded[first] * g)
    best, least = first, _error(w, at, step, step, unit, h, column)
    for code in range(max(1, first - radius), min(126, first + radius) + 1):
        if code != first:
            step = float32(decoded[code] * g)
            error = _error(w, at, step, step, unit, h, column)
            if error < least:
                best, least = int32(code), error
    return best


@jit
def nvfp4_groups(w, shift, limit, g, decoded, bounds, radius, h, packed, scale):
    """Quantize groups of blocks with the best scales; `h` holds the weights of columns."""
    for group in range(w.shape[0]):
        x, into, scales, shared = w[group], packed[group], scale[group], g[group]
        own = bounds[group]
        for b in range(scales.shape[0]):
            at = 16 * b
            amax = float_of(int32(top16(x, at) << shift))
            column = at % h.shape[0]
            best = _best(x, at, amax, shared, decoded, radius, h, column)
            scales[b] = best
            if own.shape[0] > 1:
                count_below(x, at, own, int64(best) * BOUNDS, limit, into, at >> 1)
            else:
                nvfp4_floats(x, at, float32(decoded[best] * shared), into, at >> 1)


def _pair_error(
    w: Memory, at: Lanes, unit: Lanes, up: Lanes, down: Lanes, h: Memory, column: Lanes
) -> Lanes:
    """Return the sum of squared errors of 32 elements, see mx._best_of_three."""
    halves = []
    for start in (0, 16):
        y = (floats(w, at + start, 16).read_as(I32) & 0x7FFFFFFF).read_as(F32) * unit.spread(16)
        codes = encode_e2m1(y * up.spread(16))
        d = decode_e2m1(codes) * down.spread(16) - y
        halves.append(d * d * h.load(column + start, 16))
    e = halves[0] + halves[1]
    for half in (8, 4, 2, 1):
        e = e.chosen([*range(half)]) + e.chosen([*range(half, 2 * half)])
    return e


_error_of_32 = vectors(_pair_error, float32)


@jit
def mxfp4(w, shift, limit, bounds, h, data, scale):
    """Quantize blocks `w [n * 32]` to E2M1 with the best scales; `h` weighs the columns."""
    for b in range(scale.shape[0]):
        at = 32 * b
        first = int32(e8m0_ceil(float32(float_of(int32(top32(w, at) << shift)) / float32(6.0))))
        unit, column = _inverse(first), at % h.shape[0]
        best, least = first, _error_of_32(w, at, unit, float32(1.0), float32(1.0), h, column)
        if first > int32(0):
            error = _error_of_32(w, at, unit, float32(2.0), float32(0.5), h, column)
            if error < least:
                best, least = int32(first - int32(1)), error
        if first < int32(254):
            error = _error_of_32(w, at, unit, float32(0.5), float32(2.0), h, column)
            if error < least:
                best, least = int32(first + int32(1)), error
        scale[b] = uint8(best)
        if bounds.shape[0] > 1:
            row = int64(best) * BOUNDS
            count_below(w, at, bounds, row, limit, data, at >> 1)
            count_below(w, at + 16, bounds, row, limit, data, (at >> 1) + 8)
        else:
            mx_floats(w, at, _inverse(best), data, at >> 1)
            mx_floats(w, at + 16, _inverse(best), data, (at >> 1) + 8)
