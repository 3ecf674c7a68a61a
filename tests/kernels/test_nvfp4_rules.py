"""How NVFP4 scales may be chosen: searches against all candidates in fp64, what rules promise."""

import numpy as np
import pytest
import torch

from lowbit_kernels import mx, nvfp4, nvfp4_search, nvfp4_te
from lowbit_kernels.importance import column_weights, exponents_of, values_of
from tests.kernels import arithmetic
from tests.kernels.samples import finite

SAMPLES = ("gauss", "wide", "sparse", "ties_scaled", "subnormal", "huge")


def errors_of(x: np.ndarray, g: float, h: np.ndarray) -> np.ndarray:
    """Return the weighted squared error of each block with each of the codes 1 to 126, in fp64."""
    blocks = np.abs(x.astype(np.float64).reshape(-1, 16))
    steps = (arithmetic.E4M3[1:].astype(np.float32) * np.float32(g)).astype(np.float64)
    result = np.full((len(blocks), 126), np.inf)
    for index, step in enumerate(steps):
        if step:
            q = (blocks / step).astype(np.float32)
            values = arithmetic.E2M1[arithmetic.nearest(arithmetic.E2M1, q)]
            # Rounded to fp32, which among subnormals is coarse.
            value = (values * step).astype(np.float32).astype(np.float64)
            result[:, index] = ((value - blocks) ** 2 * h).sum(-1)
    return result


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", SAMPLES)
def test_mse_is_the_least_within_its_window(name, weighted):
    w = finite(torch.float32)[name]
    importance = torch.linspace(0, 2, 96) ** 4 if weighted else None
    radius = 12 if weighted else 6
    _, first, g = nvfp4.quantize(w)
    _, best, _ = nvfp4.quantize(w, None, "mse", importance)
    h = np.ones((6, 1))
    if importance is not None:
        h = column_weights(importance, 16).double().numpy()
    errors = errors_of(w.numpy(), g.item(), np.tile(h, (6, 1)))
    errors /= (
        np.maximum(np.abs(w.double().numpy()).reshape(-1, 16).max(-1), 2.0**-200)[:, None] ** 2
    )
    first, best = (t.view(torch.uint8).flatten().numpy().astype(int) for t in (first, best))
    assert (np.abs(best - first) <= radius).all() and (best >= 1).all() and (best <= 126).all()
    rows = np.arange(len(first))
    for row in rows:
        near = errors[row, max(first[row] - radius, 1) - 1 : min(first[row] + radius, 126)]
        assert errors[row, best[row] - 1] <= near.min() * (1 + 1e-6) + 1e-30
    if name in ("gauss", "wide"):
        assert (best != first).any()


@pytest.mark.parametrize("side", [-1, 1])
def test_a_window_reaches_as_far_as_it_says_and_no_farther(side):
    w = finite(torch.float32)["gauss"]
    _, scale, g = nvfp4.quantize(w, None, "mse")
    best = scale.view(torch.uint8).reshape(-1).int()
    blocks, amax = w.reshape(-1, 16), w.reshape(-1, 16).abs().amax(-1)
    for distance, reached in ((6, True), (7, False)):
        first = (best - side * distance).to(torch.uint8)
        found = nvfp4_search.best_codes_of(blocks, amax, first, g, 6, None).int()
        assert torch.equal(found[7:8], best[7:8]) == reached


def test_all_is_at_least_as_good_as_a_window():
    w = finite(torch.float32, 32)["wide"]
    error = {}
    for rule in ("amax", "mse", "mse_all"):
        packed, scale, g = nvfp4.quantize(w, None, rule)
        error[rule] = (nvfp4.dequantize(packed, scale, g, torch.float32) - w).square().sum().item()
    assert error["mse_all"] <= error["mse"] * (1 + 1e-6)
    assert error["mse"] < error["amax"]


def test_four_over_six_helps_and_keeps_to_256():
    w = finite(torch.float32, 32)["gauss"]
    error = {}
    for rule in ("amax", "four_over_six"):
        packed, scale, g = nvfp4.quantize(w, None, rule)
        error[rule] = (nvfp4.dequantize(packed, scale, g, torch.float32) - w).square().sum().item()
    assert scale.float().max() <= 384
    assert error["four_over_six"] < error["amax"]


def test_two_d_repeats_each_scale_on_sixteen_rows():
    w = finite(torch.float32, 40)["wide"]
    _, scale, _ = nvfp4.quantize(w, None, "2d")
    scale = scale.view(torch.uint8)
    for top in (0, 16, 32):
        assert (scale[top : top + 16] == scale[top]).all()
    assert len(set(scale.flatten().tolist())) > 3


