"""Fake quantization: bits of the package that it follows, and written-out formulas where there is
none.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lowbit_kernels import fake_blocks, fake_quant, mx, nvfp4, rounding
from lowbit_kernels.formats import E2M1, E4M3, E5M2
from tests.kernels import samples
from tests.kernels.samples import DTYPES, difference

GOLDEN = Path(__file__).parents[1] / "golden" / "kernels"
CASES = json.loads((GOLDEN / "api.json").read_text())["cases"]
LARGEST = {(4, 3): 448, (5, 2): 57344, (2, 1): 6, (2, 3): 7.5, (3, 2): 28}
MX = {(4, 3): E4M3, (5, 2): E5M2, (2, 1): E2M1}


@pytest.fixture(scope="module")
def tensors():
    return load_file(GOLDEN / "api.safetensors")


def cases(*functions):
    return [(c["function"], c["input"]) for c in CASES if c["function"] in functions]


def first_amax(x):
    """Return the amax of each index of the first axis, as the oracle's axis=0 takes it."""
    return x.abs().flatten(1).amax(-1).reshape(-1, *[1] * (x.dim() - 1))


def golden(function, x):
    if function == "modelopt.fp8_tensor.fake":
        return fake_quant.fp8_eager(x, x.abs().amax().float())
    if function == "modelopt.nvfp4.fake_static":
        blocks = x.abs().float().reshape(-1, 16).amax(-1)
        y = fake_quant.static_block_fp4_impl(
            x, blocks, x.abs().amax().float(), out_dtype=torch.float32
        )
        # The oracle ran in Triton's interpreter, whose cast to bf16 cuts the lower half off.
        cut = (y.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
        return cut if x.dtype == torch.bfloat16 else y
    return fake_quant.fake_quant_impl(x, first_amax(x), 8, False, function.endswith("narrow"))


@pytest.mark.parametrize(
    ("function", "name"),
    cases(
        "modelopt.fp8_tensor.fake",
        "modelopt.nvfp4.fake_static",
        "modelopt.int8_channel.fake_narrow",
        "modelopt.int8_channel.fake_full",
    ),
)
def test_golden(function, name, tensors):
    got = golden(function, tensors[f"input|{name}"])
    assert difference(got, tensors[f"{function}|{name}|dequant"]) == ""


def test_fp4_cast_of_all_16_bit_floats():
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    for dtype in (torch.bfloat16, torch.float16):
        x = patterns.view(dtype).reshape(-1, 16)
        a = x.double().abs()
        at = (a[..., None] - values).abs()
        # Ties to the even code: of two values equally far, the one with the even index.
        best = at == at.amin(-1, keepdim=True)
        index = (best * (2 - torch.arange(8) % 2)).argmax(-1)
        want = torch.where(a.isnan() | (a > 6), 6.0, values[index])
        want = torch.where(x >= 0, want, -want)
        assert difference(fake_quant.fp4_cast_impl(x, torch.float32), want.float()) == ""
        assert fake_quant.fp4_cast_impl(x).dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("element", LARGEST)
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_dynamic_mx_is_its_formula(element, block_size, dtype):
    """Of fp64: nearest of all values of the element times the least power of two that fits."""
    exponent, mantissa = element
    bias = 2 ** (exponent - 1) - 1
    n = torch.arange(2 ** (exponent + mantissa)).double()
    e, m = n // 2**mantissa, n % 2**mantissa / 2**mantissa
    values = torch.where(e == 0, m * 2.0 ** (1 - bias), (1 + m) * 2.0 ** (e - bias))
    values = values[values <= LARGEST[element]]
    for name in ("gauss", "wide", "ties", "ties_scaled", "sparse"):
        x = samples.weights(dtype)[name]
        got = fake_quant.dynamic_block_quant_impl(x, block_size, None, element, (8, 0))
        blocks = x.double().reshape(-1, block_size)
        ratio = blocks.abs().amax(-1, keepdim=True) / values[-1]
        scale = torch.exp2(torch.ceil(torch.log2(ratio)).clamp(min=-127))
        far = ((blocks.abs() / scale)[..., None] - values).abs()
        best = (far == far.amin(-1, keepdim=True)) * (2 - torch.arange(len(values)) % 2)
        want = values[best.argmax(-1)] * scale * torch.where(blocks < 0, -1.0, 1.0)
        want = want.reshape(x.shape).float().to(dtype)
        assert torch.equal(got, want), name
        wrong_sign = torch.signbit(got) != (x < 0 if element == (2, 1) else torch.signbit(x))
        assert not wrong_sign.any(), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("element", MX)
def test_both_ways_to_an_mx_format_agree(element, dtype):
    """What goes to kernels and what is written here for other blocks: the same of 32 columns."""
    for name, x in samples.weights(dtype).items():
        got = fake_quant.dynamic_block_quant_impl(x, 32, None, element, (8, 0))
        assert difference(got, mx.dequantize(*mx.quantize(x, MX[element]), dtype)) == "", name
        code = mx.quantize(x, MX[element])[1].unsqueeze(-1)
        blocks = x.float().unflatten(-1, (3, 32))
        negative = blocks < 0 if element == (2, 1) else torch.signbit(blocks)
        rounded = fake_blocks.round_to(
            blocks * rounding.e8m0_reciprocal(code), MX[element], negative
        )
        other = (rounded * rounding.e8m0_value(code)).to(dtype).flatten(-2)
        nan = got.isnan() | other.isnan()
        if name not in ("nan", "inf"):
            assert not nan.any()
        assert difference(got[~nan], other[~nan]) == "", name


@pytest.mark.parametrize("dtype", DTYPES)
def test_dynamic_nvfp4_is_what_a_checkpoint_holds(dtype):
    for name, x in samples.finite(dtype).items():
        got = fake_quant.dynamic_block_quant_impl(x, 16, None, (2, 1), (4, 3))
        assert difference(got, nvfp4.dequantize(*nvfp4.quantize(x), dtype)) == "", name
        amax = x.abs().amax().float().reshape(1)
        again = fake_quant.dynamic_block_quant_impl(x, 16, amax, (2, 1), (4, 3))
        assert difference(again, got) == "", name


@pytest.mark.parametrize("block_size", [8, 32])
def test_dynamic_nvfp4_of_other_blocks_is_its_formula(block_size):
    x = samples.weights(torch.float32)["wide"]
    g = x.abs().amax() / torch.tensor(2688.0)
    a = x.reshape(6, -1, block_size).abs().amax(-1)
    scale = (a / (g * 6.0)).clamp(2.0**-9, 448.0).to(torch.float8_e4m3fn).float()
    step = (scale * g).unsqueeze(-1)
    q = fake_quant.fp4_cast_impl(x.reshape(6, -1, block_size) / step)
    want = (q * step).reshape(x.shape)
    got = fake_quant.dynamic_block_quant_impl(x, block_size, None, (2, 1), (4, 3))
    assert torch.equal(got, want)


def test_a_last_block_is_filled_with_zeros():
    x = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(4))
    for element, scale, size in (((2, 1), (4, 3), 16), ((4, 3), (8, 0), 32), ((2, 3), (8, 0), 16)):
        got = fake_quant.dynamic_block_quant_impl(x, size, None, element, scale)
        padded = torch.nn.functional.pad(x, (0, -50 % size)).reshape(6, -1)
        want = fake_quant.dynamic_block_quant_impl(padded, size, None, element, scale)
        assert difference(got, want[:, :50].reshape(x.shape)) == ""
    assert fake_quant.dynamic_block_quant_impl(x[:, :0], 16, None, (2, 1), (4, 3)).shape == (
        2,
        0,
        50,
    )


