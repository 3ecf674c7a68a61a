"""Swizzled scales against the formula, one scale at a time."""

import pytest
import torch

from lowbit_kernels import layout, mx, nvfp4
from lowbit_kernels.formats import E2M1
from tests.kernels.samples import difference, finite


@pytest.mark.parametrize("shape", [(128, 4), (1, 1), (130, 5), (256, 12), (300, 9)])
def test_swizzle_puts_each_scale_where_the_formula_says(shape):
    rows, cols = shape
    scale = torch.arange(rows * cols).remainder(251).to(torch.uint8).reshape(shape) + 1
    swizzled = layout.swizzle(scale)
    assert swizzled.shape == (rows + -rows % 128, cols + -cols % 4)
    flat, wide = swizzled.flatten(), -(-cols // 4)
    places = set()
    for r in range(rows):
        for c in range(cols):
            tile = (r // 128) * wide + c // 4
            place = tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4
            assert flat[place] == scale[r, c]
            places.add(place)
    rest = torch.ones(len(flat), dtype=torch.bool)
    rest[list(places)] = False
    assert len(places) == rows * cols and (flat[rest] == 0).all()
    assert torch.equal(layout.unswizzle(swizzled, rows, cols), scale)


def test_a_stack_and_e4m3_keep_their_shape_and_dtype():
    scale = torch.rand(2, 3, 130, 8).to(torch.float8_e4m3fn)
    swizzled = layout.swizzle(scale)
    assert swizzled.shape == (2, 3, 256, 8) and swizzled.dtype == scale.dtype
    one = layout.swizzle(scale[1, 2]).view(torch.uint8)
    assert torch.equal(swizzled[1, 2].view(torch.uint8), one)
    back = layout.unswizzle(swizzled, 130, 8)
    assert torch.equal(back.view(torch.uint8), scale.view(torch.uint8))


def test_swap_nibbles():
    packed = torch.arange(256, dtype=torch.uint8)
    swapped = layout.swap_nibbles(packed)
    assert swapped[0x1F] == 0xF1
    assert torch.equal(layout.swap_nibbles(swapped), packed)


@pytest.mark.parametrize("rule", ["amax", "mse", "four_over_six", "2d"])
def test_quantize_stores_what_the_layouts_make(rule):
    w = finite(torch.bfloat16, 130, 96)["wide"]
    packed, scale, g = nvfp4.quantize(w, None, rule)
    got = nvfp4.quantize(w, None, rule, layout="128x4", nibbles="high")
    for have, want in zip(
        got, (layout.swap_nibbles(packed), layout.swizzle(scale), g), strict=True
    ):
        assert difference(have, want) == ""
    packed, scale = mx.quantize_mxfp4(w)
    got = mx.quantize_mxfp4(w, layout="128x4")
    assert torch.equal(got[0], packed) and torch.equal(got[1], layout.swizzle(scale))
    assert torch.equal(mx.quantize_mxfp4(w, nibbles="high")[0], layout.swap_nibbles(packed))


def test_quantize_refuses_layouts_that_there_are_not():
    w = torch.zeros(2, 32)
    with pytest.raises(ValueError, match="no layout"):
        nvfp4.quantize(w, layout="4x128")
    with pytest.raises(ValueError, match="nibble"):
        mx.quantize(w, E2M1, nibbles="first")
    with pytest.raises(ValueError, match="no nibbles"):
        mx.quantize(w, mx.E4M3, nibbles="high")


def test_refusals():
    with pytest.raises(ValueError, match="byte"):
        layout.swizzle(torch.zeros(4, 4))
    with pytest.raises(ValueError, match="tiles"):
        layout.unswizzle(torch.zeros(128, 4, dtype=torch.uint8), 129, 4)
