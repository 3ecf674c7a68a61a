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


CASTS = json.loads((GOLDEN / "casts.json").read_text())["cases"]


@pytest.mark.parametrize(("function", "name"), [(c["function"], c["input"]) for c in CASTS])
def test_casts_without_a_scale(function, name, tensors):
    """Values: E2M1 has one zero here, which others give a sign, and says nothing of NaN."""
    x = tensors[f"input|{name}"]
    codes = load_file(GOLDEN / "casts.safetensors")[f"{function}|{name}|codes"]
    if "e4m3" in function:
        want = codes.view(torch.float8_e4m3fn).float().reshape(x.shape)
        assert difference(fake_quant.scaled_e4m3_impl(x), want) == ""
        return
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)[..., : x.shape[-1]]
    magnitude = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[(nibbles & 7).int()]
    want = torch.where(nibbles > 7, -magnitude, magnitude).reshape(x.shape)
    number = ~x.isnan()
    assert torch.equal(fake_quant.fp4_cast_impl(x)[number], want[number])


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


X = torch.linspace(-2, 2, 128).view(4, 32)
ONE = torch.tensor(1.25)
NVFP4 = ((2, 1), (4, 3))


def dynamic(x=X, size=16, amax=None, bias=None, formats=NVFP4, through=True):
    return fake_quant.dynamic_block_quant(x, size, amax, bias, *formats, through)


EACH = {
    "integer": lambda x: fake_quant.fake_tensor_quant(x, ONE),
    "integer plain": lambda x: fake_quant.fake_quant_impl(x, ONE),
    "e4m3": lambda x: fake_quant.scaled_e4m3(x, ONE),
    "e4m3 unscaled": lambda x: fake_quant.fp8_eager(x, None),
    "fp4": fake_quant.fp4_cast,
    "int": lambda x: fake_quant.int_cast(x, 8),
    "dynamic": dynamic,
    "mx": lambda x: dynamic(x, 32, formats=((4, 3), (8, 0))),
    "static": lambda x: fake_quant.static_block_fp4(x, torch.ones(1)),
}
NO_VALUES = {
    "fp64": (X.double(), "float64"),
    "integers": (X.int(), "int32"),
    "bool": (X > 0, "bool"),
    "complex": (X.to(torch.complex64), "complex64"),
    "e4m3": (X.to(torch.float8_e4m3fn), "float8_e4m3fn"),
    "list": ([1.0], "dense tensor of real numbers, this is list"),
    "nothing": (None, "dense tensor of real numbers, this is NoneType"),
    "sparse": (X.to_sparse(), "dense tensor"),
}
NO_AMAX = {
    "a float": (1.25, "dense tensor of real numbers( or None)?, this is float"),
    "complex": (torch.tensor(1j), "real numbers"),
    "bool": (torch.tensor(True), "real numbers"),
    "empty": (torch.ones(0), "does not broadcast|no whole blocks"),
    "another shape": (torch.ones(7), "does not broadcast|no whole blocks"),
    "more dimensions": (torch.ones(3, 4, 32), "does not broadcast|no whole blocks"),
    "on another device": (torch.ones(2, device="meta"), "lies on meta"),
}
SCALED = {
    "integer": fake_quant.fake_tensor_quant,
    "e4m3": fake_quant.scaled_e4m3,
    "dynamic": lambda x, amax: dynamic(x, amax=amax, through=False),
    "static": fake_quant.static_block_fp4,
}
BIASED = {
    "integer": lambda b: fake_quant.fake_tensor_quant(X, ONE, b),
    "e4m3": lambda b: fake_quant.scaled_e4m3(X, ONE, b),
    "dynamic": lambda b: dynamic(bias=b),
}
REFUSED = {
    "no bits": (lambda: fake_quant.int_cast(X, 1), "2 to 16"),
    "half bits": (lambda: fake_quant.int_cast(X, 2.5), "num_bits is an integer"),
    "bits in words": (
        lambda: fake_quant.fake_tensor_quant(X, ONE, num_bits="8"),
        "num_bits is an integer",
    ),
    "negative amax": (lambda: fake_quant.fake_quant_impl(X, -ONE), "magnitude"),
    "negative amax of blocks": (
        lambda: fake_quant.static_block_fp4(X, -torch.ones(8)),
        "magnitude",
    ),
    "negative for unsigned": (
        lambda: fake_quant.fake_quant_impl(X, ONE, unsigned=True),
        "negative",
    ),
    "E5M2": (lambda: fake_quant.scaled_e4m3(X, ONE, None, 5, 2), "E=5, M=2"),
    "axis": (lambda: fake_quant.fake_tensor_quant(X, torch.ones(2), axis=1), "32 indices"),
    "no axis": (lambda: fake_quant.fake_tensor_quant(X, torch.ones(2), axis=2), "no axis 2"),
    "axis of a number": (
        lambda: fake_quant.fake_tensor_quant(X[0, 0], torch.ones(2), axis=0),
        "no axis 0",
    ),
    "axis in words": (lambda: fake_quant.fake_tensor_quant(X, ONE, axis="0"), "an integer"),
    "blocks": (
        lambda: fake_quant.fake_tensor_quant(X, torch.ones(2), block_size=16),
        "amax of blocks",
    ),
    "blocks of none": (
        lambda: fake_quant.fake_tensor_quant(X, torch.ones(4, 2), block_size=0),
        "amax of blocks",
    ),
    "blocks of a float": (
        lambda: fake_quant.fake_tensor_quant(X, torch.ones(4, 2), block_size=16.0),
        "an integer",
    ),
    "block of 24": (lambda: dynamic(size=24), "8, 16 or 32"),
    "block of 16.0": (lambda: dynamic(size=16.0), "block_size is an integer"),
    "blocks of a number": (lambda: dynamic(X[0, 0]), "a number has none"),
    "formats": (lambda: dynamic(formats=((4, 3), (4, 3))), "no elements"),
    "formats in numbers": (lambda: dynamic(formats=(21, 43)), "num_bits is a list or tuple of 2"),
    "empty amax": (lambda: dynamic(amax=torch.ones(0)), "no number"),
    "shares": (lambda: fake_quant.static_block_fp4(X, torch.ones(5)), "whole blocks"),
    "two global amax": (
        lambda: fake_quant.static_block_fp4(X, torch.ones(8), torch.ones(2)),
        "one number",
    ),
    "no maximum": (
        lambda: fake_quant.static_block_fp4(X, torch.ones(8), None, True, 0.0),
        "a maximum of 0",
    ),
    "no amax": (lambda: fake_quant.static_fp4_scales(torch.ones(0)), "no scales of 0"),
    "to fp64": (lambda: fake_quant.fp4_cast(X, torch.float64), "not as torch.float64"),
    "static to int8": (
        lambda: fake_quant.static_block_fp4(X, torch.ones(8), out_dtype=torch.int8),
        "not as torch.int8",
    ),
}


