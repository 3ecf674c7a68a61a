"""The vectors of `cpu_codes`: what is seen of sixteen elements at once, or of one, and sums of
squares as trees.

A code is known to be right where q = fl(x / step), rounded to a code again, is that code; of a
sixteen with any other nothing is said of what was clipped, and the caller looks at each.
"""

from numba import float32, int32  # pyright: ignore[reportMissingImports]

from lowbit_kernels.cpu_rounding import (
    encode_e2m1,
    encode_e4m3,
    encode_e5m2,
    encode_int8,
    floats,
)
from lowbit_kernels.cpu_vectors import F32, F64, I8, I16, I32, I64, Lanes, Memory, vectors, where
from lowbit_kernels.error_codes import BINS, FAR, INWARD, UNIT

ROUND = 6755399441055744.0  # 1.5 * 2^52: what is added to it is rounded to a whole number
# int64 totals of a call, in lanes of sixteen
FAR_AT, BIAS_AT, ZEROS_AT, CLIPPED_AT, END = 0, 16, 32, 48, 64


def _codes_of_four(data: Memory, at: Lanes) -> Lanes:
    """Return 16 codes of elements from `at` on, in lanes of 32 bits."""
    pairs = data.load(at >> 1, 8).to(I16)
    return ((pairs | (pairs << 4)) & 0x0F0F).read_as(I8).to(I32)


def _again_e2m1(q: Lanes) -> Lanes:
    return encode_e2m1(q) | ((q.read_as(I32) >> 28) & 8)


def _again_int8(q: Lanes) -> Lanes:
    return encode_int8(q).to(I32)


def _again_int4(q: Lanes) -> Lanes:
    bits = q.read_as(I32)
    a = (bits & 0x7FFFFFFF).least(0x40E00000)  # 7.0
    rounded = (a.read_as(F32) + 8388608.0).read_as(I32) & 15
    return where((bits & 0x80000000).equals(0), rounded, rounded * -1) & 15


_AGAIN = (
    (lambda q: encode_e4m3(q).to(I32), 0x7F),
    (lambda q: encode_e5m2(q).to(I32), 0x7F),
    (_again_int8, 0xFF),
    (_again_e2m1, 7),
    (_again_int4, 15),
)


def _seen(kind: int, count: int):
    """Return a function that looks at `count` elements with one step, writes their errors in steps
    and their bins, adds to the totals, and says whether any may be outside."""
    again, magnitude = _AGAIN[kind]

    def write(
        w: Memory,
        v: Memory,
        data: Memory,
        at: Lanes,
        step: Lanes,
        largest: Lanes,
        unit: Lanes,
        errors: Memory,
        bins: Memory,
        to: Lanes,
        totals: Memory,
    ) -> Lanes:
        def all_lanes(one: Lanes) -> Lanes:
            return one.spread(count) if count > 1 else one

        x, y = floats(w, at, count), v.load(at, count)
        wide = all_lanes(step)
        q = x / wide
        code = _codes_of_four(data, at) if kind > 2 else data.load(at, count).to(I32)
        new = again(q)
        same = where(new.equals(code), 1, code & 0)
        zero = where(((new | code) & magnitude).equals(0), 1, code & 0)
        known = where(q.equals(q), same | zero, 0)
        strange = known ^ 1
        strange = strange.largest() if count > 1 else strange
        size = (q.read_as(I32) & 0x7FFFFFFF).read_as(F32)
        beyond = where(size.above(all_lanes(largest)), known & all_lanes(strange ^ 1), 0)
        none = where(y.equals(0.0), 1, code & 0)
        made = where(x.equals(0.0), code & 0, none)
        e = (y - x) / wide
        errors.store(to, e)
        t = e * all_lanes(unit)
        place = t * INWARD + float(BINS // 2 + 1)
        place = where(place.above(0.0), place, 0.0)
        place = where(place.above(float(BINS + 1)), float(BINS + 1), place)
        bins.store(to, place.truncated_to(I32))
        t = where(t.equals(t), t, 0.0)
        t = where(t.above(float(FAR)), float(FAR), t)
        t = where((t * -1.0).above(float(FAR)), float(-FAR), t)
        n = ((t * float(UNIT)).to(F64) + ROUND).read_as(I64) - 0x4338000000000000
        size = where(n.above(0), n, n * -1)
        for first, term in (
            (FAR_AT, size),
            (BIAS_AT, n),
            (ZEROS_AT, made.to(I64)),
            (CLIPPED_AT, beyond.to(I64)),
        ):
            into = (at & 0) + first
            totals.store(into, totals.load(into, count) + term)
        return strange

    return vectors(write, int32)


e4m3_wide, e4m3_one = _seen(0, 16), _seen(0, 1)
e5m2_wide, e5m2_one = _seen(1, 16), _seen(1, 1)
int8_wide, int8_one = _seen(2, 16), _seen(2, 1)
e2m1_wide, int4_wide = _seen(3, 16), _seen(4, 16)  # whose blocks are whole sixteens


def _halves(e: Lanes) -> Lanes:
    for half in (8, 4, 2, 1):
        e = e.chosen([*range(half)]) + e.chosen([*range(half, 2 * half)])
    return e


def _squares_of_16(e: Memory, at: Lanes) -> Lanes:
    x = e.load(at, 16)
    return _halves(x * x)


def _squares_of_32(e: Memory, at: Lanes) -> Lanes:
    x, y = e.load(at, 16), e.load(at + 16, 16)
    return _halves(x * x + y * y)


sum16 = vectors(lambda e, at: _halves(e.load(at, 16)), float32)
squares16, squares32 = (vectors(one, float32) for one in (_squares_of_16, _squares_of_32))
