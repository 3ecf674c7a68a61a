"""Whole schemes against the same rules in numpy, where rounding is a search."""

import numpy as np
import pytest
import torch

from lowbit_kernels import amax, fp8, mx, nvfp4
from lowbit_kernels.formats import E2M1, E4M3, E5M2
from tests.kernels import arithmetic
from tests.kernels.samples import DTYPES, difference, finite, weights

EVERY_BF16 = torch.arange(65536).to(torch.int16).view(torch.bfloat16)
EVERY = EVERY_BF16[EVERY_BF16.isfinite()].reshape(-1, 32)
WEIGHTS = [
    pytest.param(w, id=f"{name}-{str(dtype)[6:]}")
    for dtype in DTYPES
    for name, w in finite(dtype).items()
] + [
    pytest.param(EVERY, id="every bf16"),
    pytest.param(EVERY.flatten()[torch.arange(65280) * 421 % 65280].reshape(-1, 64), id="mixed"),
]
ELEMENTS = {"E4M3": (E4M3, arithmetic.E4M3), "E5M2": (E5M2, arithmetic.E5M2)}
ELEMENTS["E2M1"] = (E2M1, arithmetic.E2M1)


def codes_of(t):
    """Return the bytes of `t`, one axis more where its elements are wider."""
    flat = t.reshape(-1).view(torch.uint8).numpy()
    return flat.reshape(t.shape if t.element_size() == 1 else (*t.shape, -1))


@pytest.mark.parametrize("w", WEIGHTS)
def test_amax(w):
    want = np.abs(w.float().numpy())
    np.testing.assert_array_equal(amax.matrix(w).numpy(), want.max())
    np.testing.assert_array_equal(amax.rows(w).numpy(), want.max(-1))
    blocks = amax.blocks(w, 16).numpy()
    np.testing.assert_array_equal(blocks, want.reshape(len(w), -1, 16).max(-1))


@pytest.mark.parametrize("w", WEIGHTS)
def test_fp8_tensor(w):
    x = w.float().numpy()
    data, scale = fp8.quantize_tensor(w)
    codes, want = arithmetic.fp8_scaled(x, np.abs(x).max())
    np.testing.assert_array_equal(scale.numpy(), want)
    np.testing.assert_array_equal(codes_of(data), codes)


@pytest.mark.parametrize("w", WEIGHTS)
def test_fp8_channel(w):
    x = w.float().numpy()
    data, scale = fp8.quantize_channel(w)
    codes, want = arithmetic.fp8_scaled(x, np.abs(x).max(-1, keepdims=True))
    np.testing.assert_array_equal(scale.numpy(), want)
    np.testing.assert_array_equal(codes_of(data), codes)


@pytest.mark.parametrize("rule", ["amax", "floor", "ceil", "even"])
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("w", WEIGHTS)
def test_mx(w, element, rule):
    form, values = ELEMENTS[element]
    data, scale = mx.quantize(w, form, rule)
    codes, want = arithmetic.mx(w.float().numpy(), values, rule)
    np.testing.assert_array_equal(scale.numpy(), want)
    np.testing.assert_array_equal(codes_of(data), arithmetic.pack(codes) if form is E2M1 else codes)


@pytest.mark.parametrize("w", WEIGHTS)
def test_nvfp4(w):
    packed, scale, g = nvfp4.quantize(w)
    want_packed, want_scale, want_g = arithmetic.nvfp4(w.float().numpy())
    assert g.item() == want_g
    np.testing.assert_array_equal(codes_of(scale), want_scale)
    np.testing.assert_array_equal(packed.numpy(), want_packed)


@pytest.mark.parametrize("w", WEIGHTS)
def test_no_scale_is_zero_or_infinite(w):
    for scale in (fp8.quantize_tensor(w)[1], fp8.quantize_channel(w)[1], *nvfp4.quantize(w)[1:]):
        assert scale.float().isfinite().all() and (scale.float() > 0).all()


@pytest.mark.parametrize("g", [1e-3, 3.7, 2.0**-149, 1e30])
def test_nvfp4_takes_the_global_scale_that_it_is_given(g):
    w = finite(torch.float32)["wide"]
    packed, scale, given = nvfp4.quantize(w, torch.tensor(g))
    want_packed, want_scale, _ = arithmetic.nvfp4(w.numpy(), np.float32(g))
    assert given.item() == np.float32(g)
    np.testing.assert_array_equal(codes_of(scale), want_scale)
    np.testing.assert_array_equal(packed.numpy(), want_packed)


def test_mse_is_the_least_of_three_by_search():
    w = finite(torch.float32, 64, 96)["wide"]
    for element, (form, values) in ELEMENTS.items():
        _, first = mx.quantize(w, form)
        _, best = mx.quantize(w, form, "mse")
        errors = []
        for shift in (0, -1, 1):
            step = 2.0 ** (first.double().numpy() - 127 + shift)[..., None]
            y = w.double().numpy().reshape(64, -1, 32) / step
            error = (values[arithmetic.nearest(values, np.abs(y))] - np.abs(y)) * step
            errors.append((error**2).sum(-1))
        errors = np.stack(errors)
        shift = best.numpy().astype(int) - first.numpy()
        chosen = np.take_along_axis(errors, np.select([shift == -1, shift == 1], [1, 2])[None], 0)
        # The sums are fp32: of two errors closer than its rounding either may be the least.
        assert (chosen <= errors.min(0) * (1 + 32 * 2.0**-24)).all(), element
        # A test of a choice must see more than one choice made.
        assert form is E5M2 or len(set(shift.ravel().tolist())) > 1, element


