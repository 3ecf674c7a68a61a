"""The steps of `cpu` in torch, in place: for finite slices whose scales are positive numbers.

| function | does | as |
|---|---|---|
| `nvfp4` | quantize blocks of 16 | `nvfp4._quantize_reference`, rule amax |
| `mx` | quantize blocks of 32 | `mx._quantize_reference`, all rules but mse |
| `values` | fp32 of codes, looked up | `.float()`, `rounding.e8m0_value`, `E2M1_VALUES` |

A slice that is not finite, or has a step of zero, is refused: the caller has the reference for it.
torch takes longer for whatever makes booleans than for arithmetic, nine times as long to convert
FP8 to fp32 as to look it up, and twice as long for amax over 16 numbers as for a pool: hence the
turns taken here.
"""

import functools

import torch
from torch import Tensor
from torch.nn import functional

from lowbit_kernels import mx_scales, rounding
from lowbit_kernels.formats import E2M1, E2M1_VALUES, Format


def _usable(scale: Tensor) -> bool:
    """Say whether all of `scale` are positive numbers: no zero, Inf or NaN."""
    low, high = torch.aminmax(scale)
    return low.item() > 0.0 and high.item() < torch.inf


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return fp32 |x| of finite `x`, and bit 3 of its E2M1 codes as uint8: 8 where x < 0."""
    # Adding zero makes 0.0 of -0.0.
    q = x.to(torch.float32, copy=True).add_(0.0)
    signs = (q.view(torch.int32) >> 28).to(torch.uint8).bitwise_and_(8)
    return q.abs_(), signs


def _e2m1(q: Tensor, signs: Tensor, out: Tensor) -> None:
    """Write packed E2M1 codes of finite fp32 magnitudes `q` and `signs` to `out`."""
    # As rounding.e2m1_magnitude; without NaN the least by value is the least by pattern.
    magic = torch.tensor(float(2**23))
    least = torch.add(magic, q, alpha=2.0)
    other = torch.add(q, magic + 2.0)
    torch.minimum(least, other, out=least)
    torch.add(magic + 4.0, q, alpha=0.5, out=other)
    torch.minimum(least, other, out=least)
    # The lowest byte of each pattern is the code; then two bytes are (high << 8) | low.
    codes = least.clamp_(max=float(2**23 + 7)).view(torch.int32).to(torch.uint8)
    pairs = codes.bitwise_or_(signs).view(torch.int16)
    out.copy_((pairs >> 4).bitwise_or_(pairs))


def nvfp4(x: Tensor, g: Tensor, packed: Tensor, scale: Tensor) -> bool:
    """Quantize finite blocks `x [groups, n, 16]` in place; return False where they are not."""
    q, signs = _split(x)
    # A pool, which keeps NaN, takes half the time of amax over so few.
    amax = functional.max_pool1d(q.view(1, 1, -1), 16).view(x.shape[:2])
    if not _usable(g) or not amax.max().item() < torch.inf:
        return False
    quotient = amax.div_(g.unsqueeze(-1) * 6.0)
    if quotient.min().item() == 0:
        quotient.masked_fill_(quotient == 0, 1.0)
    scale.squeeze(-1).copy_(quotient.clamp_(2.0**-9, 448.0))
    step = values(scale, "E4M3").mul_(g.view(-1, 1, 1))
    if not _usable(step):
        return False
    _e2m1(q.div_(step), signs, packed)
    return True


def mx(x: Tensor, element: Format, rule: str, data: Tensor, scale: Tensor) -> bool:
    """Quantize finite blocks `x [1, n, 32]` in place; return False where they are not."""
    if element is E2M1:
        q, signs = _split(x)
        patterns = q.view(torch.int32)
    else:
        q, signs = x.to(torch.float32, copy=True), None
        patterns = q.view(torch.int32) & 0x7FFFFFFF
    amax = patterns.amax(-1).view(torch.float32)
    if not amax.max().item() < torch.inf:
        return False
    if x.dtype == torch.bfloat16:
        index = amax.view(torch.int32).bitwise_right_shift_(16).view(-1)
        torch.index_select(_scales(element, rule), 0, index, out=scale.view(-1))
    else:
        scale.squeeze(-1).copy_(mx_scales.scale_of(amax, element, rule))
    q.mul_(values(scale, "1/E8M0"))
    if signs is not None:
        _e2m1(q, signs, data)
    else:
        data.copy_(q.clamp_(-element.max, element.max))
    return True


@functools.cache
def _scales(element: Format, rule: str) -> Tensor:
    """Return the scale of an MX block by the pattern of its amax in bf16."""
    patterns = torch.arange(32768, dtype=torch.int32) << 16
    return mx_scales.scale_of(patterns.view(torch.float32), element, rule)


@functools.cache
def table(name: str) -> Tensor:
    """Return what the 256 bytes of a format stand for in fp32; those of two E2M1 codes as one
    int64 each.
    """
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    if name == "E2M1":
        pairs = torch.tensor(E2M1_VALUES)[rounding.unpack(codes.view(-1, 1)).int()]
        return pairs.view(torch.int64).view(-1)
    if name == "E8M0":
        return rounding.e8m0_value(codes)
    if name == "1/E8M0":
        return rounding.e8m0_reciprocal(codes)
    stored = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2, "INT8": torch.int8}
    return codes.view(stored[name]).float()


def values(codes: Tensor, name: str) -> Tensor:
    """Return fp32 of `codes` of the format `name`."""
    index = codes.view(torch.uint8).to(torch.int32).view(-1)
    values = torch.index_select(table(name), 0, index)
    if name != "E2M1":
        return values.view(codes.shape)
    return values.view(torch.float32).view(*codes.shape[:-1], codes.shape[-1] * 2)
