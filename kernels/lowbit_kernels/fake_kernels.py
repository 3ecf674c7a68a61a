"""The kernel that rounds values and gives them back: the arithmetic of `fake_plain` in one pass.

| element | y | scale holds |
|---|---|---|
| INTEGER | clamp(rne(fl(x * S)), least, most), divided by S | amax; S = fl(most / amax) |
| E4M3 | fl(e4m3(fl(x * S)) * fl(1 / S)) | amax; S = fl(fl(1 / amax) * 448) |
| E2M1 | fl(e2m1(fl(abs(x) / s)) * s), with the sign of x | s, or nothing |

A scale belongs to equal shares of x in its order of elements: one for all, one for each row, for
each block of a row. What broadcasts otherwise stays with torch.

`DEVICES` is the one switch: kinds of devices on which the kernel is used, elsewhere torch does it
with the same bits. The CPU is that of Triton's interpreter.
"""

import math

import torch
from torch import Tensor

from lowbit_kernels.jit import OPTIONS, jit, loadable, tl, use_kernel
from lowbit_kernels.rounding import (
    decode_e2m1,
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
    narrow,
    widen,
)

DEVICES = frozenset({"cpu", "cuda"})
TILE = 1024


@jit
def _nearest(q, LEAST: tl.constexpr, MOST: tl.constexpr):
    """Return fp32 q rounded to integers, ties to even, within LEAST and MOST; NaN stays, and the
    sign of what becomes zero."""
    q = tl.where(q > MOST, MOST, tl.where(q < LEAST, LEAST, q))
    bits = q.to(tl.int32, bitcast=True)
    # Adding 1.5 * 2^23 leaves no bits below the integer.
    whole = ((q + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000).to(tl.float32)
    signed = (whole.to(tl.int32, bitcast=True) & 0x7FFFFFFF) | (bits & -2147483648)
    return tl.where(q == q, signed.to(tl.float32, bitcast=True), q)


@jit
def _integer(x, amax, SCALED: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr):
    if SCALED:
        none = amax <= 2.0**-24
        scale = tl.math.div_rn(MOST, amax)
        q = _nearest(x * tl.where(none, 0.0, scale), LEAST, MOST)
        return tl.math.div_rn(q, tl.where(none, 1.0, scale))
    else:
        return _nearest(x, LEAST, MOST)


@jit
def _e4m3(x, amax, SCALED: tl.constexpr):
    if SCALED:
        scale = tl.math.div_rn(1.0, tl.where(amax <= 2.0**-24, 1.0, amax)) * 448.0
        return decode_e4m3(encode_e4m3(x * scale)) * tl.math.div_rn(1.0, scale)
    else:
        return decode_e4m3(encode_e4m3(x))


@jit
def _signed(y, x):
    """Return y where x is 0 or more, else y with its sign turned: `-y` would subtract from 0, and
    make 0.0 of 0.0."""
    turned = (y.to(tl.int32, bitcast=True) ^ -2147483648).to(tl.float32, bitcast=True)
    return tl.where(x >= 0, y, turned)


@jit
def _e2m1(x, scale, SCALED: tl.constexpr):
    magnitude = tl.abs(x)
    if SCALED:
        safe = tl.where((scale == 0) | (tl.abs(scale) == float("inf")), 1.0, scale)
        safe = tl.where(scale == scale, safe, 1.0)
        y = decode_e2m1(encode_e2m1(tl.math.div_rn(magnitude, safe))) * safe
        return tl.where(scale == 0, 0.0, _signed(y, x))
    else:
        return _signed(decode_e2m1(encode_e2m1(magnitude)), x)


@jit
def _fake_kernel(
    x_ptr,  # [size] fp32, fp16, or bf16 as int16
    scale_ptr,  # [size / share] fp32
    y_ptr,  # [size] fp32, bf16, fp16
    size,
    share,  # elements that have a scale in common
    BF16: tl.constexpr,
    ELEMENT: tl.constexpr,
    SCALED: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    WIDE: tl.constexpr,  # more elements than 32 bits count
    TILE: tl.constexpr,
):
    """Round TILE elements."""
    first = tl.program_id(0).to(tl.int64) if WIDE else tl.program_id(0)
    offset = first * TILE + tl.arange(0, TILE)
    mask = offset < size
    x = widen(tl.load(x_ptr + offset, mask=mask, other=0), BF16)
    scale = tl.load(scale_ptr + offset // share, mask=mask, other=1.0) if SCALED else 1.0
    if ELEMENT == "INTEGER":
        y = _integer(x, scale, SCALED, LEAST, MOST)
    elif ELEMENT == "E4M3":
        y = _e4m3(x, scale, SCALED)
    else:
        y = _e2m1(x, scale, SCALED)
    tl.store(y_ptr + offset, narrow(y, y_ptr.dtype.element_ty), mask=mask)


def share_of(x: Tensor, scale: Tensor) -> int | None:
    """Return how many elements of `x`, one after another, have a scale in common, None where those
    that have do not lie together; `scale` broadcasts over `x`.
    """
    if scale.numel() == 1:
        return x.numel()
    sizes = [1] * (x.dim() - scale.dim()) + list(scale.shape)
    own = max(i for i, n in enumerate(sizes) if n != 1) + 1
    return math.prod(x.shape[own:]) if sizes[:own] == list(x.shape[:own]) else None


def launch(
    x: Tensor,
    scale: Tensor | None,
    share: int | None,
    element: str,
    dtype: torch.dtype | None = None,
    bounds: tuple[float, float] = (0.0, 0.0),
) -> Tensor | None:
    """Return `x` rounded, in `dtype` or its own; None where no kernel is for it. `scale` holds fp32
    for shares of `share` elements.
    """
    if x.device.type not in DEVICES or not use_kernel(x):
        return None
    if scale is not None and share is None:
        return None
    y = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    given = x if scale is None else scale.float().contiguous().to(x.device)
    size = x.numel()
    with torch.cuda.device_of(x):
        _fake_kernel[(-(-size // TILE),)](
            loadable(x),
            given,
            y,
            size,
            share or size,
            BF16=x.dtype == torch.bfloat16,
            ELEMENT=element,
            SCALED=scale is not None,
            LEAST=bounds[0],
            MOST=bounds[1],
            WIDE=size >= 2**31 - TILE,
            TILE=TILE,
            **OPTIONS,
        )
    return y
