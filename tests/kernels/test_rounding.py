"""The roundings in torch against search among all values, over whole domains."""

import numpy as np
import pytest
import torch

from lowbit_kernels import rounding
from lowbit_kernels.formats import E2M1_VALUES
from tests.kernels import arithmetic

EVERY_BF16 = torch.arange(65536).to(torch.int16).view(torch.bfloat16)
FP8 = {
    "E4M3": (rounding.to_e4m3, arithmetic.E4M3, torch.float8_e4m3fn),
    "E5M2": (rounding.to_e5m2, arithmetic.E5M2, torch.float8_e5m2),
}


def hard_numbers(values: np.ndarray) -> np.ndarray:
    """Return finite fp32: all bf16, all values, all midpoints and their neighbours, both signs."""
    bf16 = EVERY_BF16[EVERY_BF16.isfinite()].float().numpy()
    near = np.concatenate([values.astype(np.float32), arithmetic.around_midpoints(values)])
    return np.concatenate([bf16, near, -near])


def test_the_definition_gives_the_known_values():
    assert list(arithmetic.E2M1) == list(E2M1_VALUES[:8])
    assert arithmetic.E4M3[-1] == 448 and arithmetic.E4M3[1] == 2.0**-9
    assert arithmetic.E5M2[-1] == 57344 and arithmetic.E5M2[1] == 2.0**-16


@pytest.mark.parametrize("name", FP8)
def test_fp8_codes_are_the_nearest(name):
    to_fp8, values, _ = FP8[name]
    x = hard_numbers(values)
    got = to_fp8(torch.from_numpy(x)).view(torch.uint8).numpy()
    np.testing.assert_array_equal(got, arithmetic.fp8(x, values))


@pytest.mark.parametrize("name", FP8)
def test_every_fp8_code_rounds_to_itself(name):
    to_fp8, values, dtype = FP8[name]
    codes = torch.arange(256, dtype=torch.uint8)
    x = codes.view(dtype).float()
    np.testing.assert_array_equal(x[: len(values)].double().numpy(), values)
    known = x.isfinite()
    assert torch.equal(to_fp8(x).view(torch.uint8)[known], codes[known])


@pytest.mark.parametrize("name", FP8)
def test_fp8_of_what_is_no_number(name):
    to_fp8, values, _ = FP8[name]
    largest = len(values) - 1
    negative_nan = torch.tensor([-0x400000], dtype=torch.int32).view(torch.float32)
    x = torch.cat([torch.tensor([torch.inf, -torch.inf, torch.nan]), negative_nan])
    assert to_fp8(x).view(torch.uint8).tolist() == [largest, largest + 128, 0x7F, 0x7F]


def test_e2m1_codes_are_the_nearest():
    q = hard_numbers(arithmetic.E2M1)
    got = rounding.to_e2m1(torch.from_numpy(q), torch.from_numpy(q < 0)).numpy()
    np.testing.assert_array_equal(got, arithmetic.fp4(q, q))
    assert len(set(got.tolist())) == 16


def test_e2m1_of_what_is_no_number():
    q = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, -1e-40])
    assert rounding.to_e2m1(q, q < 0).tolist() == [7, 15, 7, 0, 0, 8]


def test_e8m0_is_the_next_power_up():
    powers = arithmetic.E8M0.astype(np.float32)
    x = np.concatenate(
        [
            np.abs(EVERY_BF16[EVERY_BF16.isfinite()].float().numpy()),
            np.nextafter(powers, np.float32(0)),
            powers,
            np.nextafter(powers, np.float32(np.inf)),
        ]
    )
    x = x[np.isfinite(x)]
    got = rounding.e8m0_ceil(torch.from_numpy(x)).numpy()
    # What lies above 2^127 has no power of two in the format: the largest stands in.
    np.testing.assert_array_equal(got, np.minimum(np.searchsorted(arithmetic.E8M0, x), 254))


def test_e8m0_of_what_is_no_number():
    x = torch.tensor([0.0, torch.inf, torch.nan])
    assert rounding.e8m0_ceil(x).tolist() == [0, 254, 255]


def test_every_e8m0_code_decodes_exactly():
    codes = torch.arange(256, dtype=torch.uint8)
    value, reciprocal = rounding.e8m0_value(codes), rounding.e8m0_reciprocal(codes)
    assert value[:255].double().tolist() == arithmetic.E8M0.tolist()
    assert reciprocal[:255].double().tolist() == (1 / arithmetic.E8M0).tolist()
    assert value[255].isnan() and reciprocal[255].isnan()


def test_pack_puts_the_even_column_low():
    codes = torch.arange(16, dtype=torch.uint8).reshape(2, 8)
    assert rounding.pack(codes)[0].tolist() == [0x10, 0x32, 0x54, 0x76]
    assert torch.equal(rounding.unpack(rounding.pack(codes)), codes)


def test_tree_sum_adds_the_upper_half_onto_the_lower():
    # 1 + 2^-24 rounds to 1 in fp32: the order shows.
    e = torch.tensor([1.0, 2.0**-24, 2.0**-24, 0.0])
    assert rounding.tree_sum_of(e).item() == 1.0
    assert rounding.tree_sum_of(e[[1, 2, 3, 0]]).item() == 1.0
    assert rounding.tree_sum_of(e[[0, 1, 3, 2]]).item() == 1 + 2.0**-23
