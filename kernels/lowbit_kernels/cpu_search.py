"""The loop of `cpu_numba` that searches the scales of NVFP4 as `nvfp4_search` does, compiled when
it is first called.
"""

from numba import float32, int32, int64  # pyright: ignore[reportMissingImports]

from lowbit_kernels.cpu_loops import BOUNDS, count_below, nvfp4_floats
from lowbit_kernels.cpu_rounding import (
    bits_of,
    decode_e2m1,
    e4m3_of,
    encode_e2m1,
    float_of,
    floats,
    top16,
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
    exponent = int32(bits_of(amax) >> int32(23))
    inverse = int32(int32(int32(254) - exponent) << int32(23))
    inverse = int32(0x400000) if exponent == int32(254) else inverse
    unit = float_of(int32(0x7FC00000) if exponent == int32(255) else inverse)
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
