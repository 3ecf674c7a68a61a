"""Every operation takes any leading dimensions, views, and tensors without elements."""

import pytest
import torch

from lowbit_kernels import error, layout
from tests.kernels.operations import FIGURES, OTHERS, QUANTIZERS
from tests.kernels.samples import DTYPES, difference, finite

EMPTY = [(0, 64), (4, 0), (0, 4, 64), (3, 0, 64), (2, 0, 1, 4, 64), (2, 1, 3, 4, 0)]
CALLS = {name: quantize for name, (quantize, _) in QUANTIZERS.items()}
CALLS |= {name: lambda w, call=call: (call(w),) for name, call in OTHERS.items()}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_five_dimensions_are_the_matrices_one_by_one(dtype, name):
    samples = finite(dtype, 20, 192)
    chosen = ("gauss", "wide", "zeros", "ties", "sparse", "huge")
    w = torch.stack([samples[one] for one in chosen]).reshape(2, 1, 3, 20, 192)
    whole = CALLS[name](w)
    for at in ((0, 0, 0), (0, 0, 2), (1, 0, 1)):
        for got, want in zip(whole, CALLS[name](w[at]), strict=True):
            assert difference(got[at], want) == ""
    if name in QUANTIZERS:
        values = QUANTIZERS[name][1](*whole, dtype)
        assert values.shape == w.shape and values.dtype == dtype
        one = QUANTIZERS[name][1](*(part[1, 0, 1] for part in whole), dtype)
        assert difference(values[1, 0, 1], one) == ""


@pytest.mark.parametrize("name", CALLS)
def test_a_view_gives_the_bytes_of_its_copy(name):
    w = finite(torch.bfloat16, 64, 192)["wide"]
    views = {
        "transposed": w.t(),
        "every other row": w[::2],
        "columns": w.repeat(1, 2)[:, 64:256],
        "a stack turned": w.reshape(8, 8, 192).transpose(0, 1),
        "expanded": w[:1].expand(5, 192),
    }
    for what, view in views.items():
        assert not view.is_contiguous(), what
        before = view.clone()
        for got, want in zip(CALLS[name](view), CALLS[name](view.contiguous()), strict=True):
            assert difference(got, want) == "" and got.is_contiguous(), what
        assert torch.equal(view, before), f"{what} was changed"


@pytest.mark.parametrize("name", QUANTIZERS)
def test_parts_that_are_views_are_decoded_as_their_copies(name):
    quantize, dequantize = QUANTIZERS[name]
    w = torch.stack([finite(torch.bfloat16, 32, 128)[one] for one in ("wide", "gauss", "ties")])
    parts = quantize(w)
    views = [part.transpose(0, -1).contiguous().transpose(0, -1) for part in parts]
    assert not views[0].is_contiguous()
    assert difference(dequantize(*views), dequantize(*parts)) == ""


@pytest.mark.parametrize("shape", EMPTY, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_without_elements_the_parts_have_none_either(name, shape):
    w = torch.zeros(shape, dtype=torch.bfloat16)
    parts = CALLS[name](w)
    lead = shape[:-2]
    if name in QUANTIZERS:
        assert parts[0].shape[:-1] == shape[:-1] and parts[0].numel() == 0
        values = QUANTIZERS[name][1](*parts, torch.float16)
        assert values.shape == shape and values.dtype == torch.float16
    else:
        assert parts[0].shape[: len(lead)] == lead
    if name in ("amax.matrix", "amax.rows"):
        assert (parts[0] == 0).all()


@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_sums_and_layouts_of_nothing(shape):
    w = torch.zeros(shape)
    assert error.sums(w, w) == error.Sums() and error.bands(w, w) == []
    assert FIGURES["figures"](w).shape == (0, 6)
    codes = torch.zeros(shape, dtype=torch.uint8)
    swizzled = layout.swizzle(codes)
    assert swizzled.shape[:-2] == shape[:-2]
    assert difference(layout.unswizzle(swizzled, *shape[-2:]), codes) == ""


def test_sums_of_five_dimensions_are_those_of_all_rows():
    w = finite(torch.float32, 40, 96)["gauss"]
    assert torch.equal(FIGURES["figures"](w.reshape(2, 1, 5, 4, 96)), FIGURES["figures"](w))
    assert torch.equal(FIGURES["figures"](w.t()), FIGURES["figures"](w.t().contiguous()))