@pytest.mark.parametrize("exponent", [60, 127, 200])
def test_amax_comes_back_out_of_the_global_scale_of_four_over_six(exponent):
    mantissas = torch.arange(2**23, dtype=torch.int32)
    amax = (mantissas | exponent << 23).view(torch.float32)
    back = nvfp4_te.global_scale_of(amax, 256.0) * 1536.0
    # Exactly where the last bit is free, as in every bf16 and fp16; else to the last place.
    assert torch.equal(back[::2], amax[::2])
    assert (back.view(torch.int32) - amax.view(torch.int32)).abs().max() == 1


@pytest.mark.parametrize("rule", ["mse", "mse_all", "four_over_six", "2d"])
def test_a_given_global_scale_is_the_one_that_counts(rule):
    w = finite(torch.bfloat16)["wide"]
    packed, scale, g = nvfp4.quantize(w, None, rule)
    if rule == "2d":
        return_of = nvfp4.quantize(w, g, rule)[1].view(torch.uint8).int()
        assert (return_of - scale.view(torch.uint8).int()).abs().max() <= 1
        return
    again, same, given = nvfp4.quantize(w, g, rule)
    assert torch.equal(again, packed) and torch.equal(given, g)
    assert torch.equal(same.view(torch.uint8), scale.view(torch.uint8))
    _, doubled, _ = nvfp4.quantize(w, g * 2, rule)
    assert not torch.equal(doubled.view(torch.uint8), scale.view(torch.uint8))


@pytest.mark.parametrize("rule", ["mse", "mse_all", "four_over_six", "2d"])
def test_zeros_stay_zeros(rule):
    packed, scale, g = nvfp4.quantize(torch.zeros(4, 32), None, rule)
    assert g == 1 and (packed == 0).all() and scale.float().isfinite().all()


def test_column_weights_are_powers_of_two_by_block():
    h = torch.tensor([4.0, 2.83, 2.82, 1.0, 0.0] + [1.0] * 11 + [1e-3] * 16)
    weights = column_weights(h, 16)
    assert weights[0, :5].tolist() == [1.0, 0.5 if 2.83 < 2.0**1.5 else 1.0, 0.5, 0.25, 2.0**-24]
    assert (weights[1] == 1).all()
    for useless in (torch.zeros(32), torch.full((32,), torch.nan), -h):
        assert (column_weights(useless, 16) == 1).all()


def test_refusals():
    w = torch.zeros(4, 32)
    with pytest.raises(ValueError, match="importance"):
        nvfp4.quantize(w, importance=torch.ones(32))
    with pytest.raises(ValueError, match="importance"):
        nvfp4.quantize(w, None, "mse", torch.ones(31))
    with pytest.raises(ValueError, match="importance"):
        mx.quantize_mxfp4(w, "even", importance=torch.ones(32))


def test_importance_is_kept_in_exponents():
    h = torch.tensor([0.0, 1e-45, 2.0**-126, 1.0, 2.0**0.5 + 1e-6, 2.0**0.5 - 1e-6, 3e38])
    exponents = exponents_of(h)
    assert exponents.dtype == torch.int8
    assert exponents.tolist() == [-128, -126, -126, 0, 1, 0, 127]
    assert values_of(exponents).tolist() == [0.0, *(2.0**e for e in exponents.tolist()[1:])]
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(320, generator=generator).exp2() ** 8
    stored = values_of(exponents_of(h.double()))
    for block in (16, 32):
        assert torch.equal(column_weights(stored, block), column_weights(h, block))
    for bad in (torch.nan, torch.inf, -1.0):
        with pytest.raises(ValueError, match="finite"):
            exponents_of(torch.tensor([1.0, bad]))


def test_columns_that_count_are_nearer():
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(64, 64, generator=generator)
    h = torch.where(torch.arange(64) % 4 == 0, 64.0, 1.0)
    for quantize, back in (
        (lambda h: nvfp4.quantize(w, None, "mse", h), nvfp4.dequantize),
        (lambda h: mx.quantize_mxfp4(w, "mse", importance=h), mx.dequantize),
    ):
        plain, weighted = (back(*quantize(one), torch.float32) - w for one in (None, h))
        assert (weighted**2 * h).sum() < (plain**2 * h).sum()
        assert (weighted**2).sum() > (plain**2).sum()
