"""How the E8M0 scale of an MX block is chosen from the block's amax: in torch, and inside kernels.

| rule | exponent of the scale |
|---|---|
| amax, mse | ceil(log2(amax / max)), by the bits of fl(amax / max): no element saturates |
| floor | floor(log2 amax) - emax |
| ceil | ceil(log2 amax) - emax |
| even | floor(log2(amax rounded to the element's bits of mantissa)) - emax |

max is the element's largest number (448, 57344, 6), emax its exponent (8, 15, 2). Code 0 stands for
2^-127 and is also that of a block of zeros; NaN has code 255. Sources: OCP Microscaling Formats 1.0
(floor); TransformerEngine 2.20 `common/cast/mxfp8` (amax); torchao 0.18 `mx_formats` (ceil, even).
"""

import math

import torch
from torch import Tensor

from lowbit_kernels import rounding
from lowbit_kernels.formats import Format
from lowbit_kernels.jit import jit, tl
from lowbit_kernels.rounding import encode_e8m0


def _exponent_of_max(element: Format) -> int:
    return math.frexp(element.max)[1] - 1


def _mantissa_bits(element: Format) -> int:
    return round(math.log2(element.min_normal / element.smallest))


def scale_of(amax: Tensor, element: Format, rule: str) -> Tensor:
    """Return the E8M0 codes, uint8, of blocks with largest magnitudes `amax`."""
    if rule in ("amax", "mse"):
        return rounding.e8m0_ceil(amax / torch.full_like(amax, element.max))
    bits = amax.view(torch.int32)
    if rule == "even":
        bits = bits + (1 << (22 - _mantissa_bits(element)))
    exponent = bits >> 23
    if rule == "ceil":
        exponent = exponent + ((bits & 0x7FFFFF) > 0)
    code = (exponent.clamp(max=255) - _exponent_of_max(element)).clamp(min=0)
    return torch.where(torch.isnan(amax), 255, code).to(torch.uint8)


@jit
def scale_codes(amax, ELEMENT: tl.constexpr, RULE: tl.constexpr):
    """Return E8M0 codes of block maxima."""
    largest = 448.0 if ELEMENT == "E4M3" else (57344.0 if ELEMENT == "E5M2" else 6.0)
    emax = 8 if ELEMENT == "E4M3" else (15 if ELEMENT == "E5M2" else 2)
    if RULE == "amax" or RULE == "mse":
        return encode_e8m0(tl.math.div_rn(amax, largest))
    else:
        bits = amax.to(tl.int32, bitcast=True)
        nan = bits > 0x7F800000
        if RULE == "even":
            # Half a step of the mantissa's last bit.
            bits += 0x80000 if ELEMENT == "E4M3" else (0x100000 if ELEMENT == "E5M2" else 0x200000)
        exponent = bits >> 23
        if RULE == "ceil":
            exponent += ((bits & 0x7FFFFF) > 0).to(tl.int32)
        code = tl.maximum(tl.minimum(exponent, 255) - emax, 0)
        return tl.where(nan, 255, code)
