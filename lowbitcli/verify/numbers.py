"""Are all scales numbers above zero? The least and the largest of them say so, where they are: for
bytes in one pass over them.

| stored | in the order of |
|---|---|
| E8M0, as bytes | bytes; 255 is no number |
| E4M3 | bytes with a sign, of which 127 is NaN and those below 0 are negative |
| floating | their values; NaN is neither end |
"""

import math

import torch
from torch import Tensor

from lowbit_kernels import rounding


def ends(stored: Tensor) -> tuple[float, float] | None:
    """Return the least and the largest scale where all are finite and above 0, and none is byte 0;
    None where one is not, or there is none."""
    if not stored.numel():
        return None
    if stored.dtype == torch.uint8:
        least, most = _ends(stored)
        if not 0 < least <= most < 255:
            return None
        values = rounding.e8m0_value(torch.tensor([least, most], dtype=torch.uint8))
    elif stored.dtype == torch.float8_e4m3fn:
        least, most = _ends(stored.view(torch.int8))
        if not 0 < least <= most < 127:
            return None
        values = torch.tensor([least, most], dtype=torch.int8).view(torch.float8_e4m3fn).float()
    else:
        values = torch.tensor(_ends(stored.float()))
        if not (values[0] > 0 and values[1] < math.inf):
            return None
    found = values.tolist()
    return found[0], found[1]


def _ends(numbers: Tensor) -> list:
    return torch.stack(torch.aminmax(numbers)).tolist()
