"""The ends of scales, which say in one look that all are numbers above zero."""

import math

import pytest
import torch

from lowbit_kernels import rounding
from lowbitcli.verify.numbers import ends

E4M3, BYTE = torch.float8_e4m3fn, torch.uint8


def values(stored: torch.Tensor) -> torch.Tensor:
    return rounding.e8m0_value(stored) if stored.dtype == BYTE else stored.float()


@pytest.mark.parametrize("dtype", [E4M3, BYTE])
@pytest.mark.parametrize("beside", [1, 0x38, 0x7E])
def test_of_every_byte_beside_another(dtype, beside):
    for byte in range(256):
        stored = torch.tensor([[beside, byte]], dtype=BYTE).view(dtype)
        good = 0 < byte < (0x7F if dtype == E4M3 else 255)
        numbers = values(stored).flatten().tolist()
        assert ends(stored) == ((min(numbers), max(numbers)) if good else None), byte


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [0.0, -0.0, -1.0, math.inf, -math.inf, math.nan])
def test_of_floats(dtype, bad):
    stored = torch.tensor([[3.0, 0.5], [0.25, 4.0]], dtype=dtype)
    assert ends(stored) == (0.25, 4.0)
    for place in range(4):
        spoilt = stored.clone()
        spoilt.view(-1)[place] = bad
        assert ends(spoilt) is None


def test_of_nothing():
    assert ends(torch.empty(0)) is None
