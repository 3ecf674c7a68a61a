"""`error_figures` of values on the CPU, a piece that fits the cache at a time: the same bits as the
reference.

| numba | path |
|---|---|
| installed, LOWBIT_NUMBA not 0, the weight large | `cpu_sums`: one pass over both sides |
| else | torch, in place |

The order of the additions is the one that `error_figures` describes, whichever path is taken.
"""

import functools
import importlib
import os
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional

from lowbit_kernels.amax import FLOATING
from lowbit_kernels.rounding import tree_sum_of

BAND, HIGH, WIDE = 128, 16, 64
_COLS = 2048  # at once: nine buffers of 16 rows, 2.25 MiB of fp64
_LARGE = 262144  # elements that are worth the start of numba


@functools.cache
def _import_numba() -> ModuleType | None:
    try:
        return importlib.import_module("lowbit_kernels.cpu_sums")
    except (ImportError, OSError, RuntimeError):  # absent, or not for this numpy or processor
        return None


def _compiled(w: Tensor, v: Tensor) -> ModuleType | None:
    if w.numel() < _LARGE or os.environ.get("LOWBIT_NUMBA") == "0":
        return None
    if w.dtype not in FLOATING or v.dtype not in FLOATING:
        return None
    return _import_numba()


def figures(w: Tensor, v: Tensor) -> Tensor:
    """Return fp64 `[bands, 6]` of a weight `w` and values `v`, both `[rows, cols]` on the CPU and
    of any float dtype; steps are 0.
    """
    return _figures(w, v, 1)[0]


def figures_of_stack(w: Tensor, v: Tensor) -> Tensor:
    """Return fp64 `[n, bands, 6]`, the figures of each matrix of `w` and `v`, both `[n, rows,
    cols]`: of small matrices all at once, side by side in whole tiles.
    """
    wide = (0, -w.shape[-1] % WIDE)
    left, right = (functional.pad(x, wide).transpose(0, 1).flatten(1) for x in (w, v))
    return _figures(left, right, len(w))


def _figures(w: Tensor, v: Tensor, matrices: int) -> Tensor:
    """Return fp64 `[matrices, bands, 6]` of matrices that lie side by side."""
    bands, tiles = -(-w.shape[0] // BAND), -(-w.shape[1] // WIDE)
    sums = torch.empty(4, bands, tiles, WIDE, dtype=torch.float64)
    largest = torch.empty(bands, tiles * WIDE, dtype=torch.float64)
    found = torch.zeros(matrices, bands, 6, dtype=torch.float64)
    if not w.numel():
        return found
    loops = _compiled(w, v)
    if loops is not None:
        loops.columns(w, v, sums, largest)
    else:
        _columns(w, v, sums.flatten(-2), largest)
    own = tree_sum_of(sums).unflatten(-1, (matrices, tiles // matrices))
    fill = (1 << (tiles // matrices - 1).bit_length()) - tiles // matrices
    found[..., :4] = tree_sum_of(functional.pad(own, (0, fill))).permute(2, 1, 0)
    found[..., 4] = largest.unflatten(-1, (matrices, -1)).amax(-1).t()
    return found


def _columns(w: Tensor, v: Tensor, sums: Tensor, largest: Tensor) -> None:
    """Write the sums of each column of each band to `sums [4, bands, cols]`, and the largest
    |v - w|; columns are filled up to a multiple of 64.
    """
    for start in range(0, sums.shape[-1], _COLS):
        cols = slice(start, min(start + _COLS, sums.shape[-1]))
        scratch = torch.empty(5, HIGH, cols.stop - start, dtype=torch.float64).unbind()
        totals = torch.empty(4, HIGH, cols.stop - start, dtype=torch.float64)
        for band in range(sums.shape[1]):
            rows = slice(band * BAND, min((band + 1) * BAND, w.shape[0]))
            _add_groups(w[rows, cols], v[rows, cols], totals, *scratch)
            sums[:, band, cols] = tree_sum_of(totals.transpose(1, 2))
            largest[band, cols] = scratch[4].amax(0)


def _add_groups(
    w: Tensor, v: Tensor, totals: Tensor, x: Tensor, y: Tensor, d: Tensor, e: Tensor, most: Tensor
) -> None:
    """Add the terms of the groups of a band up in `totals [4, 16, cols]`, |v - w| in `most`; the
    others are scratch.
    """
    into = totals.unbind()
    for group, (left, right) in enumerate(zip(w.split(HIGH), v.split(HIGH), strict=True)):
        high, wide = left.shape
        if left.shape != x.shape:
            x.zero_()
            y.zero_()
        x[:high, :wide].copy_(left)
        y[:high, :wide].copy_(right)
        torch.sub(y, x, out=d)
        for total, (a, b) in zip(into, ((d, d), (x, x), (y, y), (x, y)), strict=True):
            if group:
                total.add_(torch.mul(a, b, out=e))
            else:
                torch.mul(a, b, out=total)
        if group:
            torch.maximum(most, d.abs_(), out=most)
        else:
            torch.abs(d, out=most)


__all__ = ["figures", "figures_of_stack"]
