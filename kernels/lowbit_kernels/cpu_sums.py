"""The sums of `cpu_figures` by a loop that numba compiles: the same bits as by torch.

Additions across a tile's columns and rows are independent of each other: the vectors take 16
columns of a row in each of the eight groups, in the order that `error_figures` describes, so that
each element is read once, along rows. Bands are shared out among torch.get_num_threads() threads.
Imported only where numba is to be used, since that takes 0.5 s.
"""

from concurrent.futures import ThreadPoolExecutor

import torch
from numba import float64, int32, int64  # pyright: ignore[reportMissingImports]
from torch import Tensor

from lowbit_kernels.cpu_rounding import float_of, floats
from lowbit_kernels.cpu_vectors import F64, I64, Lanes, Memory, jit, vectors

WIDE = 512  # columns at once; a total of each for 16 rows takes 64 KiB

_double = vectors(lambda x: x.read_as(F64), float64)
_bits = vectors(lambda x: x.read_as(I64), int64)


@vectors
def _add_groups(
    w: Memory, v: Memory, at: Lanes, apart: Lanes, totals: Memory, most: Memory, to: Lanes
) -> None:
    """Write the totals of 16 columns of eight rows that lie `apart`, and the largest |v - w|."""
    sums, top = None, None
    for group in range(8):
        place = at + apart * group
        x, y = floats(w, place, 16).to(F64), v.load(place, 16).to(F64)
        d = y - x
        terms = (d * d, x * x, y * y, x * y)
        size = d.read_as(I64) & 0x7FFFFFFFFFFFFFFF
        sums = terms if sums is None else [a + b for a, b in zip(sums, terms, strict=True)]
        top = size if top is None else top.most(size)
    if sums is None or top is None:
        return
    for kind, total in enumerate(sums):
        totals.store(to + 16 * WIDE * kind, total)
    most.store(to, top)


@jit
def _whole_tiles(w, v, cols, band, first, width, sums, largest, totals, most):
    """Sum `width` columns from `first` of a band that has all of its rows."""
    for row in range(16):
        start = (band * 128 + row) * cols + first
        for column in range(0, width, 16):
            to = row * WIDE + column
            _add_groups(w, v, start + column, 16 * cols, totals, most, to)
    half = 8 * WIDE
    while half >= WIDE:
        for kind in range(4):
            place = kind * 16 * WIDE
            for i in range(half):
                totals[place + i] += totals[place + i + half]
        for i in range(half):
            most[i] = max(most[i], most[i + half])
        half //= 2
    for column in range(width):
        for kind in range(4):
            tile = (first + column) // 64
            sums[kind, band, tile, (first + column) % 64] = totals[kind * 16 * WIDE + column]
        largest[band, first + column] = _double(most[column])


@jit
def _add(w, shift, v, totals, most, place):
    """Add the terms of 64 elements of a row to four totals of 16 rows, 1,024 apart, and raise the
    patterns in `most` to those of |v - w|, NaN above all.
    """
    for i in range(64):
        x = float64(float_of(int32(int32(w[i]) << shift)))
        y = float64(v[i])
        d = y - x
        totals[place + i] += d * d
        totals[place + i + 1024] += x * x
        totals[place + i + 2048] += y * y
        totals[place + i + 3072] += x * y
        most[place + i] = max(most[place + i], _bits(d) & int64(0x7FFFFFFFFFFFFFFF))


@jit
def _fold(totals, most):
    """Add the lower rows of the four totals onto the upper until one row is left of each."""
    half = 512
    while half >= 64:
        for kind in range(0, 4096, 1024):
            for i in range(half):
                totals[kind + i] += totals[kind + i + half]
        for i in range(half):
            most[i] = max(most[i], most[i + half])
        half //= 2


@jit
def _ragged_tile(w, shift, v, cols, band, tile, sums, largest, totals, most, left, right):
    """Sum a tile that may lack rows and columns; the last four are scratch."""
    rows = w.shape[0] // cols
    width = min(64, cols - tile * 64)
    totals[:4096] = 0.0
    most[:1024] = 0
    left[width:] = 0
    right[width:] = 0
    for row in range(band * 128, min(rows, band * 128 + 128)):
        start = row * cols + tile * 64
        for i in range(width):
            left[i], right[i] = w[start + i], v[start + i]
        _add(left, shift, right, totals, most, row % 16 * 64)
    _fold(totals, most)
    for i in range(64):
        for kind in range(4):
            sums[kind, band, tile, i] = totals[kind * 1024 + i]
        largest[band, tile * 64 + i] = _double(most[i])


@jit
def _bands(w, shift, v, cols, first, stop, sums, largest, totals, most, left, right):
    """Sum the tiles of bands `first` to `stop` of flat `w` and `v`, up to a sum for each column."""
    rows = w.shape[0] // cols
    for band in range(first, stop):
        whole = cols - cols % 64 if rows - band * 128 >= 128 else 0
        for column in range(0, whole, WIDE):
            width = min(WIDE, whole - column)
            _whole_tiles(w, v, cols, band, column, width, sums, largest, totals, most)
        for tile in range(whole // 64, sums.shape[2]):
            _ragged_tile(w, shift, v, cols, band, tile, sums, largest, totals, most, left, right)


def columns(w: Tensor, v: Tensor, sums: Tensor, largest: Tensor) -> None:
    """Write the sums of each column of each band to `sums [4, bands, tiles, 64]`, and the largest
    |v - w|.
    """
    shift = 16 if w.dtype == torch.bfloat16 else 0
    flat = w.reshape(-1)
    flat = flat.view(torch.int16) if shift else flat.float().view(torch.int32)
    arrays = flat.numpy(), int32(shift), v.float().reshape(-1).numpy(), w.shape[1]
    bands = sums.shape[1]
    threads = min(torch.get_num_threads(), bands)
    share = -(-bands // threads)

    def run(first: int) -> None:
        scratch = (
            torch.zeros(4 * 16 * WIDE, dtype=torch.float64),
            torch.zeros(16 * WIDE, dtype=torch.int64),
            torch.zeros(64, dtype=flat.dtype),  # of the last columns
            torch.zeros(64),
        )
        outs = [out.numpy() for out in (sums, largest, *scratch)]
        _bands(*arrays, first, min(bands, first + share), *outs)

    if threads == 1:
        run(0)
        return
    with ThreadPoolExecutor(threads, "lowbit-cpu") as pool:
        for _ in pool.map(run, range(0, bands, share)):
            pass
