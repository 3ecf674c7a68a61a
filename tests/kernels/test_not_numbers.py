"""What NaN and Inf give, as the heads of the modules say it; `agreement` holds the kernels to the
same bytes, with samples that hold both."""

import pytest
import torch

from lowbit_kernels import amax, hadamard, mx, nvfp4
from lowbit_kernels.formats import E2M1, E4M3, E5M2
from tests.kernels.operations import QUANTIZERS
from tests.kernels.samples import DTYPES, difference, finite

ELEMENTS = {"E4M3": (E4M3, 0x7E, 8), "E5M2": (E5M2, 0x7B, 15), "E2M1": (E2M1, 7, 2)}
BLOCKS = [name for name in QUANTIZERS if name.startswith(("mx", "int", "fp8 channel", "fp8 1x"))]


def spoiled(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return ones with a NaN, an Inf of each sign and both kinds, a row for each."""
    w = torch.ones(4, 64, dtype=dtype)
    w[:, 7] = -2
    w[0, 5], w[1, 5], w[2, 5], w[3, 5] = torch.nan, torch.inf, -torch.inf, torch.nan
    w[3, 6] = torch.inf
    return w


def codes(data: torch.Tensor) -> torch.Tensor:
    """Return a code for each element of FP8 or packed data."""
    if data.dtype == torch.uint8:
        return torch.stack((data & 15, data >> 4), -1).flatten(-2)
    return data.view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_amax(dtype):
    w = spoiled(dtype)
    assert amax.matrix(w).isnan() and amax.matrix(w[1:3]) == torch.inf
    assert amax.rows(w).isnan().tolist() == [True, False, False, True]
    assert amax.rows(w)[1:3].isinf().all()
    blocks = amax.blocks(w, 32)
    assert not blocks[:, 0].isfinite().any() and (blocks[:, 1] == 1).all()


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_shares_no_scale_with_it_is_as_without_it(dtype, name):
    """Rows and blocks that hold neither keep their bytes, whatever lies beside them."""
    w = finite(dtype, 6, 128)["gauss"]
    whole = QUANTIZERS[name][0](w)
    w = w.clone()
    w[1, 3], w[2, 4], w[4, 5], w[4, 6] = torch.nan, torch.inf, torch.nan, -torch.inf
    for got, want in zip(QUANTIZERS[name][0](w), whole, strict=True):
        for row in (0, 3, 5):
            assert difference(got[row], want[row]) == ""
        if name.startswith("mx"):
            half = got.shape[-1] // 2  # of each row
            assert difference(got[:, half:], want[:, half:]) == ""


@pytest.mark.parametrize("rule", mx.RULES)
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_mx(dtype, element, rule):
    form, top, emax = ELEMENTS[element]
    sign = 8 if form is E2M1 else 128
    data, scale = mx.quantize(spoiled(dtype), form, rule)
    infinite = 255 - emax if rule in ("floor", "ceil", "even") else 254
    assert scale[:, 0].tolist() == [255, infinite, infinite, 255]
    found = codes(data)[:, 5:8].tolist()
    if form is E2M1:
        assert found[0] == [7, 7, 15] and found[3] == [7, 7, 15]
    else:
        assert (codes(data)[0::3, :32] == 0x7F).all()
    assert found[1] == [top, 0, 0 | sign] and found[2] == [top | sign, 0, 0 | sign]
    back = mx.dequantize(data, scale, torch.float32)
    assert back[0::3, :32].isnan().all()
    assert back[1, 5] == torch.inf and back[2, 5] == -torch.inf
    assert (back[1:3, 6:32] == 0).all() and back[:, 32:].isfinite().all()


@pytest.mark.parametrize("rule", nvfp4.LARGEST_SCALE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nvfp4(dtype, rule):
    w = spoiled(dtype)
    for row in (0, 3):
        packed, scale, g = nvfp4.quantize(w[row : row + 1], None, rule)
        assert g.isnan() and (scale.view(torch.uint8) == 0x7F).all()
        assert (codes(packed) & 7 == 7).all() and codes(packed)[0, 7] == 15
        assert nvfp4.dequantize(packed, scale, g).isnan().all()
    for row in (1, 2):
        packed, scale, g = nvfp4.quantize(w[row : row + 1], None, rule)
        stored = scale.view(torch.uint8)[0].tolist()
        assert g == torch.inf
        back = nvfp4.dequantize(packed, scale, g, torch.float32)
        if rule in ("four_over_six", "2d"):
            assert stored == [0x7E, 35, 35, 35] and codes(packed)[0, 5] & 7 == 7
            assert not back.isfinite().any()
        else:
            assert stored == [0x7F] + ([1] if rule == "mse_all" else [0x38]) * 3
            assert back.isnan().all()


@pytest.mark.parametrize("rule", nvfp4.LARGEST_SCALE)
def test_nvfp4_under_a_global_scale_that_is_given(rule):
    """What is no number then shows in its block alone."""
    w = torch.ones(17, 64)
    w[0, 5], w[0, 20] = torch.nan, torch.inf
    packed, scale, g = nvfp4.quantize(w, torch.tensor(0.01), rule)
    assert g == torch.tensor(0.01)
    largest = 1 if rule == "mse_all" else 0x7E
    assert scale.view(torch.uint8)[0, :2].tolist() == [0x7F, largest]
    assert (codes(packed)[0, :16] & 7 == 7).all() and codes(packed)[0, 20] & 7 == 7
    back = nvfp4.dequantize(packed, scale, g, torch.float32)
    assert back[0, :16].isnan().all() and back[0, 20] == pytest.approx(0.06 * scale[0, 1].item())
    assert back[:, 32:].isfinite().all() and back[16].isfinite().all()


def test_rotation():
    x = torch.ones(3, 32)
    x[0, 3], x[1, 3], x[2, 3], x[2, 4] = torch.nan, torch.inf, torch.inf, -torch.inf
    y = hadamard.rotate(x)
    assert y[0, :16].isnan().all() and y[1, :16].isinf().all()
    assert set(y[2, :16].nan_to_num().sign().tolist()) == {-1, 0, 1}
    assert y[:, 16:].isfinite().all()
