"""The loops of `cpu_numba` that quantize, compiled when they are first called.

Rounding is that of `rounding`, in integers. Loops run over strips that fit the first cache, in
three passes: amax of each block, scales, codes.

E2M1 codes of bf16 and fp16 take no arithmetic with an element. For a given step the code of a
magnitude only grows with its pattern, an integer of 15 bits, so seven patterns bound the eight
codes: a code is the number of bounds below the pattern. `bounds_of` finds them by bisection, with
the division and the rounding of the reference, for each scale there is: exact whatever the step,
zero, Inf and NaN included.
"""

from numba import float32, int32, int64, uint8  # pyright: ignore[reportMissingImports]

from lowbit_kernels.cpu_rounding import (
    bits_of,
    e4m3_of,
    e4m3_times,
    e8m0_ceil,
    encode_e2m1,
    encode_e5m2,
    float_of,
    floats,
    half_floats,
    pack_sixteen,
    times,
    top16,
    top32,
)
from lowbit_kernels.cpu_vectors import F32, I16, I32, Lanes, Memory, jit, vectors, where

STRIP = 4096  # elements; a multiple of 32
BOUNDS = 7 * 16  # of a scale: seven patterns, each in sixteen lanes
HALF = 13  # the shift of fp16, which is not all that makes fp32 of it


@vectors
def count_below(
    w: Memory, at: Lanes, bounds: Memory, row: Lanes, limit: Lanes, out: Memory, to: Lanes
):
    """Write packed E2M1 codes of 16 patterns of 16 bits: how many bounds lie below each."""
    x = w.load(at, 16)
    if x.one == I32:
        return  # fp32 takes the other branch
    m = x & 0x7FFF
    codes = x & 0
    for k in range(7):
        codes = codes + m.above(bounds.load(row + 16 * k, 16)).to(I16)
    # Those from just below -0 to -Inf, whose pattern lies `limit` above: not NaN.
    negative = (x + 0x7FFF).below_unsigned(limit.spread(16))
    out.store(to, pack_sixteen(codes | where(negative, 8, x & 0)))


@vectors
def nvfp4_floats(w: Memory, at: Lanes, step: Lanes, out: Memory, to: Lanes):
    """Write packed E2M1 codes of 16 elements, whatever the step is."""
    x = floats(w, at, 16)
    wide = step.spread(16)
    codes = where(wide.equals(0.0), 0, encode_e2m1(x / wide))
    out.store(to, pack_sixteen((codes | where((x * -1.0).above(0.0), 8, codes & 0)).to(I16)))


@vectors
def mx_floats(w: Memory, at: Lanes, step: Lanes, out: Memory, to: Lanes):
    """Write packed E2M1 codes of 16 elements times a step."""
    x = floats(w, at, 16)
    codes = encode_e2m1(x * step.spread(16))
    out.store(to, pack_sixteen((codes | where((x * -1.0).above(0.0), 8, codes & 0)).to(I16)))


def _times(w: Memory, at: Lanes, step: Lanes) -> Lanes:
    return floats(w, at, 16) * step.spread(16)


@vectors
def _e5m2_times(w: Memory, at: Lanes, step: Lanes, out: Memory, to: Lanes):
    out.store(to, encode_e5m2(times(w, at, step)))


def _bisect(to_floats):
    """Return a function that writes for 16 steps the largest pattern with a code of at most k."""

    def write(steps: Memory, at: Lanes, k: Lanes, divide: Lanes, out: Memory, to: Lanes) -> None:
        step = steps.load(at, 16)
        low, high = step.read_as(I32) * 0 + -1, step.read_as(I32) * 0 + 0x8000
        for _ in range(16):
            middle = (low + high) >> 1
            x = to_floats(middle)
            by_division = where(step.equals(0.0), 0, encode_e2m1(x / step))
            code = where(divide.spread(16).above(0), by_division, encode_e2m1(x * step))
            above = code.above(k.spread(16))
            low, high = where(above, low, middle), where(above, middle, high)
        out.store(to, low.to(I16))

    return vectors(write)


# low stays below high, from -1 and 32768: sixteen halves leave them neighbours.
_bisect_bf16 = _bisect(lambda pattern: (pattern << 16).read_as(F32))
_bisect_half = _bisect(half_floats)


_half = vectors(lambda x: half_floats(x), float32)


@jit
def _magnitude(pattern, shift):
    """Return fp32 of the pattern of a magnitude: of bf16 by shift 16, fp32 by 0, fp16 by HALF."""
    return _half(pattern) if shift == HALF else float_of(int32(pattern << shift))


@jit
def _tops_by_16(w, shift, tops):
    """Write the largest magnitudes of blocks, in fp32."""
    for b in range(tops.shape[0]):
        tops[b] = _magnitude(top16(w, 16 * b), shift)


