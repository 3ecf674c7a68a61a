"""How the codes of a weight lie beside it, band by band of 128 rows: which are in their rounding
interval, how far each value is off in steps, and which block is worst.

    step = fl(scale * global_scale)   q = fl(x / step)   e = fl(fl(v - x) / step)   t = e / half
    inside: low(code) <= q <= high(code)          clipped: inside, and |q| > largest
    bin = floor(fl(fl(t * 16 (1 - 2^-18)) + 17)), at least 0 and at most 33
    far, bias: sums of |n| and n, n = t in units of 2^-20, rounded to even, at most 2^30
    error of a block = step^2 sum e^2

Where the step is 0 nothing can be said of a code: an element that is not 0 is lost to underflow,
in no bin, and its error is its own magnitude. Squares of a block are summed in fp32 as a tree that
adds the upper half onto the lower, along columns and then along rows; all else that is added is
whole numbers. So every path says
the same, on every device: `error_looks` chooses one.
"""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from lowbit_kernels import rounding
from lowbit_kernels.error_figures import BAND
from lowbit_kernels.formats import E2M1, E2M1_VALUES, E4M3, E5M2, INT4, INT8, Format

BINS = 32
FAR = 1024  # half gaps; what is further off counts as this
UNIT = 1 << 20  # of a half gap, in which errors are added
INWARD = BINS / 2 * (1 - 2.0**-18)  # puts what lies on the end of a bin, but for roundings, in it


@dataclass(frozen=True)
class Ruler:
    """What codes of a format are held to: low and high `[codes]` fp32 of every code, the largest
    magnitude beyond which an element was clipped, and half of the widest gap, a power of two."""

    element: Format
    low: Tensor
    high: Tensor
    largest: float
    half: float

    @functools.cached_property
    def lows(self) -> Tensor:
        return _pairs(self.low)

    @functools.cached_property
    def highs(self) -> Tensor:
        return _pairs(self.high)

    @functools.cached_property
    def values(self) -> Tensor:
        return _pairs(_read(self.element))


def values_of(element: Format) -> Tensor:
    """Return the value of every code of an element format, NaN where a code is not one to be used.

    Raises:
        ValueError: no code of this format can be looked at here.
    """
    values = _read(element)
    return (
        torch.where(values < -element.max, math.nan, values) if values.isfinite().all() else values
    )


def _read(element: Format) -> Tensor:
    """Return the value of every code as readers take it, of those too that no writer uses."""
    codes = torch.arange(1 << element.bits, dtype=torch.int16).to(torch.uint8)
    if element is E2M1:
        return torch.tensor(E2M1_VALUES)
    if element is E4M3 or element is E5M2:
        return codes.view(rounding.FP8_DTYPES[element.name]).float()
    if element is INT8 or element is INT4:
        codes = codes.view(torch.int8)
        return (codes if element is INT8 else (codes ^ 8) - 8).float()
    raise ValueError(f"verify cannot read {element.name}")


def _pairs(table: Tensor) -> Tensor:
    """Return what two codes stand for that lie side by side, as one int64, the first in its low
    half: of the 256 bytes of two codes, or of 65,536 pairs of bytes."""
    low, high = table.repeat(len(table)), table.repeat_interleave(len(table))
    return torch.stack((low, high), 1).view(torch.int64).view(-1)


class Worst(NamedTuple):
    """The block of a band with the largest squared error; NaN is the largest there is."""

    error: float
    down: int  # blocks from the first of these rows
    across: int


class Look(NamedTuple):
    """What was seen; `first` is (row, column) of the first element outside."""

    outside: int = 0
    first: tuple[int, int] | None = None
    clipped: int = 0
    underflow: int = 0
    zeros: int = 0
    lost: int = 0  # blocks whose step is 0 though an element is not
    blocks: int = 0
    far: int = 0
    bias: int = 0
    counts: tuple[int, ...] = (0,) * (BINS + 2)
    worst: tuple[Worst, ...] = ()


def codes_of(element: Format, data: Tensor) -> Tensor:
    """Return the code of each element, int32 `[rows, cols]`, of canonical `data`."""
    codes = rounding.unpack(data) if element.per_byte == 2 else data.view(torch.uint8)
    return codes.to(torch.int32)


def over(x: Tensor, step: Tensor, wide: int) -> Tensor:
    """Return `x [rows, cols]` over the step of each element."""
    cols = x.shape[1]
    if cols % wide:
        return x / step.unsqueeze(-1).expand(-1, -1, wide).flatten(1)[:, :cols]
    return (x.unflatten(1, (-1, wide)) / step.unsqueeze(-1)).reshape(x.shape)


