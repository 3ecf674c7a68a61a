"""The loops of `cpu_numba` for tables, amax, and FP8 and INT8 with scales of rows and of blocks,
compiled when they are first called.
"""

from numba import float32, int32, uint8  # pyright: ignore[reportMissingImports]

from lowbit_kernels.cpu_rounding import (
    e4m3_of,
    e4m3_times,
    e8m0_ceil,
    encode_e4m3,
    encode_int8,
    float_of,
    floats,
    top128,
)
from lowbit_kernels.cpu_vectors import Lanes, Memory, jit, vectors


def _over(w: Memory, at: Lanes, step: Lanes) -> Lanes:
    return floats(w, at, 16) / step.spread(16)


@vectors
def _e4m3_over(w: Memory, at: Lanes, step: Lanes, out: Memory, to: Lanes):
    out.store(to, encode_e4m3(_over(w, at, step)))


@vectors
def _int8_over(w: Memory, at: Lanes, step: Lanes, out: Memory, to: Lanes):
    out.store(to, encode_int8(_over(w, at, step)))


_int8_of = vectors(lambda x: encode_int8(x), uint8)


@jit
def _pattern(value, shift):
    """Return the pattern of an element, int16 or int32, as that of an fp32 number."""
    return int32(int32(value) << shift)


@jit
def look_up(index, table, out):
    for i in range(out.shape[0]):
        out[i] = table[index[i]]


@jit
def cast_groups(w, shift, scale, out):
    """Write e4m3(w / scale) of groups with a scale each."""
    for group in range(w.shape[0]):
        row, into, step = w[group], out[group], scale[group]
        n = row.shape[0]
        for i in range(0, n - 15, 16):
            _e4m3_over(row, i, step, into, i)
        for i in range(n - n % 16, n):
            into[i] = e4m3_of(float_of(_pattern(row[i], shift)) / step)


@jit
def int8_groups(w, shift, scale, out):
    """Write INT8 codes of w / scale of groups with a scale each."""
    for group in range(w.shape[0]):
        row, into, step = w[group], out[group], scale[group]
        n = row.shape[0]
        for i in range(0, n - 15, 16):
            _int8_over(row, i, step, into, i)
        for i in range(n - n % 16, n):
            into[i] = _int8_of(float_of(_pattern(row[i], shift)) / step)


@jit
def largest(row, mask):
    """Return the largest pattern without sign of a row."""
    n = row.shape[0]
    top = int32(0)
    for i in range(0, n - 127, 128):
        top = max(top, top128(row, i))
    for i in range(n - n % 128, n):
        top = max(top, int32(int32(row[i]) & mask))
    return top


@jit
def tops_of_groups(w, mask, tops):
    for group in range(w.shape[0]):
        tops[group] = largest(w[group], mask)


@jit
def _block_scale(top, rule):
    """Return the scale of an FP8 block by its amax, see fp8_block.scale_of."""
    scale = float32((float32(1e-4) if top < float32(1e-4) else top) / float32(448.0))
    if rule == int32(1):
        code = max(e8m0_ceil(scale), int32(1))
        scale = float_of(int32(0x7FC00000) if code == int32(255) else int32(code << int32(23)))
    return scale


@jit
def fp8_blocks(w, shift, mask, rows, cols, high, rule, data, scale):
    """Quantize `w [rows * cols]` by blocks of `high` x 128, with scales `[n, across]`."""
    across = (cols + 127) // 128
    for block_row in range(scale.shape[0]):
        top_row = block_row * high
        end = min(rows, top_row + high)
        for block in range(across):
            left = block * 128
            right = min(cols, left + 128)
            top = int32(0)
            for row in range(top_row, end):
                top = max(top, largest(w[row * cols + left : row * cols + right], mask))
            step = _block_scale(float_of(int32(top << shift)), rule)
            scale[block_row, block] = step
            inverse = float32(float32(1.0) / step)
            for row in range(top_row, end):
                first, stop = row * cols + left, row * cols + right
                for i in range(first, stop - 15, 16):
                    e4m3_times(w, i, inverse, data, i)
                for i in range(stop - (stop - first) % 16, stop):
                    data[i] = e4m3_of(float_of(_pattern(w[i], shift)) * inverse)
