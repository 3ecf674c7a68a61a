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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit_kernels import rounding
from lowbit_kernels.error_codes import BINS, UNIT, Look, Worst
from lowbit_kernels.formats import E8M0
from lowbitcli.schemes import Scheme
from lowbitcli.tensors import SCALE
from lowbitcli.verify.nouns import WorstBlock
from lowbitcli.verify.numbers import ends

RIVAL = 1e-3  # relative: squares in fp32 that are further apart are in the order of the errors


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
        return half * total / UNIT / number if number else None


def seen(
    scheme: Scheme,
    found: Look,
    w: Tensor,
    v: Tensor,
    parts: Mapping[str, Tensor],
    first_row: int,
    lead: tuple[int, ...],
) -> Spread:
    """Return what a look at elements `w [rows, cols]`, the fp32 values `v` that stand for them and
    the scales among the `parts` of the same rows says of how their errors are spread.

    `first_row` is where they begin in their matrix, a multiple of the rows of a block; `lead` is
    the place of the matrix in its stack.
    """
    worst = _worst(scheme, found.worst, w, v, first_row, lead)
    return Spread(
        found.counts,
        found.far,
        found.bias,
        found.zeros,
        found.blocks,
        found.lost,
        *_scales(scheme, parts[SCALE]),
        worst,
    )


def _worst(
    scheme: Scheme,
    candidates: Sequence[Worst],
    w: Tensor,
    v: Tensor,
    first_row: int,
    lead: tuple[int, ...],
) -> WorstBlock | None:
    """Return the block with the largest error of those that are the worst of their bands, the first
    of those that are equally bad. What is far below another is not looked at again."""
    most = max((one.error for one in candidates), default=0.0)
    found = None
    for one in candidates:
        if math.isfinite(most) and one.error < most * (1 - RIVAL):
            continue
        here = _block(scheme, one, w, v, first_row, lead)
        if found is None or here.error > found.error:
            found = here
    return found


def _block(
    scheme: Scheme, one: Worst, w: Tensor, v: Tensor, first_row: int, lead: tuple[int, ...]
) -> WorstBlock:
    high, wide = scheme.block[0] or 1, scheme.block[1] or w.shape[1]
    rows = slice(one.down * high, (one.down + 1) * high)
    cols = slice(one.across * wide, (one.across + 1) * wide)
    # On the CPU, whose sums are in one order, wherever the block comes from.
    x, y = w[rows, cols].cpu().float(), v[rows, cols].cpu()
    error, signal = (float(side.double().norm()) for side in (y - x, x))
    return WorstBlock(
        place=(*lead, first_row + rows.start, cols.start),
        shape=(x.shape[0], x.shape[1]),
        error=error,
        relative=error / signal if signal else math.inf if error else 0.0,
        largest=float(x.abs().amax()),
    )


def _scales(scheme: Scheme, stored: Tensor) -> tuple[float, float]:
    """Return the least and the largest scale that is not 0, as stored: without a global scale."""
    found = ends(stored)
    if found is not None:
        return found
    scale = rounding.e8m0_value(stored) if scheme.scale is E8M0 else stored.float()
    scale = scale[scale > 0]
    if not scale.numel():
        return math.inf, 0.0
    least, most = torch.aminmax(scale)
    return float(least), float(most)


__all__ = ["BINS", "Spread", "seen"]