@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize_rounds_the_product_once(dtype):
    every = torch.arange(256, dtype=torch.uint8)
    value = every.view(torch.float8_e4m3fn).float()
    scale = torch.tensor(0.3)
    got = fp8.dequantize_tensor(every.view(torch.float8_e4m3fn).reshape(2, 128), scale, dtype)
    assert difference(got.flatten(), (value * scale).to(dtype)) == ""

    g = torch.tensor(0.37)
    codes = every.repeat(2).reshape(64, 8)
    scales = (torch.arange(64, dtype=torch.uint8) + 30).view(torch.float8_e4m3fn).reshape(64, 1)
    signs = np.array([1.0] * 8 + [-1.0] * 8)
    table = np.concatenate([arithmetic.E2M1, arithmetic.E2M1]) * signs
    pairs = np.stack([codes.numpy() & 15, codes.numpy() >> 4], -1).reshape(64, 16)
    step = scales.float().numpy() * np.float32(0.37)
    want = torch.from_numpy(table.astype(np.float32)[pairs] * step).to(dtype)
    got = nvfp4.dequantize(codes, scales, g, dtype)
    assert difference(got, want) == ""


def test_code_8_is_minus_zero():
    packed = torch.full((1, 8), 0x88, dtype=torch.uint8)
    scale = torch.ones(1, 1).to(torch.float8_e4m3fn)
    out = nvfp4.dequantize(packed, scale, torch.tensor(1.0), torch.float32)
    assert (out == 0).all() and out.signbit().all()


def test_a_reader_of_minus_zero_gets_plus_zero_and_of_less_minus_zero():
    w = torch.zeros(1, 16)
    w[0, :3] = torch.tensor([1.0, -0.0, -1e-6])
    packed, _, _ = nvfp4.quantize(w)
    assert packed[0, :2].tolist() == [0x07, 0x08]


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_shows_in_the_scales(dtype):
    samples = weights(dtype)
    for name in ("nan", "inf"):
        w = samples[name]
        assert not amax.matrix(w).isfinite()
        assert amax.matrix(w).isnan() == (name == "nan")
        assert not fp8.quantize_tensor(w)[1].isfinite()
        rows = w.isfinite().all(-1)
        assert torch.equal(fp8.quantize_channel(w)[1].isfinite().squeeze(-1), rows)
        assert not nvfp4.quantize(w)[2].isfinite()
        _, scale = mx.quantize_mxfp8(w)
        bad = ~w.isfinite().reshape(6, 3, 32).all(-1)
        assert (scale[bad] == (255 if name == "nan" else 254)).all()
        assert (scale[~bad] < 254).all()


OPS = (fp8.TENSOR, fp8.CHANNEL, mx.MXFP8, mx.MXFP4, nvfp4.NVFP4)


@pytest.mark.parametrize("ops", OPS)
def test_a_stack_is_its_matrices_one_by_one(ops):
    samples = finite(torch.bfloat16)
    stack = torch.stack([samples["wide"], samples["gauss"], samples["zeros"], samples["ties"]])
    stack = stack.reshape(2, 2, 6, 96)
    parts = ops.quantize(stack, ops.shared(ops.measure(stack), "amax"), "amax")
    for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
        one = ops.quantize(stack[i, j], ops.shared(ops.measure(stack[i, j]), "amax"), "amax")
        for part, got in parts.items():
            np.testing.assert_array_equal(codes_of(got[i, j]), codes_of(one[part]))
    whole = ops.dequantize(parts, torch.bfloat16)
    assert whole.shape == stack.shape
    assert (whole[1, 0] == 0).all()


@pytest.mark.parametrize("ops", OPS)
def test_slices_of_rows_give_the_bytes_of_the_whole(ops):
    w = finite(torch.bfloat16)["wide"]
    amax_of_slices = torch.maximum(ops.measure(w[:2]), ops.measure(w[2:]))
    assert torch.equal(amax_of_slices, ops.measure(w))
    shared = ops.shared(amax_of_slices, "amax")
    whole, top = (ops.quantize(t, shared, "amax") for t in (w, w[:2]))
    np.testing.assert_array_equal(codes_of(whole["data"][:2]), codes_of(top["data"]))


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("shape", [(0, 64), (4, 0), (0, 4, 64), (3, 0, 64)])
def test_nothing_in_nothing_out(ops, shape):
    w = torch.zeros(shape)
    assert (ops.measure(w) == 0).all()
    parts = ops.quantize(w, ops.shared(ops.measure(w), "amax"), "amax")
    assert ops.dequantize(parts, torch.float16).shape == shape


@pytest.mark.parametrize("ops", OPS)
def test_a_view_is_quantized_as_its_copy(ops):
    view = finite(torch.bfloat16)["wide"].repeat(16, 1).t()
    assert not view.is_contiguous()
    shared = ops.shared(ops.measure(view), "amax")
    got, want = (ops.quantize(t, shared, "amax") for t in (view, view.contiguous()))
    np.testing.assert_array_equal(codes_of(got["data"]), codes_of(want["data"]))


@pytest.mark.parametrize("ops", OPS)
def test_refusals(ops):
    with pytest.raises(ValueError, match="float64"):
        ops.quantize(torch.zeros(4, 64, dtype=torch.float64), None, "amax")
    with pytest.raises(ValueError, match="shape"):
        ops.quantize(torch.zeros(64), None, "amax")
    with pytest.raises(ValueError, match="no rule 'best'"):
        ops.quantize(torch.zeros(4, 64), None, "best")


@pytest.mark.parametrize(("ops", "width"), [(mx.MXFP8, 32), (mx.MXFP4, 32), (nvfp4.NVFP4, 16)])
def test_ragged_columns_are_refused(ops, width):
    with pytest.raises(ValueError, match=f"40 columns are no multiple of {width}"):
        ops.quantize(torch.zeros(4, 40), None, "amax")
