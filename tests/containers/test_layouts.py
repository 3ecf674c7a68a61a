"""Layouts: what is encoded comes back bit for bit, is what it says on paper, and lies where the
ecosystem's programs look for it."""

import pytest
import torch

from lowbit_kernels import layout as kernels
from lowbitcli.containers import layouts
from lowbitcli.containers.layouts import LAYOUTS, SWIZZLED128X4, padded
from lowbitcli.tensors import TensorSpec
from tests import checkpoints

SHAPES = {
    "identity": [(), (3,), (4, 2)],
    "vector1": [(), (3,), (4, 2)],
    "reciprocal1": [(), (3,), (4, 2)],
    "offset4": [(3, 8), (2, 3, 4)],
    "offset8": [(3, 8), (2, 3, 4)],
    "spread": [(3, 1), (2, 3, 1)],
    "rows32": [(32, 3), (33, 2), (2, 70, 3)],
    "matrix1": [(), (4, 2)],
    "column": [(5, 1), (2, 3, 1)],
    "blocks4d": [(1, 1), (2, 3), (2, 3, 4)],
    "sixteens": [(3, 32), (2, 3, 16)],
    "transposed": [(3, 5), (2, 3, 5)],
    "padded 16 x 16": [(16, 16), (3, 20), (33, 16), (2, 5, 5)],
    "padded 16 x 8, high first": [(16, 8), (3, 20), (2, 33, 8)],
    "swizzled32x16": [(128, 4), (1, 1), (130, 5), (2, 129, 4)],
    "swizzled128x4": [(128, 4), (1, 1), (130, 5), (37, 9), (2, 129, 4)],
}


def sample(shape, dtype=torch.uint8):
    numbers = (torch.arange(max(1, torch.tensor(shape).prod().item())) * 37 + 5) % 251
    return numbers.reshape(shape).to(torch.uint8).view(dtype)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_layout_comes_back_and_keeps_what_it_says_on_paper(layout):
    for shape in SHAPES[layout.name]:
        if layout.name == "reciprocal1":
            tensor = torch.exp2(torch.arange(sample(shape).numel())).reshape(shape)
        elif layout.name == "rows32":
            rows = sample((*shape[:-2], -(-shape[-2] // 32), shape[-1]))
            tensor = rows.repeat_interleave(32, dim=-2)[..., : shape[-2], :].contiguous()
        elif layout.name == "spread":
            tensor = sample((*shape[:-2], 1, 1)).expand(shape).contiguous()
        elif layout.name == "offset8":
            tensor = sample(shape, torch.int8)
        else:
            tensor = sample(shape)
        fitted = layout.at(shape)
        stored = fitted.encode(tensor)
        assert tuple(stored.shape) == layout.spec(TensorSpec("x", "F32", shape)).shape
        assert fitted.spec(TensorSpec("x", "F32", shape)) == layout.spec(
            TensorSpec("x", "F32", shape)
        )
        assert checkpoints.same(fitted.decode(stored), tensor)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_stack_is_encoded_as_its_matrices_are(layout):
    """What the pipeline does to small weights of one kind."""
    for shape in (shape for shape in SHAPES[layout.name] if len(shape) in (0, 2)):
        fitted = layout.at(shape)
        dtype = torch.float32 if layout.name == "reciprocal1" else torch.uint8
        stack = sample((3, *shape)).to(dtype)
        if layout.name == "offset8":
            stack = stack.view(torch.int8)
        one_by_one = [fitted.encode(one).reshape(-1) for one in stack]
        assert checkpoints.same(fitted.encode(stack).reshape(-1), torch.cat(one_by_one))


def test_a_layout_for_a_shape_is_one_value():
    """Equal layouts make a weight that is copied, and not computed."""
    assert padded(16, 16) == padded(16, 16) and padded(16, 16) != padded(16, 16, swap=True)
    assert padded(16, 16).at((3, 5)) is padded(16, 16).at((3, 5))
    assert SWIZZLED128X4.at((3, 5)) == SWIZZLED128X4.at((3, 5)) != SWIZZLED128X4.at((3, 6))
    with pytest.raises(ValueError, match="depends on the shape"):
        SWIZZLED128X4.encode(sample((3, 5)))


@pytest.mark.parametrize("shape", SHAPES["swizzled128x4"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_swizzled_scales_lie_where_the_formula_says(shape, dtype):
    scale = sample(shape, dtype)
    stored = SWIZZLED128X4.at(shape).encode(scale)
    assert checkpoints.same(stored, kernels.swizzle(scale))
    rows, cols = shape[-2:]
    flat = stored.view(torch.uint8).reshape(*shape[:-2], -1)
    tiles = -(-cols // 4)
    for r in range(rows):
        for c in range(cols):
            place = (r // 128 * tiles + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
            assert torch.equal(flat[..., place], scale.view(torch.uint8)[..., r, c])
    assert int((flat != 0).sum()) <= scale.numel()


def test_padding_is_zero_and_nibbles_are_exchanged():
    data = torch.tensor([[0x21, 0x43, 0x65]], dtype=torch.uint8)
    stored = padded(2, 4, swap=True).at((1, 3)).encode(data)
    assert stored.tolist() == [[0x12, 0x34, 0x56, 0], [0, 0, 0, 0]]
    assert layouts.SIXTEENS.encode(sample((2, 32))).shape == (2, 2, 16)
    assert layouts.BLOCKS4D.encode(sample((2, 3))).shape == (2, 1, 3, 1)
    assert layouts.COLUMN.encode(sample((2, 1))).shape == (2,)
