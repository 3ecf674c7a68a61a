"""FP8 by blocks against a loop over the blocks in numpy."""

import numpy as np
import pytest
import torch

from lowbit_kernels import fp8_block
from lowbit_kernels.formats import E4M3, E5M2
from tests.kernels import arithmetic
from tests.kernels.samples import DTYPES, difference, finite, weights

F32 = np.float32


def by_loop(
    x: np.ndarray, high: int, power_of_two: bool, values: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    codes = np.zeros(x.shape, np.uint8)
    scales = np.zeros((-(-x.shape[0] // high), -(-x.shape[1] // 128)), F32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = np.s_[i * high : (i + 1) * high, j * 128 : (j + 1) * 128]
            scale = max(np.abs(x[place]).max(), F32(1e-4)) / F32(values[-1])
            if power_of_two:
                scale = F32(arithmetic.E8M0[np.searchsorted(arithmetic.E8M0, scale)])
            scales[i, j] = scale
            codes[place] = arithmetic.fp8(x[place] * (F32(1) / scale), values)
    return codes, scales


@pytest.mark.parametrize("rule", fp8_block.RULES)
@pytest.mark.parametrize("high", [1, 128])
@pytest.mark.parametrize("shape", [(128, 128), (130, 260), (5, 13)])
@pytest.mark.parametrize("element", [E4M3, E5M2], ids=lambda element: element.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize(dtype, element, shape, high, rule):
    values = arithmetic.E4M3 if element is E4M3 else arithmetic.E5M2
    for name in ("wide", "sparse", "subnormal", "huge", "ties"):
        w = weights(dtype, *shape)[name]
        data, scale = fp8_block.quantize(w, rule, high, element)
        codes, want = by_loop(w.float().numpy(), high, rule == "ue8m0", values)
        np.testing.assert_array_equal(scale.numpy(), want)
        np.testing.assert_array_equal(data.view(torch.uint8).numpy(), codes)
        back = fp8_block.dequantize(data, scale, dtype, high)
        spread = scale.repeat_interleave(high, 0)[: shape[0]].repeat_interleave(128, 1)
        assert difference(back, (data.float() * spread[:, : shape[1]]).to(dtype)) == ""


def test_a_stack_has_scales_of_its_own():
    w = torch.stack([finite(torch.bfloat16, 130, 200)[n] for n in ("wide", "gauss", "zeros")])
    data, scale = fp8_block.quantize(w)
    assert scale.shape == (3, 2, 2)
    for i in range(3):
        one, its_scale = fp8_block.quantize(w[i])
        assert difference(data[i], one) == "" and difference(scale[i], its_scale) == ""
    assert fp8_block.dequantize(data, scale).shape == w.shape


def test_what_is_no_number_shows_in_its_block_alone():
    w = torch.ones(256, 256)
    w[3, 3], w[200, 200] = torch.nan, torch.inf
    _, scale = fp8_block.quantize(w)
    assert scale.isnan().tolist() == [[True, False], [False, False]]
    assert scale.isinf().tolist() == [[False, False], [False, True]]


def test_refusals():
    with pytest.raises(ValueError, match="no rule 'mse'"):
        fp8_block.quantize(torch.ones(2, 2), "mse")
    with pytest.raises(ValueError, match="64 x 128"):
        fp8_block.quantize(torch.ones(2, 2), high=64)
