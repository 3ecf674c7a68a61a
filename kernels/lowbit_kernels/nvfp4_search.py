"""Choose each NVFP4 block's E4M3 scale by the least sum of squared errors, weighted if asked.

For each candidate code c, with S = fl(e4m3(c) * global_scale):

    d_i = fl(fl(e2m1(fl(w_i / S)) * S) - w_i)
    e_i = fl(fl(d_i * d_i) * h_i)
    error = tree sum of e

| candidates | order |
|---|---|
| window of r codes | c0 (the code by amax), c0 - r .. c0 - 1, c0 + 1 .. c0 + r, within 1 to 126 |
| all | 1 to 126, which is ModelOpt's `NVFP4MSECalibrator` |

A later candidate must be strictly better, and NaN never is. The tree adds the upper half onto the
lower: 8, 4, 2, 1. In a window d is multiplied by 2^-exponent(amax) before it is squared, which is
exact, so that neither tiny nor huge blocks lose their errors, and a block of zeros keeps c0. All is
ModelOpt's as it is: d is squared plainly, an S below 1e-5 divides as if it were 1, the first
candidate wins where no error is finite, and a winner with S = 0 is written as 448. So it is no use
for weights of less than 1e-3, where a window is.
h: weights of the columns, powers of two: see `importance.column_weights`.
"""

import torch
from torch import Tensor

from lowbit_kernels import rounding
from lowbit_kernels.formats import E2M1_VALUES
from lowbit_kernels.jit import jit, tl
from lowbit_kernels.rounding import decode_e2m1, decode_e4m3, encode_e2m1, reciprocal_e8m0, tree_sum

WINDOW = 6
WEIGHTED_WINDOW = 12
LAST = 126


def _error(
    x: Tensor, code: Tensor, global_scale: Tensor, unit: Tensor, h: Tensor, plain: bool
) -> Tensor:
    scale = code.to(torch.uint8).view(torch.float8_e4m3fn).float()
    step = (scale * global_scale).unsqueeze(-1)
    divisor = torch.where(step < 1e-5, 1.0, step) if plain else step
    q = torch.where(divisor == 0, 0.0, x.abs() / divisor)
    values = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=x.device)
    d = (values[rounding.e2m1_magnitude(q).int()] * step - x.abs()) * unit
    return rounding.tree_sum_of(d * d * h)


def best_codes_of(
    x: Tensor, amax: Tensor, first: Tensor, global_scale: Tensor, radius: int, h: Tensor | None
) -> Tensor:
    """Return E4M3 codes, uint8, of blocks `x [..., 16]`; `radius` 0 tries all 126.

    `first` are the codes by `amax`, `global_scale` broadcasts over them, `h` as of
    `column_weights`.
    """
    one = torch.ones(1, device=x.device)
    unit = rounding.e8m0_reciprocal(amax.view(torch.int32) >> 23).unsqueeze(-1) if radius else one
    h = one if h is None else h
    best = first.int()
    if radius:
        least = _error(x, best, global_scale, unit, h, False)
        shifts = [*range(-radius, 0), *range(1, radius + 1)]
        candidates = [(best + shift) for shift in shifts]
    else:
        least = torch.full_like(amax, torch.inf)
        best = torch.where(best == 127, 127, 1)
        candidates = [torch.full_like(best, code) for code in range(1, LAST + 1)]
    for code in candidates:
        error = _error(x, code.clamp(1, LAST), global_scale, unit, h, not radius)
        better = (error < least) & (code >= 1) & (code <= LAST)
        best, least = torch.where(better, code, best), torch.where(better, error, least)
    codes = best.to(torch.uint8)
    if not radius:
        step = codes.view(torch.float8_e4m3fn).float() * global_scale
        codes = torch.where(step == 0, LAST, codes)
    return codes


@jit
def _half_error(a, step, unit, h, PLAIN: tl.constexpr):
    """Return squared errors `[N, 8]` of magnitudes a with a step for each row."""
    divisor = tl.where(step < 1e-5, 1.0, step) if PLAIN else step
    q = tl.math.div_rn(a, tl.broadcast_to(divisor[:, None], a.shape))
    q = tl.where(divisor[:, None] == 0, 0.0, q)
    d = (decode_e2m1(encode_e2m1(q)) * step[:, None] - a) * unit[:, None]
    return d * d * h


@jit
def best_codes(
    low,
    high,
    low_h,
    high_h,
    amax,
    first,
    g,
    RADIUS: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Return the best E4M3 codes of blocks given as halves `[N, 8]`; RADIUS 0 tries all 126."""
    a, b = tl.abs(low), tl.abs(high)
    best = first
    if RADIUS > 0:
        unit = reciprocal_e8m0(amax.to(tl.int32, bitcast=True) >> 23)
        step = decode_e4m3(first) * g
        lower = _half_error(a, step, unit, low_h, False)
        least = tree_sum(lower + _half_error(b, step, unit, high_h, False))
        start = first - RADIUS
    else:
        unit = tl.zeros_like(amax) + 1.0
        least = tl.zeros_like(amax) + float("inf")
        start = tl.zeros_like(first) + 1
        best = tl.where(first == 127, 127, 1)
    for index in range(COUNT):
        code = start + index
        step = decode_e4m3(tl.minimum(tl.maximum(code, 1), 126)) * g
        lower = _half_error(a, step, unit, low_h, RADIUS == 0)
        error = tree_sum(lower + _half_error(b, step, unit, high_h, RADIUS == 0))
        better = (error < least) & (code >= 1) & (code <= 126)
        best = tl.where(better, code, best)
        least = tl.where(better, error, least)
    if RADIUS == 0:
        best = tl.where(decode_e4m3(best) * g == 0, 126, best)
    return best
