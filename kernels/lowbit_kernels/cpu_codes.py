"""What `error_codes` sees, by loops that numba compiles: one pass over elements, values and codes.

Sixteen lanes at a time: q = fl(x / step) is rounded to a code again, and where that is the stored
one the element is in its interval, whichever it is; of the few others the interval is looked up.
Errors of a row are kept until its blocks are whole. Imported only where numba is to be used, since
that takes 0.5 s.
"""

import math

import torch
from numba import float32, float64, int32, int64, uint64  # pyright: ignore[reportMissingImports]
from torch import Tensor

from lowbit_kernels.cpu_code_lanes import (
    CLIPPED_AT,
    END,
    ZEROS_AT,
    e2m1_wide,
    e4m3_one,
    e4m3_wide,
    e5m2_one,
    e5m2_wide,
    int4_wide,
    int8_one,
    int8_wide,
    squares16,
    squares32,
    sum16,
)
from lowbit_kernels.cpu_rounding import float_of
from lowbit_kernels.cpu_vectors import jit
from lowbit_kernels.error_codes import BAND, BINS, Look, Ruler, Worst
from lowbit_kernels.formats import E2M1, E4M3, E5M2, INT4, INT8

KINDS = (E4M3, E5M2, INT8, E2M1, INT4)
LAST = 1.7976931348623157e308
# after the totals of cpu_code_lanes
OUTSIDE, FIRST, UNDERFLOW, LOST = range(END, END + 4)


@jit
def _hold(kind, w, shift, data, first, stop, step, largest, low, high, totals):
    """Hold elements to the intervals of their codes one by one."""
    for i in range(first, stop):
        q = float32(float_of(int32(int32(w[i]) << shift)) / step)
        code = int32(data[i]) if kind < 3 else int32(data[i >> 1]) >> int32((i & 1) * 4) & int32(15)
        if q >= low[code] and q <= high[code]:
            if abs(q) > largest:
                totals[CLIPPED_AT] += 1
        else:
            totals[OUTSIDE] += 1
            if totals[FIRST] < 0:
                totals[FIRST] = i


@jit
def _lost(w, shift, v, first, stop, errors, bins, to, totals):
    """Look at elements whose step is 0; say whether any of them is not 0."""
    filled = 0
    for i in range(first, stop):
        x, y = float_of(int32(int32(w[i]) << shift)), v[i]
        errors[to + i - first] = y - x
        bins[to + i - first] = BINS + 2
        if x != float32(0.0):
            filled += 1
            totals[ZEROS_AT] += int64(y == float32(0.0))
    totals[UNDERFLOW] += filled
    return filled > 0


@jit
def _row(kind, w, shift, v, data, start, end, own, wide, numbers, tables, errors, bins, totals):
    """Look at elements of a row whose steps are above 0. All of it is in one function, since a call
    for each block would take longer than its elements."""
    largest, unit = numbers
    low, high = tables
    if kind == 0:
        for b in range(own.shape[0]):
            first, stop = start + b * wide, min(start + b * wide + wide, end)
            step = own[b]
            body = first + (stop - first) // 16 * 16 if step != 0 else first
            for i in range(first, body, 16):
                at = i - start
                if e4m3_wide(w, v, data, i, step, largest, unit, errors, bins, at, totals):
                    _hold(kind, w, shift, data, i, i + 16, step, largest, low, high, totals)
            for i in range(body, stop if step != 0 else first):
                at = i - start
                if e4m3_one(w, v, data, i, step, largest, unit, errors, bins, at, totals):
                    _hold(kind, w, shift, data, i, i + 1, step, largest, low, high, totals)
    elif kind == 1:
        for b in range(own.shape[0]):
            first, stop = start + b * wide, min(start + b * wide + wide, end)
            step = own[b]
            body = first + (stop - first) // 16 * 16 if step != 0 else first
            for i in range(first, body, 16):
                at = i - start
                if e5m2_wide(w, v, data, i, step, largest, unit, errors, bins, at, totals):
                    _hold(kind, w, shift, data, i, i + 16, step, largest, low, high, totals)
            for i in range(body, stop if step != 0 else first):
                at = i - start
                if e5m2_one(w, v, data, i, step, largest, unit, errors, bins, at, totals):
                    _hold(kind, w, shift, data, i, i + 1, step, largest, low, high, totals)
    elif kind == 2:
        for b in range(own.shape[0]):
            first, stop = start + b * wide, min(start + b * wide + wide, end)
            step = own[b]
            body = first + (stop - first) // 16 * 16 if step != 0 else first
            for i in range(first, body, 16):
                at = i - start
                if int8_wide(w, v, data, i, step, largest, unit, errors, bins, at, totals):
                    _hold(kind, w, shift, data, i, i + 16, step, largest, low, high, totals)
            for i in range(body, stop if step != 0 else first):
                at = i - start
                if int8_one(w, v, data, i, step, largest, unit, errors, bins, at, totals):
                    _hold(kind, w, shift, data, i, i + 1, step, largest, low, high, totals)
    elif kind == 3:
        for b in range(own.shape[0]):
            first, stop = start + b * wide, min(start + b * wide + wide, end)
            step = own[b]
            for i in range(first, stop if step != 0 else first, 16):
                at = i - start
                if e2m1_wide(w, v, data, i, step, largest, unit, errors, bins, at, totals):
                    _hold(kind, w, shift, data, i, i + 16, step, largest, low, high, totals)
    else:
        for b in range(own.shape[0]):
            first, stop = start + b * wide, min(start + b * wide + wide, end)
            step = own[b]
            for i in range(first, stop if step != 0 else first, 16):
                at = i - start
                if int4_wide(w, v, data, i, step, largest, unit, errors, bins, at, totals):
                    _hold(kind, w, shift, data, i, i + 16, step, largest, low, high, totals)


