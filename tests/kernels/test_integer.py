"""INT8 per channel and INT4 in groups against numpy, whose rint rounds ties to even."""

import numpy as np
import pytest
import torch

from lowbit_kernels import integer
from lowbit_kernels.jit import references
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


@pytest.mark.parametrize("group", integer.GROUPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_int4(dtype, group):
    for name, w in finite(dtype, 6, 256).items():
        x = w.float().numpy().reshape(6, -1, group)
        amax = np.abs(x).max(-1, keepdims=True)
        scale = np.maximum(amax / np.float32(7), np.float32(2.0**-149))
        scale = np.where(amax == 0, np.float32(1), scale)
        with np.errstate(over="ignore"):
            codes = np.clip(np.rint(x / scale), -7, 7).astype(np.int8).reshape(6, 256)
        data, got = integer.quantize_int4(w, group)
        np.testing.assert_array_equal(got.numpy(), scale.squeeze(-1))
        nibbles = codes.astype(np.uint8) & 15
        np.testing.assert_array_equal(data.numpy(), nibbles[:, ::2] | nibbles[:, 1::2] << 4)
        want = torch.from_numpy(codes.astype(np.float32)) * got.repeat_interleave(group, 1)
        assert difference(integer.dequantize(data, got, dtype), want.to(dtype)) == "", name
        stack = torch.stack([w, -w]).reshape(2, 1, 1, 6, 256)
        of_stack, its_scale = integer.quantize_int4(stack, group)
        assert difference(of_stack[0, 0, 0], data) == "" and its_scale.shape[-1] == 256 // group


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_codes_of_int4_are_made_for_scales_as_they_were_rounded(dtype):
    """Through numpy, which has fp16, and bf16 as the upper half of a number that is rounded."""
    least = {torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}[dtype]
    for name, w in finite(dtype, 6, 256).items():
        x = w.float().numpy().reshape(6, -1, 32)
        exact = np.abs(x).max(-1, keepdims=True) / np.float32(7)
        if dtype == torch.float16:
            scale = exact.astype(np.float16).astype(np.float32)
        else:
            bits = exact.view(np.uint32)
            bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
            scale = bits.view(np.float32)
        scale = np.where(scale == 0, np.float32(least), scale)
        scale = np.where(exact == 0, np.float32(1), scale)
        codes = np.clip(np.rint(x / scale), -7, 7).astype(np.int8).reshape(6, 256)
        data, got = integer.quantize_int4(w, 32, dtype)
        np.testing.assert_array_equal(got.numpy(), scale.squeeze(-1))
        assert torch.equal(got.to(dtype).float(), got), name
        nibbles = codes.astype(np.uint8) & 15
        np.testing.assert_array_equal(data.numpy(), nibbles[:, ::2] | nibbles[:, 1::2] << 4)


def test_a_scale_that_its_dtype_has_no_number_for_is_its_least():
    w = torch.full((1, 32), 2.0**-130)
    assert integer.quantize_int4(w, 32, torch.float16)[1].item() == 2.0**-24
    w = torch.full((1, 32), 2.0**-133)
    data, scale = integer.quantize_int4(w, 32, torch.bfloat16)
    assert scale.item() == 2.0**-133 and (data == 0x11).all()


def test_every_tie_of_int4_goes_to_the_even_code():
    w = torch.zeros(1, 32)
    w[0, :29] = torch.arange(-7, 7.5, 0.5)
    data, scale = integer.quantize_int4(w, 32)
    assert scale.item() == 1
    found = integer.dequantize(data, scale, torch.float32)
    np.testing.assert_array_equal(found.numpy(), np.rint(w.numpy()) + 0)
    assert data[0, :2].tolist() == [0xA9, 0xAA], "-7 is 9, -6.5 is -6, A, and so is -6"


def test_every_nibble_decodes_as_two_s_complement():
    packed = torch.arange(256, dtype=torch.uint8).reshape(1, -1)
    values = integer.dequantize(packed, torch.ones(1, 1), torch.float32).reshape(-1, 2)
    byte = torch.arange(256)
    want = torch.stack((byte & 15, byte >> 4), -1)
    assert torch.equal(values, torch.where(want > 7, want - 16, want).float())


def test_int8_in_groups_is_decoded():
    data = torch.arange(-128, 128, dtype=torch.int8).reshape(2, 128)
    for count in (1, 2, 4, 128):
        scale = torch.linspace(0.1, 3, 2 * count).reshape(2, count)
        want = data.float() * scale.repeat_interleave(128 // count, 1)
        assert torch.equal(integer.dequantize(data, scale, torch.float32), want)


def test_what_is_no_number_shows_in_its_scale():
    w = weights(torch.float32)["nan"]
    data, scale = integer.quantize_channel(w)
    assert scale.isnan().squeeze(-1).tolist() == [True] + [False] * 5
    assert (data[0] == 0).all()
    w = weights(torch.float32)["inf"]
    data, scale = integer.quantize_channel(w)
    assert scale.isinf().squeeze(-1).tolist() == [False, True, True] + [False] * 3
    assert (data[1:3] == 0).all()
    assert integer.dequantize_channel(data, scale)[1:3].isnan().all()


def test_what_is_no_number_shows_in_its_group_alone():
    w = torch.ones(1, 128)
    w[0, 33], w[0, 64], w[0, 65] = torch.inf, torch.nan, -torch.inf
    data, scale = integer.quantize_int4(w, 32)
    assert scale.isinf().tolist() == [[False, True, False, False]]
    assert scale.isnan().tolist() == [[False, False, True, False]]
    assert (data[0, 16:48] == 0).all()
    found = integer.dequantize(data, scale)
    assert torch.equal(found.isnan(), (scale.isnan() | scale.isinf()).repeat_interleave(32, 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_slices_on_the_cpu_have_the_reference_s_bytes(dtype):
    for name, w in weights(dtype, 200, 128).items():
        parts = integer.quantize_int4(w, 64)
        back = integer.dequantize(*parts, dtype)
        with references():
            assert not any(map(difference, parts, integer.quantize_int4(w, 64))), name
            assert difference(back, integer.dequantize(*parts, dtype)) == "", name


@pytest.mark.parametrize("shape", [(0, 64), (4, 0), (0, 4, 64), (3, 0, 64)])
def test_nothing_in_nothing_out(shape):
    data, scale = integer.quantize_int4(torch.zeros(shape), 32)
    assert data.shape == (*shape[:-1], shape[-1] // 2)
    assert scale.shape == (*shape[:-1], shape[-1] // 32)
    assert integer.dequantize(data, scale, torch.float16).shape == shape
    assert integer.dequantize_channel(*integer.quantize_channel(torch.zeros(shape))).shape == shape


def test_refusals():
    with pytest.raises(ValueError, match="not 16"):
        integer.quantize_int4(torch.ones(2, 64), 16)
    with pytest.raises(ValueError, match="40 columns are no multiple of 32"):
        integer.quantize_int4(torch.ones(2, 40), 32)
    with pytest.raises(ValueError, match="fp32, bf16 or fp16"):
        integer.quantize_int4(torch.ones(2, 64), 32, torch.float64)
    data = torch.zeros(2, 24, dtype=torch.uint8)
    for scale in (torch.ones(2, 5), torch.ones(2, 4)):
        with pytest.raises(ValueError, match="do not belong to a row of 48 columns"):
            integer.dequantize(data, scale)
