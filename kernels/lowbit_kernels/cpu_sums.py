"""The sums of `cpu_figures` by a loop that numba compiles: the same bits as by torch.

Additions across a tile's columns and rows are independent of each other, so that the compiler makes
vector instructions of them in the order that `error_figures` describes; nothing is reordered.
Imported only where numba is to be used, since that takes 0.5 s.
"""

from collections.abc import Callable
from typing import Any

import numba  # pyright: ignore[reportMissingImports]
import torch
from numba import float32, float64, int32, int64  # pyright: ignore[reportMissingImports]
from numba.extending import intrinsic  # pyright: ignore[reportMissingImports]
from torch import Tensor


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


_float = _bitcast(float32, int32)
_double = _bitcast(float64, int64)
_bits = _bitcast(int64, float64)


@_jit
def _add(w, shift, v, totals, most, place):
    """Add the terms of 64 elements of a row to four totals of 16 rows, 1,024 apart, and raise the
    patterns in `most` to those of |v - w|, NaN above all.
    """
    for i in range(64):
        x = float64(_float(int32(int32(w[i]) << shift)))
        y = float64(v[i])
        d = y - x
        totals[place + i] += d * d
        totals[place + i + 1024] += x * x
        totals[place + i + 2048] += y * y
        totals[place + i + 3072] += x * y
        most[place + i] = max(most[place + i], _bits(d) & int64(0x7FFFFFFFFFFFFFFF))


@_jit
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


@_jit
def _columns(w, shift, v, cols, sums, largest, totals, most, left, right):
    """Sum tiles of 128 rows and 64 columns of flat `w` and `v`, up to a sum for each column; the
    last four are scratch, and zero.
    """
    rows = w.shape[0] // cols
    for band in range(sums.shape[1]):
        for tile in range(sums.shape[2]):
            width = min(64, cols - tile * 64)
            totals[:] = 0.0
            most[:] = 0
            for row in range(band * 128, min(rows, band * 128 + 128)):
                start, place = row * cols + tile * 64, row % 16 * 64
                if width == 64:
                    stop = start + 64
                    _add(w[start:stop], shift, v[start:stop], totals, most, place)
                else:
                    for i in range(width):
                        left[i], right[i] = w[start + i], v[start + i]
                    _add(left, shift, right, totals, most, place)
            _fold(totals, most)
            for i in range(64):
                for kind in range(4):
                    sums[kind, band, tile, i] = totals[kind * 1024 + i]
                largest[band, tile * 64 + i] = _double(most[i])


def columns(w: Tensor, v: Tensor, sums: Tensor, largest: Tensor) -> None:
    """Write the sums of each column of each band to `sums [4, bands, tiles, 64]`, and the largest
    |v - w|.
    """
    shift = 16 if w.dtype == torch.bfloat16 else 0
    flat = w.reshape(-1)
    flat = flat.view(torch.int16) if shift else flat.float().view(torch.int32)
    values = v.float().reshape(-1).numpy()
    scratch = (
        torch.empty(4096, dtype=torch.float64),
        torch.empty(1024, dtype=torch.int64),
        torch.zeros(64, dtype=flat.dtype),  # of the last columns
        torch.zeros(64),
    )
    outs = [out.numpy() for out in (sums, largest, *scratch)]
    _columns(flat.numpy(), int32(shift), values, w.shape[1], *outs)