@jit
def _tree(e, at, size, wide):
    """Sum `size` of `wide` numbers, the others 0, in place: the upper half onto the lower."""
    full = 16
    while full < wide:
        full *= 2
    for i in range(at + size, at + full):
        e[i] = float32(0.0)
    while full > 16:
        full //= 2
        for i in range(at, at + full):
            e[i] += e[i + full]
    return sum16(e, at)


@jit
def _sums(errors, cols, wide, sums, tall, row):
    """Write the sums of squares of the blocks of a row, over its columns."""
    across = -(-cols // wide)
    if wide == 16:
        for b in range(across):
            sums[b * tall + row] = squares16(errors, b * 16)
    elif wide == 32:
        for b in range(across):
            sums[b * tall + row] = squares32(errors, b * 32)
    else:
        for i in range(cols):
            errors[i] *= errors[i]
        for b in range(across):
            at = b * wide
            sums[b * tall + row] = _tree(errors, at, min(wide, cols - at), wide)


@jit
def _error(step, square):
    wide = float64(step if step != float32(0.0) else float32(1.0))
    error = wide * wide * float64(square)
    return min(error, LAST) if error == error else math.inf  # NaN is the worst


@jit
def _band(kind, w, shift, v, data, steps, shape, numbers, tables, scratch, first, stop, totals):
    """Look at rows `first` to `stop`, whole blocks; return the error and the place of the worst."""
    cols, tall, wide = shape
    errors, bins, sums, filled, counts = scratch
    across = -(-cols // wide)
    most, down, left = -1.0, int64(0), int64(0)
    for top in range(first, stop, tall):
        end = min(top + tall, stop)
        filled[:] = 0
        for row in range(top, end):
            own = steps[row if steps.shape[0] > 1 else 0]
            start, until = row * cols, row * cols + cols
            for b in range(across):
                if own[b] == float32(0.0):
                    at = start + b * wide
                    some = min(at + wide, until)
                    filled[b] |= _lost(w, shift, v, at, some, errors, bins, b * wide, totals)
            _row(
                kind,
                w,
                shift,
                v,
                data,
                start,
                until,
                own,
                wide,
                numbers,
                tables,
                errors,
                bins,
                totals,
            )
            for i in range(cols):
                counts[uint64(i & 15) * uint64(48) + uint64(bins[i])] += 1
            _sums(errors, cols, wide, sums, tall, row - top)
        own = steps[top if steps.shape[0] > 1 else 0]
        for b in range(across):
            square = sums[b]
            if tall > 1:
                square = _tree(sums, b * tall, end - top, tall)
            error = _error(own[b], square)
            totals[LOST] += int64(filled[b])
            if error > most:
                most, down, left = error, int64(top // tall), int64(b)
    return most, down, left


@jit
def _bands(kind, w, shift, v, data, steps, shape, numbers, tables, scratch, totals, worst, places):
    rows = w.shape[0] // shape[0]
    for band in range(worst.shape[0]):
        first, stop = band * BAND, min(rows, band * BAND + BAND)
        error, down, left = _band(
            kind, w, shift, v, data, steps, shape, numbers, tables, scratch, first, stop, totals
        )
        worst[band] = error
        places[band, 0], places[band, 1] = down, left


def look(
    w: Tensor, v: Tensor, data: Tensor, step: Tensor, ruler: Ruler, high: int, wide: int
) -> Look:
    """Look at elements as `error_codes.reference` does."""
    rows, cols = w.shape
    wide_bf16 = w.dtype == torch.bfloat16
    flat = w.contiguous().view(-1)
    flat = flat.view(torch.int16) if wide_bf16 else flat.float().view(torch.int32)
    across, bands = -(-cols // wide), -(-rows // BAND)
    room = cols + 2 * wide + 16
    scratch = (
        torch.empty(room),
        torch.empty(room, dtype=torch.int32).view(torch.uint32),
        torch.empty(across * high + 16 + high),
        torch.zeros(across, dtype=torch.bool),
        torch.zeros(16 * 48, dtype=torch.int64),
    )
    totals = torch.zeros(END + 4, dtype=torch.int64)
    totals[FIRST] = -1
    worst = torch.empty(bands, dtype=torch.float64)
    places = torch.empty(bands, 2, dtype=torch.int64)
    _bands(
        KINDS.index(ruler.element),
        flat.numpy(),
        int32(16 if wide_bf16 else 0),
        v.contiguous().view(-1).numpy(),
        data.contiguous().view(torch.uint8).view(-1).numpy(),
        step.contiguous().numpy(),
        (cols, high, wide),
        (float32(ruler.largest), float32(1 / ruler.half)),
        (ruler.low.numpy(), ruler.high.numpy()),
        tuple(one.numpy() for one in scratch),
        totals.numpy(),
        worst.numpy(),
        places.numpy(),
    )
    counts = scratch[4].reshape(16, 48).sum(0)[: BINS + 2]
    outside, first, underflow, lost = totals[END:].tolist()
    far, bias, zeros, clipped = totals[:END].reshape(4, 16).sum(1).tolist()
    found = zip(worst.tolist(), *places.t().tolist(), strict=True)
    return Look(
        outside,
        divmod(first, cols) if outside else None,
        clipped,
        underflow,
        zeros,
        lost,
        -(-rows // high) * across,
        far,
        bias,
        tuple(counts.tolist()),
        tuple(Worst(*one) for one in found),
    )


__all__ = ["look"]