def test_scales_of_given_amax():
    amax = torch.tensor([0.7, 3.0, 0.0, 1e-5])
    plain = fake_quant.static_fp4_scales(amax, quantize_block_scales=False)
    assert difference(plain, amax / torch.full_like(amax, 6.0)) == ""
    for most in (448.0, 256.0):
        scale = fake_quant.static_fp4_scales(amax, torch.tensor(4.0), True, most)
        top = torch.tensor(4.0) * (448.0 / most) / torch.tensor(6.0)
        assert difference(scale, fake_quant.scaled_e4m3_impl(plain, top)) == ""
    own = fake_quant.static_fp4_scales(amax)
    assert difference(own, fake_quant.static_fp4_scales(amax, torch.tensor(3.0))) == ""


REFUSED = {
    "fp64": (lambda: fake_quant.fp4_cast_impl(torch.zeros(2, dtype=torch.float64)), "float64"),
    "no bits": (lambda: fake_quant.int_cast(torch.zeros(2), 1), "2 to 16"),
    "negative amax": (
        lambda: fake_quant.fake_quant_impl(torch.zeros(2), -torch.tensor(1.25)),
        "magnitude",
    ),
    "negative for unsigned": (
        lambda: fake_quant.fake_quant_impl(-torch.ones(2), torch.tensor(1.25), unsigned=True),
        "negative",
    ),
    "E5M2": (
        lambda: fake_quant.scaled_e4m3(torch.zeros(2), torch.tensor(1.25), None, 5, 2),
        "E=5, M=2",
    ),
    "axis": (
        lambda: fake_quant.fake_tensor_quant(torch.zeros(2, 3), torch.ones(2), axis=1),
        "3 indices",
    ),
    "blocks": (
        lambda: fake_quant.fake_tensor_quant(torch.zeros(2, 32), torch.ones(2), block_size=16),
        "amax of blocks",
    ),
    "block of 24": (
        lambda: fake_quant.dynamic_block_quant_impl(torch.zeros(48), 24, None, (2, 1), (4, 3)),
        "8, 16 or 32",
    ),
    "formats": (
        lambda: fake_quant.dynamic_block_quant_impl(torch.zeros(48), 16, None, (4, 3), (4, 3)),
        "no elements",
    ),
    "empty amax": (
        lambda: fake_quant.dynamic_block_quant_impl(
            torch.zeros(48), 16, torch.ones(0), (2, 1), (4, 3)
        ),
        "no number",
    ),
    "shares": (lambda: fake_quant.static_block_fp4(torch.zeros(48), torch.ones(5)), "whole blocks"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        call()
