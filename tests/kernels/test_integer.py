"""INT8 per channel against numpy, whose rint rounds ties to even."""

import numpy as np
import pytest
import torch

from lowbit_kernels import integer
from tests.kernels.samples import DTYPES, difference, finite, weights


@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize(dtype):
    for w in finite(dtype).values():
        x = w.float().numpy()
        amax = np.abs(x).max(-1, keepdims=True)
        scale = np.maximum(amax / np.float32(127), np.float32(2.0**-149))
        scale = np.where(amax == 0, np.float32(1), scale)
        with np.errstate(over="ignore"):
            codes = np.clip(np.rint(x / scale), -127, 127).astype(np.int8)
        data, got = integer.quantize_channel(w)
        np.testing.assert_array_equal(got.numpy(), scale)
        np.testing.assert_array_equal(data.numpy(), codes)
        back = integer.dequantize_channel(data, got, dtype)
        assert difference(back, (data.float() * got).to(dtype)) == ""


def test_every_tie_goes_to_the_even_code():
    w = torch.arange(-127, 127.5, 0.5).reshape(1, -1)
    data, scale = integer.quantize_channel(w)
    assert scale.item() == 1
    np.testing.assert_array_equal(data.numpy(), np.rint(w.numpy()).astype(np.int8))


def test_what_is_no_number_shows_in_its_scale():
    w = weights(torch.float32)["nan"]
    data, scale = integer.quantize_channel(w)
    assert scale.isnan().squeeze(-1).tolist() == [True] + [False] * 5
    assert (data[0] == 0).all()