@jit
def _tops_by_32(w, shift, tops):
    for b in range(tops.shape[0]):
        tops[b] = _magnitude(top32(w, 32 * b), shift)


@jit
def bounds_of(steps, shift, divide, bounds):
    """Write the seven bounds of each of `steps`, by which magnitudes are divided, or multiplied."""
    found = bounds[: 7 * steps.shape[0]].copy()
    for c in range(0, steps.shape[0], 16):
        for k in range(7):
            at = 7 * c + 16 * k
            if shift == HALF:
                _bisect_half(steps, c, int32(k), int32(divide), found, at)
            else:
                _bisect_bf16(steps, c, int32(k), int32(divide), found, at)
    for c in range(steps.shape[0]):
        for k in range(7):
            low = found[7 * (c - c % 16) + 16 * k + c % 16]
            for lane in range(16):
                bounds[c * BOUNDS + k * 16 + lane] = low


@jit
def _nvfp4_scales(tops, g, scale):
    """Write scales of blocks with largest magnitudes `tops`, see nvfp4.scales_of."""
    g6 = float32(g * float32(6.0))
    for b in range(tops.shape[0]):
        q = float32(tops[b] / g6)
        q = float32(1.0) if q == float32(0.0) else q
        q = float32(2.0**-9) if q < float32(2.0**-9) else q
        scale[b] = e4m3_of(q)


@jit
def nvfp4_groups(w, shift, limit, g, decoded, bounds, packed, scale, tops):
    """Quantize groups of blocks: those of 16 bits by `bounds`, fp32 by division."""
    for group in range(w.shape[0]):
        x, into, scales, shared = w[group], packed[group], scale[group], g[group]
        own = bounds[group]
        for first in range(0, scales.shape[0], STRIP // 16):
            found = scales[first : first + STRIP // 16]
            top = tops[: found.shape[0]]
            _tops_by_16(x[16 * first :], shift, top)
            _nvfp4_scales(top, shared, found)
            if own.shape[0] > 1:
                for b in range(found.shape[0]):
                    at = 16 * (first + b)
                    count_below(x, at, own, int64(found[b]) * BOUNDS, limit, into, at >> 1)
            else:
                for b in range(found.shape[0]):
                    at = 16 * (first + b)
                    nvfp4_floats(x, at, decoded[found[b]] * shared, into, at >> 1)


@jit
def _mx_scales(tops, rule, largest, emax, half, scale, steps):
    """Write scales of blocks with largest magnitudes `tops`, and what to multiply by."""
    for b in range(tops.shape[0]):
        bits = bits_of(tops[b])
        if rule == int32(0):
            code = e8m0_ceil(float32(tops[b] / largest))
        else:
            up = int32(1) if rule == int32(2) and int32(bits & int32(0x7FFFFF)) else int32(0)
            raised = int32(bits + half) if rule == int32(3) else bits
            code = int32(int32(raised >> int32(23)) + up)
            code = max(int32(min(code, int32(255)) - emax), int32(0))
            code = int32(255) if bits > int32(0x7F800000) else code
        scale[b] = uint8(code)
        inverse = int32(int32(int32(254) - code) << int32(23))
        inverse = int32(0x400000) if code == int32(254) else inverse
        steps[b] = float_of(int32(0x7FC00000) if code == int32(255) else inverse)


@jit
def mx(w, shift, limit, element, rule, limits, bounds, data, scale, tops, steps):
    """Quantize blocks `w [n * 32]` to E4M3, E5M2 or E2M1, which are element 0, 1, 2."""
    top_value, emax, half = limits
    for first in range(0, scale.shape[0], STRIP // 32):
        found = scale[first : first + STRIP // 32]
        top, step = tops[: found.shape[0]], steps[: found.shape[0]]
        _tops_by_32(w[32 * first :], shift, top)
        _mx_scales(top, rule, top_value, emax, half, found, step)
        if element == int32(0):
            for b in range(found.shape[0]):
                at = 32 * (first + b)
                e4m3_times(w, at, step[b], data, at)
                e4m3_times(w, at + 16, step[b], data, at + 16)
        elif element == int32(1):
            for b in range(found.shape[0]):
                at = 32 * (first + b)
                _e5m2_times(w, at, step[b], data, at)
                _e5m2_times(w, at + 16, step[b], data, at + 16)
        elif bounds.shape[0] > 1:
            for b in range(found.shape[0]):
                at, row = 32 * (first + b), int64(found[b]) * BOUNDS
                count_below(w, at, bounds, row, limit, data, at >> 1)
                count_below(w, at + 16, bounds, row, limit, data, (at >> 1) + 8)
        else:
            for b in range(found.shape[0]):
                at = 32 * (first + b)
                mx_floats(w, at, step[b], data, at >> 1)
                mx_floats(w, at + 16, step[b], data, (at >> 1) + 8)