def held(
    x: Tensor, codes: Tensor, step: Tensor, ruler: Ruler, wide: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return which elements of fp32 `x` are inside, which are clipped, and which have no step."""
    lost = step == 0
    nowhere = (lost.unsqueeze(-1).expand(-1, -1, wide)).flatten(1)[:, : x.shape[1]].expand_as(x)
    q = over(x, step, wide)
    low, high = ruler.low.to(x.device), ruler.high.to(x.device)
    # Said this way round so that NaN is outside.
    inside = (q >= low[codes]) & (q <= high[codes]) | nowhere
    return inside, (q.abs() > ruler.largest) & inside & ~nowhere, nowhere


def reference(
    w: Tensor, v: Tensor, data: Tensor, step: Tensor, ruler: Ruler, high: int, wide: int
) -> Look:
    """Look at elements in torch, whole: what every other path must agree with."""
    x = w.float()
    inside, clipped, nowhere = held(x, codes_of(ruler.element, data), step, ruler, wide)
    d = v - x
    e = over(d, torch.where(step == 0, 1.0, step), wide)
    errors, dead = errors_of(e, step, high, wide), _blocks(nowhere & (x != 0), high, wide)
    t = e / ruler.half
    place = (t * INWARD).add_(BINS // 2 + 1).nan_to_num_(0.0).clamp_(0, BINS + 1).to(torch.int64)
    counts = torch.bincount(place.masked_fill_(nowhere, BINS + 2).flatten(), minlength=BINS + 3)
    whole = t.nan_to_num_(0.0, math.inf, -math.inf).clamp_(-FAR, FAR).mul_(UNIT).round_().long()
    whole.masked_fill_(nowhere, 0)
    numbers = torch.stack(
        (
            inside.logical_not().sum(),
            inside.flatten().to(torch.uint8).argmin(),
            clipped.sum(),
            (nowhere & (x != 0)).sum(),
            ((v == 0) & (x != 0)).sum(),
            dead.sum(),
            whole.abs().sum(),
            whole.sum(),
        )
    )
    outside, first, beyond, underflow, zeros, lost, far, bias = numbers.tolist()
    return Look(
        outside,
        divmod(first, x.shape[1]) if outside else None,
        beyond,
        underflow,
        zeros,
        lost,
        errors.numel(),
        far,
        bias,
        tuple(counts[: BINS + 2].tolist()),
        _worst(errors, high),
    )


def _cut(x: Tensor, high: int, wide: int) -> Tensor:
    """Return `[down, across, high, wide]` of `[rows, cols]`, filled up with zeros."""
    x = functional.pad(x, (0, -x.shape[1] % wide, 0, -x.shape[0] % high))
    return x.unflatten(1, (-1, wide)).unflatten(0, (-1, high)).transpose(1, 2)


def _blocks(mask: Tensor, high: int, wide: int) -> Tensor:
    """Return which blocks hold a True, `[down, across]`."""
    return _cut(mask, high, wide).any(-1).any(-1)


def _squares(e: Tensor, high: int, wide: int) -> Tensor:
    """Return the sums of squares of each block, `[down, across]`."""
    x = _cut(e.square(), high, wide)
    tall, broad = (1 << (n - 1).bit_length() for n in (high, wide))
    x = functional.pad(x, (0, broad - wide, 0, tall - high))
    return rounding.tree_sum_of(rounding.tree_sum_of(x))


def errors_of(e: Tensor, step: Tensor, high: int, wide: int) -> Tensor:
    """Return the fp64 squared errors of blocks, `[down, across]`: no roots of them, which torch
    rounds otherwise here and there."""
    steps = step[::high].double()
    return torch.where(steps == 0, 1.0, steps).square() * _squares(e, high, wide)


def _worst(errors: Tensor, high: int) -> tuple[Worst, ...]:
    """Return the worst block of each band, the first of those that are equally bad."""
    per = max(1, BAND // high)
    down, across = errors.shape
    errors = functional.pad(errors.nan_to_num(math.inf), (0, 0, 0, -down % per), value=-1.0)
    errors = errors.reshape(-1, per * across)
    place = errors.argmax(1)
    found = zip(errors.amax(1).tolist(), place.tolist(), strict=True)
    return tuple(Worst(m, i * per + p // across, p % across) for i, (m, p) in enumerate(found))


def joined(looks: list[Look]) -> Look:
    """Return what was seen of rows that follow each other; places are of all of them already."""
    counts = tuple(map(sum, zip(*(one.counts for one in looks), strict=True)))
    return Look(
        sum(one.outside for one in looks),
        next((one.first for one in looks if one.first is not None), None),
        sum(one.clipped for one in looks),
        sum(one.underflow for one in looks),
        sum(one.zeros for one in looks),
        sum(one.lost for one in looks),
        sum(one.blocks for one in looks),
        sum(one.far for one in looks),
        sum(one.bias for one in looks),
        counts,
        tuple(worst for one in looks for worst in one.worst),
    )


__all__ = [
    "BAND",
    "BINS",
    "FAR",
    "INWARD",
    "UNIT",
    "Look",
    "Ruler",
    "Worst",
    "codes_of",
    "errors_of",
    "held",
    "joined",
    "over",
    "reference",
    "values_of",
]
