"""Is every element in the rounding interval of the code that is stored for it?

    step = fl(scale * global_scale)        x / step in [low(code), high(code)]

`low` and `high` are the midpoints between a code's value and its neighbours', both of them in the
interval (either neighbour is right for a tie), widened by a relative 2^-21 for the roundings of a
writer in fp32. Where lowbit wrote the code it is known that fl(x / step) was rounded to nearest,
ties to even: then nothing is widened, and a midpoint is in the interval of the even code alone.

The interval of the largest code has no end, that of zero takes both signs, and a code that is NaN
has none. The least code of two's complement (-128, -8), which lowbit never writes, has one where
somebody else may have written it; that of the next one has no end there either, since writers
differ in whether they use it. Where the step is 0 nothing can be said of the code: an element that
is not zero is counted as lost to underflow.

Half a step alone would fail correct output on ties; a whole step would not see a code that was
changed to its neighbour.
"""

import math
from collections.abc import Iterable, Mapping
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit_kernels import rounding
from lowbit_kernels.error_codes import Ruler, codes_of, held, values_of
from lowbit_kernels.formats import E8M0, INT4, INT8, Format
from lowbitcli.schemes import Scheme
from lowbitcli.tensors import DATA, GLOBAL_SCALE, SCALE

FP32_WRITER = 2.0**-21
BF16_WRITER = 2.0**-7
RESCALED_WRITER = 2.0**-4  # scales of blocks were rounded to E4M3 after the codes had been made
# A scheme that multiplies by a reciprocal, or a rule with an order of operations of its own
# (four_over_six), is not listed: its codes are held against the widened interval.
EXACT = (
    "fp8_tensor",
    "fp8_tensor_e5m2",
    "fp8_channel",
    "mxfp8",
    "mxfp4",
    "nvfp4",
    "int8_channel",
    "int4_g128",
)
EXACT_RULES = {"amax", "mse", "mse_all", "floor", "even", "ceil"}


class Fit(NamedTuple):
    """How elements lie in their intervals; `first` is (row, column) of the first outside."""

    outside: int
    first: tuple[int, int] | None
    clipped: int
    underflow: int


@cache
def half_gap(element: Format) -> float:
    """Return half of the widest gap between neighbours of a format, in steps."""
    values = values_of(element)
    return float(values[values.isfinite()].unique().diff().amax()) / 2


@cache
def ruler(element: Format, widening: float | None) -> Ruler:
    """Return what the codes of a format are held to."""
    low, high = _intervals(element, widening)
    return Ruler(element, low, high, element.max * (1 + (widening or 0.0)), half_gap(element))


def _intervals(element: Format, widening: float | None) -> tuple[Tensor, Tensor]:
    """Return low and high of every code."""
    values = values_of(element)
    good = values.isfinite()
    magnitudes = values[good].abs().unique()  # in order; neighbours differ in whether even
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    if widening is None:
        below, above = middles.clone(), middles.clone()
        infinity = torch.tensor(math.inf)
        below[0::2] = torch.nextafter(middles[0::2], infinity)  # of the magnitudes 1, 3, ...
        above[1::2] = torch.nextafter(middles[1::2], -infinity)
    else:
        below, above = middles * (1 - widening), middles * (1 + widening)
    low = torch.cat((-above[:1], below))
    high = torch.cat((above, torch.tensor([math.inf])))
    place = torch.searchsorted(magnitudes, torch.where(good, values.abs(), 0.0))
    low, high, negative = low[place], high[place], values < 0
    low, high = torch.where(negative, -high, low), torch.where(negative, -low, high)
    low, high = torch.where(good, low, math.inf), torch.where(good, high, -math.inf)
    if widening is not None and element in (INT8, INT4):
        least = 1 << (element.bits - 1)  # the code itself: no other format has it
        low[least], high[least] = -math.inf, -(element.max + 0.5) * (1 - widening)
    return low, high


def is_exact(scheme: Scheme, rules: Iterable[str]) -> bool:
    """Does lowbit round fl(x / step) to nearest even for this scheme and these scale rules?"""
    return scheme.name in EXACT and set(rules) <= EXACT_RULES


def step_of(scheme: Scheme, parts: Mapping[str, Tensor], first_row: int, rows: int) -> Tensor:
    """Return what a code of value 1 stands for: fp32 `[rows, blocks]`, or `[1, blocks]` for all.

    `first_row` is where these rows begin in the matrix.
    """
    scale = parts[SCALE]
    step = rounding.e8m0_value(scale) if scheme.scale is E8M0 else scale.float()
    if GLOBAL_SCALE in parts:
        step = step * parts[GLOBAL_SCALE]
    high = scheme.block[0]
    if high is None:
        return step.reshape(1, 1)
    if high > 1:
        index = torch.arange(first_row, first_row + rows, device=step.device) // high
        step = step[index - first_row // high]
    return step


def held_by_least(
    scheme: Scheme, w: Tensor, data: Tensor, step: Tensor, widening: float | None
) -> int:
    """Return how many elements lie beyond the largest value of their scheme, and are yet within
    reach of the least code of two's complement, which is stored for them: not clipped, though
    `Look` counts them so. 0 of codes that lowbit wrote, which never have it."""
    element, wide = scheme.element, scheme.block[1] or w.shape[1]
    if widening is None or element not in (INT8, INT4):
        return 0
    least = 1 << (element.bits - 1)
    rows, cols = torch.nonzero(codes_of(element, data) == least, as_tuple=True)
    if not len(rows):
        return 0
    q = w[rows, cols].float() / step.expand(w.shape[0], -1)[rows, cols // wide]
    beyond = q < -element.max * (1 + widening)
    return int(
        (beyond & (q <= (0.5 - least) * (1 - widening)) & (q >= -least * (1 + widening))).sum()
    )


def fit(
    scheme: Scheme,
    w: Tensor,
    parts: Mapping[str, Tensor],
    first_row: int = 0,
    widening: float | None = FP32_WRITER,
) -> Fit:
    """Hold elements `w [rows, cols]` against the stored `parts` of the same rows.

    `widening` None is for codes that lowbit wrote: exactly the nearest, even on ties.
    """
    rows, cols = w.shape
    step = step_of(scheme, parts, first_row, rows)
    codes = codes_of(scheme.element, parts[DATA])
    held_to = ruler(scheme.element, widening)
    inside, clipped, lost = held(w.float(), codes, step, held_to, scheme.block[1] or cols)
    outside = rows * cols - int(inside.sum())
    first = divmod(int(inside.flatten().to(torch.uint8).argmin()), cols) if outside else None
    beyond = int(clipped.sum()) - held_by_least(scheme, w, parts[DATA], step, widening)
    return Fit(outside, first, beyond, int((lost & (w != 0)).sum()))


__all__ = [
    "BF16_WRITER",
    "EXACT",
    "FP32_WRITER",
    "RESCALED_WRITER",
    "Fit",
    "codes_of",
    "fit",
    "half_gap",
    "held_by_least",
    "is_exact",
    "ruler",
    "step_of",
    "values_of",
]