@pytest.mark.parametrize("what", NO_VALUES)
@pytest.mark.parametrize("name", EACH)
def test_what_cannot_be_rounded_is_refused(name, what):
    x, words = NO_VALUES[what]
    with pytest.raises(ValueError, match=words):
        EACH[name](x)


@pytest.mark.parametrize("what", NO_AMAX)
@pytest.mark.parametrize("name", SCALED)
def test_what_is_no_amax_is_refused(name, what):
    amax, words = NO_AMAX[what]
    with pytest.raises(ValueError, match=f"{words}|no number"):
        SCALED[name](X, amax)


@pytest.mark.parametrize("name", BIASED)
def test_a_bias_broadcasts_over_the_inputs(name):
    for bias in (torch.ones(7), torch.ones(3, 4, 32), 1.0):
        with pytest.raises(ValueError, match="bias"):
            BIASED[name](bias)


@pytest.mark.parametrize("name", EACH)
def test_strides_and_empty_tensors_and_leaves(name):
    function = EACH[name]
    turned = X.T.contiguous().T
    assert not turned.is_contiguous()
    assert torch.equal(function(turned), function(X))
    assert function(X[:, ::2].repeat(1, 2)).shape == X.shape
    assert function(X[:1].expand(4, 32)).shape == X.shape
    for empty in (X[:0], X[:, :0]):
        assert function(empty).shape == empty.shape
    leaf = torch.nn.Parameter(X.half())
    function(leaf).sum().backward() if "plain" not in name and "unscaled" not in name else None
    assert leaf.grad is None or leaf.grad.dtype == torch.float16
    assert torch.equal(leaf.detach(), X.half())  # nothing is done in place


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        call()
