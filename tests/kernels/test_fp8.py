"""FP8 in both elements: E5M2 against torch's cast and against numpy, what is no number, slices."""

import numpy as np
import pytest
import torch

from lowbit_kernels import fp8, fp8_block, rounding
from lowbit_kernels.formats import E2M1, E4M3, E5M2
from lowbit_kernels.jit import references
from tests.kernels import arithmetic
from tests.kernels.samples import DTYPES, difference, finite, weights

ELEMENTS = {"E4M3": (E4M3, arithmetic.E4M3), "E5M2": (E5M2, arithmetic.E5M2)}
DTYPE = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}


def codes_of(data):
    return data.view(torch.uint8).numpy()


def all_leading_bits() -> torch.Tensor:
    """Return fp32 of every sign, exponent and seven bits of mantissa, each with six endings: below,
    on and above what rounds to less, and what a rounding may carry.
    """
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    endings = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    return (upper[:, None] | endings).flatten().view(torch.float32)


def test_e5m2_is_torch_s_cast_where_nothing_saturates():
    x = all_leading_bits()
    got = rounding.to_e5m2(x)
    below = x.abs() < 61440  # the midpoint between the largest number and what would be next
    assert below.sum() > 200_000
    want = x[below].to(torch.float8_e5m2)
    assert want.float().isfinite().all()
    assert torch.equal(got[below].view(torch.uint8), want.view(torch.uint8))
    above = x[~below & ~x.isnan()]
    assert above.isinf().any()
    assert torch.equal(got[~below & ~x.isnan()].float(), above.sign() * 57344)
    assert (got[x.isnan()].view(torch.uint8) == 0x7F).all()


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize(dtype, element):
    form, values = ELEMENTS[element]
    for w in finite(dtype).values():
        x = w.float().numpy()
        for (data, scale), amax in (
            (fp8.quantize_tensor(w, None, form), np.abs(x).max()),
            (fp8.quantize_channel(w, form), np.abs(x).max(-1, keepdims=True)),
        ):
            codes, want = arithmetic.fp8_scaled(x, amax, values)
            assert data.dtype == DTYPE[element]
            np.testing.assert_array_equal(scale.numpy(), want)
            np.testing.assert_array_equal(codes_of(data), codes)
            assert data.float().isfinite().all()
            back = (fp8.dequantize_channel if scale.dim() else fp8.dequantize_tensor)(data, scale)
            assert difference(back, (data.float() * scale).bfloat16()) == ""


@pytest.mark.parametrize("element", ELEMENTS)
def test_a_finite_weight_saturates_under_a_scale_that_is_too_small(element):
    form, values = ELEMENTS[element]
    w = torch.tensor([[1.0, -1e30, 3e38, 0.5]])
    data, _ = fp8.quantize_tensor(w, torch.tensor(1e-3), form)
    assert data.float()[0, 1:3].tolist() == [-values[-1], values[-1]]


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_as_the_module_says(dtype, element):
    form, values = ELEMENTS[element]
    top = len(values) - 1
    w = torch.tensor([[1, -1, 0, 2], [1, torch.nan, -torch.inf, 2], [1, torch.inf, -torch.inf, -2]])
    w = w.to(dtype)
    data, scale = fp8.quantize_channel(w, form)
    assert scale[1:].isnan().tolist() == [[True], [False]] and scale[2].isinf()
    assert fp8.dequantize_channel(data, scale)[0].isfinite().all()
    assert codes_of(data)[1:].tolist() == [[0x7F] * 4, [0, 0x7F, 0x7F, 0x80]]
    assert fp8.dequantize_channel(data, scale)[1:].isnan().all()
    data, scale = fp8.quantize_tensor(w[2:], None, form)
    assert scale.isinf() and codes_of(data).tolist() == [[0, 0x7F, 0x7F, 0x80]]
    assert fp8.dequantize_tensor(data, scale).isnan().all()
    data, scale = fp8.quantize_tensor(w, None, form)
    assert scale.isnan() and (codes_of(data) == 0x7F).all()
    data, _ = fp8.quantize_tensor(w[1:], torch.tensor(1.0), form)
    assert codes_of(data)[:, 1:3].tolist() == [[0x7F, top + 128], [top, top + 128]]


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("high", [1, 128])
def test_what_is_no_number_in_a_block(high, element):
    form, values = ELEMENTS[element]
    top = len(values) - 1
    w = torch.ones(2, 384)
    w[0, 1], w[0, 129], w[0, 130], w[0, 131] = torch.nan, torch.inf, -torch.inf, -1
    data, scale = fp8_block.quantize(w, "amax", high, form)
    assert scale[0].isnan().tolist() == [True, False, False]
    assert scale[0].isinf().tolist() == [False, True, False]
    assert (codes_of(data)[0, :128] == 0x7F).all()
    assert codes_of(data)[0, 128:132].tolist() == [0, 0x7F, 0x7F, 0x80]
    back = fp8_block.dequantize(data, scale, torch.float32, high)
    assert back[0, :256].isnan().all() and back[0, 256:].isfinite().all()
    data, scale = fp8_block.quantize(w, "ue8m0", high, form)
    assert scale[0].isnan().tolist() == [True, False, False] and scale[0, 1] == 2.0**127
    assert codes_of(data)[0, 128:132].tolist() == [0, top, top + 128, 0x80]


def test_an_infinite_code_of_e5m2_decodes_to_infinity():
    data = torch.tensor([[0x7C, 0xFC, 0x7B]], dtype=torch.uint8).view(torch.float8_e5m2)
    scale = torch.tensor(0.5)
    want = [[torch.inf, -torch.inf, 28672]]
    assert fp8.dequantize_tensor(data, scale).tolist() == want
    assert fp8.dequantize_channel(data, scale.reshape(1, 1)).tolist() == want
    assert fp8_block.dequantize(data, scale.reshape(1, 1)).tolist() == want


@pytest.mark.parametrize("dtype", DTYPES)
def test_slices_on_the_cpu_have_the_reference_s_bytes(dtype):
    samples = {name: w.repeat(20, 4) for name, w in weights(dtype).items()}
    samples["stack"] = torch.stack([samples["wide"], samples["gauss"]])
    for name, w in samples.items():
        for call in (
            lambda w=w: fp8.quantize_tensor(w, None, E5M2),
            lambda w=w: fp8.quantize_channel(w, E5M2),
            lambda w=w: fp8_block.quantize(w, "amax", 128, E5M2),
        ):
            got = call()
            with references():
                want = call()
            assert not any(map(difference, got, want)), name
        for quantize, dequantize in (
            (fp8.quantize_tensor, fp8.dequantize_tensor),
            (lambda w, _, e: fp8.quantize_channel(w, e), fp8.dequantize_channel),
        ):
            parts = quantize(w, None, E5M2)
            got = dequantize(*parts, dtype)
            with references():
                assert difference(got, dequantize(*parts, dtype)) == "", name


def test_other_elements_are_refused():
    w = torch.ones(2, 32)
    for call in (
        lambda: fp8.quantize_tensor(w, None, E2M1),
        lambda: fp8.quantize_channel(w, E2M1),
        lambda: fp8_block.quantize(w, element=E2M1),
    ):
        with pytest.raises(ValueError, match="E4M3 or E5M2, not E2M1"):
            call()
