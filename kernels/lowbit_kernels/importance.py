"""How much the error of each input channel counts, as powers of two that are kept in a byte.

    h_j = E[x_j^2] over the inputs x of a matrix
    e_j = the whole number nearest to log2(h_j), by the bits of fp32: -126 to 127; h_j = 0 -> -128
    weight_j = 2^max(e_j - max of its block, -24)

A power of two multiplies exactly, so a weighted and a plain sum of errors round alike, and with the
exponents given, which are integers, every device finds the same scales. Only ratios within a block
count. `column_weights` takes h itself or what `values_of` makes of exponents: the same weights.
"""

import torch
from torch import Tensor

from lowbit_kernels.typed import typed

ZERO = -128  # the exponent that stands for h = 0
SMALLEST, LARGEST = -126, 127
REACH = 24  # a weight is at least 2^-REACH of its block's largest
ROOT_OF_2 = 0x3504F4  # the least mantissa above it


def _rounded(bits: Tensor) -> Tensor:
    """Return the biased exponent of the nearest power of two, on a logarithmic scale."""
    return (bits >> 23) + ((bits & 0x7FFFFF) >= ROOT_OF_2)


@typed
def exponents_of(h: Tensor) -> Tensor:
    """Return int8 exponents of `h`, finite and not negative.

    Raises ValueError for other numbers.
    """
    h = h.float()
    if not bool((h.isfinite() & (h >= 0)).all()):
        raise ValueError("importance is finite, and not negative")
    exponent = (_rounded(h.view(torch.int32)) - 127).clamp(SMALLEST, LARGEST)
    return torch.where(h == 0, ZERO, exponent).to(torch.int8)


@typed
def values_of(exponents: Tensor) -> Tensor:
    """Return fp32 2^e of int8 exponents, 0 for that of zero."""
    bits = (exponents.to(torch.int32).clamp(min=SMALLEST) + 127) << 23
    return torch.where(exponents == ZERO, 0, bits).view(torch.float32)


@typed
def column_weights(h: Tensor, block: int) -> Tensor:
    """Return fp32 `[C/block, block]` of `h [C]`, the importance of each column: powers of two, the
    largest of each block 1, the least 2^-24.

    All of `h` zero, or any of it negative or not finite: every weight is 1.

    Raises ValueError for columns that are no whole blocks.
    """
    if h.dim() != 1 or block < 1 or h.shape[0] % block:
        raise ValueError(f"importance {list(h.shape)} is not that of whole blocks of {block}")
    h = h.float()
    usable = h.isfinite().all() & (h >= 0).all() & (h > 0).any()
    h = torch.where(usable, h, 1.0)
    exponent = _rounded(h.view(torch.int32)).unflatten(0, (h.shape[0] // block, block))
    below = (exponent.amax(-1, keepdim=True) - exponent).clamp(max=REACH)
    return ((127 - below) << 23).view(torch.float32)
