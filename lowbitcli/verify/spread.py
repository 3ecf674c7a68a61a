"""How the errors of a quantized weight are spread: over the gaps of its grid, its blocks, its
scales.

    step = fl(scale * global_scale)      e = fl((v - x) / step)
    half = half of the widest gap between neighbours of the grid: the largest error of rounding
    histogram: e / half in 32 equal bins from -1 to 1, and a bin on either side
    mean = half sum |e / half| / n      bias = half sum (e / half) / n      (in steps)
    error of a block = step sqrt(sum e^2)      its relative error = sqrt(sum e^2 / sum (x / step)^2)

| element | widest gap | half |
|---|---|---|
| E2M1 | 4 to 6 | 1 |
| E4M3 | 416 to 448 | 16 |
| E5M2 | 49152 to 57344 | 4096 |
| INT8, INT4 | everywhere | 0.5 |

Where a scale is for whole rows or for the matrix, a row is looked at as a block. Elements whose
step is 0 are in no bin; their error is their own magnitude. What is counted and added is whole
numbers (e / half in units of 2^-20) and blocks are summed in a fixed order, so that nothing depends
on how the rows were cut, as long as no block is.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from lowbit_kernels import rounding
from lowbit_kernels.error import BAND
from lowbit_kernels.formats import E8M0, Format
from lowbitcli.schemes import Scheme
from lowbitcli.tensors import SCALE
from lowbitcli.verify.bound import step_of, values_of
from lowbitcli.verify.nouns import WorstBlock

BINS = 32
_UNIT = 1 << 20  # of a half gap, in which errors are added
_FAR = 1024  # half gaps; what is further off counts as this
_INWARD = BINS / 2 * (1 - 2.0**-18)  # puts what lies on the end of a bin, but for roundings, in it


@dataclass(frozen=True)
class Spread:
    """What is known of some rows of a weight; `counts` are the bins, `far` and `bias` sums of
    |e / half| and e / half in units of 2^-20."""

    counts: tuple[int, ...] = (0,) * (BINS + 2)
    far: int = 0
    bias: int = 0
    zeros: int = 0
    blocks: int = 0
    lost: int = 0
    least: float = math.inf
    most: float = 0.0
    worst: WorstBlock | None = None

    def plus(self, other: "Spread") -> "Spread":
        """Return what is known of both; of two blocks that are equally bad the first stays."""
        worst = self.worst
        if worst is None or (other.worst is not None and other.worst.error > worst.error):
            worst = other.worst
        return Spread(
            tuple(a + b for a, b in zip(self.counts, other.counts, strict=True)),
            self.far + other.far,
            self.bias + other.bias,
            self.zeros + other.zeros,
            self.blocks + other.blocks,
            self.lost + other.lost,
            min(self.least, other.least),
            max(self.most, other.most),
            worst,
        )

    def in_steps(self, total: int, half: float) -> float | None:
        """Return `total`, one of the sums, as a mean over the elements, in steps."""
        number = sum(self.counts)
        return half * total / _UNIT / number if number else None


@cache
def half_gap(element: Format) -> float:
    """Return half of the widest gap between neighbours of a format, in steps."""
    values = values_of(element)
    return float(values[values.isfinite()].unique().diff().amax()) / 2


def spread(
    scheme: Scheme,
    w: Tensor,
    v: Tensor,
    parts: Mapping[str, Tensor],
    first_row: int = 0,
    lead: tuple[int, ...] = (),
) -> Spread:
    """Look at elements `w [rows, cols]`, the fp32 values `v` that stand for them, and the scales
    among the `parts` of the same rows.

    `first_row` is where they begin in their matrix, a multiple of the rows of a block; `lead` is
    the place of the matrix in its stack.
    """
    rows = w.shape[0]
    step = step_of(scheme, parts, first_row, rows)
    least, most = _scales(scheme, parts[SCALE])
    high = BAND if w.device.type == "cpu" else max(rows, 1)
    total = Spread(least=least, most=most)
    for start in range(0, rows, high):
        here = slice(start, start + high)
        of_rows = step if step.shape[0] == 1 else step[here]
        total = total.plus(_seen(scheme, w[here], v[here], of_rows, first_row + start, lead))
    return total


def _seen(
    scheme: Scheme, w: Tensor, v: Tensor, step: Tensor, first_row: int, lead: tuple[int, ...]
) -> Spread:
    """Return what is known of rows, but for their scales; `step` is as of `step_of`."""
    width = scheme.block[1] or w.shape[1]
    x = w.float()
    d = v - x
    lost = step == 0
    is_lost = bool(lost.any())
    e = _over(d, torch.where(lost, 1.0, step) if is_lost else step, width)
    squares = _per_block(scheme, e.square())
    dead = 0
    told = e.flatten()
    if is_lost:
        here = _over(torch.ones_like(x), torch.where(lost, 0.0, 1.0), width) != 1
        told = e[~here]
        dead = int(torch.count_nonzero(_per_block(scheme, (here & (x != 0)).float())))
    bins, far, bias = _grid(told, half_gap(scheme.element))
    zeros = int(torch.count_nonzero((v == 0) & (x != 0)))
    steps = step[:: scheme.block[0] or 1, :, 0].double().expand_as(squares)
    norms = torch.where(steps == 0, 1.0, steps) * squares.double().sqrt()
    worst = _worst(scheme, x, d, norms, first_row, lead)
    return Spread(bins, far, bias, zeros, norms.numel(), dead, worst=worst)


def _over(x: Tensor, step: Tensor, width: int) -> Tensor:
    """Return `x [rows, cols]` over the step of each element; `step` is as of `step_of`."""
    cols = x.shape[1]
    if cols % width:
        return x / step.expand(-1, -1, width).flatten(1)[:, :cols]
    return (x.unflatten(1, (-1, width)) / step).reshape(x.shape)


def _grid(e: Tensor, half: float) -> tuple[tuple[int, ...], int, int]:
    """Return the bins of errors in steps, and the sums of |e / half| and of e / half.

    Every bin holds its outer end: an error of half a gap is one of rounding.
    """
    e = e / half
    place = (e * _INWARD).add_(BINS // 2 + 1).clamp_(0, BINS + 1).to(torch.int32)
    counts = torch.bincount(place.clamp_(0, BINS + 1), minlength=BINS + 2)  # NaN is any integer
    whole = e.clamp_(-_FAR, _FAR).mul_(_UNIT).round_().to(torch.int32)
    bias = whole.sum(dtype=torch.int64)
    return tuple(counts.tolist()), int(whole.abs_().sum(dtype=torch.int64)), int(bias)


def _block(scheme: Scheme, cols: int) -> tuple[int, int]:
    """Return the (rows, cols) that are looked at together."""
    return scheme.block[0] or 1, scheme.block[1] or cols


def _per_block(scheme: Scheme, x: Tensor) -> Tensor:
    """Return the sums of each block, `[blocks down, blocks across]`, added in a fixed order."""
    high, wide = _block(scheme, x.shape[1])
    x = functional.pad(x, (0, -x.shape[1] % wide, 0, -x.shape[0] % high))
    x = x.unflatten(1, (-1, wide)).unflatten(0, (-1, high)).transpose(1, 2)
    tall, broad = (1 << (n - 1).bit_length() for n in (high, wide))
    x = functional.pad(x, (0, broad - wide, 0, tall - high))
    return rounding.tree_sum_of(rounding.tree_sum_of(x))


def _worst(
    scheme: Scheme,
    x: Tensor,
    d: Tensor,
    norms: Tensor,
    first_row: int,
    lead: tuple[int, ...],
) -> WorstBlock | None:
    """Return the block with the largest error, the first of those that are equally bad."""
    if not norms.numel():
        return None
    down, across = divmod(int(norms.nan_to_num(math.inf).argmax()), norms.shape[1])
    high, wide = _block(scheme, x.shape[1])
    rows = slice(down * high, (down + 1) * high)
    cols = slice(across * wide, (across + 1) * wide)
    error, signal = (float(side[rows, cols].double().norm()) for side in (d, x))
    seen = x[rows, cols]
    return WorstBlock(
        place=(*lead, first_row + rows.start, cols.start),
        shape=(seen.shape[0], seen.shape[1]),
        error=error,
        relative=error / signal if signal else math.inf if error else 0.0,
        largest=float(seen.abs().amax()),
    )


def _scales(scheme: Scheme, stored: Tensor) -> tuple[float, float]:
    """Return the least and the largest scale that is not 0, as stored: without a global scale."""
    scale = rounding.e8m0_value(stored) if scheme.scale is E8M0 else stored.float()
    scale = scale[scale > 0]
    if not scale.numel():
        return math.inf, 0.0
    least, most = torch.aminmax(scale)
    return float(least), float(most)


__all__ = ["BINS", "Spread", "half_gap", "spread"]
