"""Error sums against numpy in fp64, steps against a search through the grid, and cuts that must not
be seen in either."""

import importlib.util

import numpy as np
import pytest
import torch

from lowbit_kernels import cpu_figures, error, error_figures
from tests.kernels import arithmetic
from tests.kernels.agreement import PARTS
from tests.kernels.samples import finite

HAS_NUMBA = importlib.util.find_spec("numba") is not None
NEEDS_NUMBA = pytest.mark.skipif(not HAS_NUMBA, reason="numba is not installed (extra cpu)")
GRIDS = {"E2M1": arithmetic.E2M1, "E4M3": arithmetic.E4M3, "INT8": np.arange(128.0)}
GRIDS |= {"E5M2": arithmetic.E5M2, "INT4": np.arange(8.0)}
ONES = {"E2M1": 0x22, "E4M3": 0x38, "E5M2": 0x3C, "INT8": 1, "INT4": 0x11}  # codes of one


def test_sums_are_those_of_the_definition():
    w, v = finite(torch.float32, 150, 96)["gauss"], finite(torch.float32, 150, 96)["gauss"] * 1.01
    found = error.sums(w, v)
    x, y = w.double().numpy(), v.double().numpy()
    assert found.count == w.numel() and found.steps == 0
    want = [((y - x) ** 2).sum(), (x * x).sum(), (y * y).sum(), (x * y).sum()]
    np.testing.assert_allclose(
        [found.error, found.signal, found.value, found.product], want, rtol=1e-13
    )
    assert found.largest == np.abs(y - x).max()
    ordered = error.figures(w, v)
    assert ordered.shape == (2, 6)
    np.testing.assert_allclose(ordered[:, :4].sum(0).numpy(), want, rtol=1e-13)
    assert [one.count for one in error.bands(w, v)] == [128 * 96, 22 * 96]


def test_the_order_within_a_band_is_the_one_described():
    w = torch.zeros(128, 64)
    v = w.clone()
    # 4 + tiny^2 is 4, but two of them that meet first are more than half a last place of 4.
    tiny = 1.25 * 2.0**-26
    v[0, 0], v[16, 0], v[32, 0] = 2.0, tiny, tiny
    assert error.figures(w, v)[0, 0].item() == 4.0
    v[16, 0], v[32, 0] = 0.0, 0.0
    v[4, 0], v[12, 0] = tiny, tiny
    assert error.figures(w, v)[0, 0].item() == 4.0 + 2.0**-50
    v[4, 0], v[12, 0] = 0.0, 0.0
    v[0, 16], v[0, 48] = tiny, tiny
    assert error.figures(w, v)[0, 0].item() == 4.0 + 2.0**-50


@pytest.mark.parametrize("call", [error.figures, lambda w, v: torch.tensor(_listed(w, v))])
def test_figures_do_not_depend_on_how_rows_are_cut(call):
    w = finite(torch.float32, 300, 80)["wide"]
    v = w * 1.01
    whole = call(w, v)
    for cut in (128, 256):
        parts = torch.cat([call(w[:cut], v[:cut]), call(w[cut:], v[cut:])])
        assert torch.equal(parts, whole)


def _listed(w, v):
    return [[b.count, b.error, b.signal, b.value, b.product] for b in error.bands(w, v)]


@pytest.mark.parametrize("name", ["gauss", "ties", "sparse", "huge"])
@pytest.mark.parametrize("scheme", PARTS)
def test_steps_are_distances_in_the_grid_of_the_element(scheme, name):
    ops, element, block = PARTS[scheme]
    w = torch.stack([finite(torch.bfloat16)[name], finite(torch.bfloat16)["wide"]])
    parts = ops.quantize(w, ops.shared(ops.measure(w), "amax"), "amax")
    value, _ = error_figures.decoded(w, error_figures.placed(w, parts, element, block))
    again = ops.dequantize(parts, torch.float32)
    assert torch.equal(value.view(torch.int32), again.view(torch.int32))
    found = error.sums_of_parts(w, parts, element, block)
    assert found.steps == pytest.approx(_most(w, value, parts, element, block), rel=1e-6)
    assert found.largest == (value.double() - w.double()).abs().max().item()
    if name != "huge" and scheme != "fp8_block":
        # The quotient was rounded to fp32 before the code was, and is up to 127 steps.
        assert 0.4 < found.steps <= 0.5 + 2**-16


def _most(w, value, parts, element, block) -> float:
    """Return the largest error in steps by a search through the grid."""
    one = torch.full_like(parts["data"].view(torch.uint8), ONES[element.name])
    ones = {**parts, "data": one.view(parts["data"].dtype)}
    step, _ = error_figures.decoded(w, error_figures.placed(w, ones, element, block))
    x, v, s = (t.double().numpy().ravel() for t in (w, value, step))
    grid = GRIDS[element.name]
    kept = s > 0
    x, v, s = x[kept], v[kept], s[kept]
    place = arithmetic.nearest(grid, np.abs(v / s))
    inward = np.where(v < 0, v < x, v > x) & (place > 0)
    low = np.where(inward, place - 1, np.minimum(place, len(grid) - 2))
    low = np.minimum(low, len(grid) - 2)
    return (np.abs(v - x) / ((grid[low + 1] - grid[low]) * s)).max()


def test_a_code_beside_the_nearest_is_more_than_half_a_step_off():
    ops, element, block = PARTS["nvfp4"]
    w = finite(torch.float32)["gauss"]
    parts = ops.quantize(w, ops.shared(ops.measure(w), "amax"), "amax")
    before = error.sums_of_parts(w, parts, element, block).steps
    low = parts["data"][3, 5] & 7
    parts["data"][3, 5] += 1 if low < 7 else -1
    assert before <= 0.5 < error.sums_of_parts(w, parts, element, block).steps


@pytest.mark.parametrize("shape", ((3, 64, 128), (5, 130, 96), (1, 16, 16), (40, 7, 200)))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_bands_of_a_stack_are_those_of_its_matrices(shape, dtype):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    v = w.float() * 1.01
    found = error.bands_of_stack(w, v)
    assert found == [error.bands(one, of) for one, of in zip(w, v, strict=True)]
    assert [sum(one.count for one in own) for own in found] == [w[0].numel()] * len(w)
    with pytest.raises(ValueError, match="a stack has the shape"):
        error.bands_of_stack(w[0], v[0])


@pytest.mark.parametrize("shape", ((1, 16), (130, 96), (5000, 32)))
def test_the_total_of_bands_is_one_added_to_the_other(shape):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    v = w * torch.linspace(0.9, 1.2, shape[1])
    total = error.Sums()
    for one in error.bands(w, v):
        total = total.plus(one)
    assert error.total_of_bands(error.figures_of_bands(w, v), w.numel()) == total
    assert error.total_of_bands(torch.zeros(0, 6).double(), 0) == error.Sums()
    for found, count in ((torch.zeros(3).double(), 3), (torch.zeros(3, 6), 3)):
        with pytest.raises(ValueError, match=r"figures are fp64 \[bands, 6\]"):
            error.total_of_bands(found, count)
    with pytest.raises(ValueError, match="no -3 elements"):
        error.total_of_bands(torch.zeros(1, 6).double(), -3)


@pytest.mark.parametrize("row", (3, 200))
def test_the_largest_is_nan_where_one_is(row):
    w = torch.randn(384, 32, generator=torch.Generator().manual_seed(2))
    v = w + 0.01
    w[row, 0] = torch.nan
    found = error.total_of_bands(error.figures_of_bands(w, v), w.numel())
    assert np.isnan([error.sums(w, v).largest, found.largest]).all()


def test_nan_comes_through_and_nothing_is_nothing():
    w = torch.zeros(4, 16)
    v = w.clone().index_fill_(1, torch.tensor([3]), torch.nan)
    assert np.isnan(error.figures(w, v)[0, :5:4].numpy()).all()
    assert not error.sums(w, v).is_finite
    assert error.sums(torch.zeros(0, 16), torch.zeros(0, 16)) == error.Sums()


def test_refusals():
    with pytest.raises(ValueError, match="shapes"):
        error.sums(torch.zeros(2, 2), torch.zeros(2, 3))
    ops, element, block = PARTS["nvfp4"]
    parts = ops.quantize(torch.ones(4, 32), torch.tensor(1.0), "amax")
    with pytest.raises(ValueError, match="codes"):
        error.sums_of_parts(torch.ones(4, 64), parts, element, block)
    with pytest.raises(ValueError, match="scales"):
        error.sums_of_parts(torch.ones(4, 32), parts, element, (1, 32))


@pytest.mark.parametrize("compiled", (False, pytest.param(True, marks=NEEDS_NUMBA)))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
def test_figures_on_the_cpu_are_those_of_the_reference(monkeypatch, dtype, compiled):
    monkeypatch.setattr(cpu_figures, "_LARGE", 0)
    monkeypatch.setattr(cpu_figures, "_COLS", 128)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setenv("LOWBIT_NUMBA", "1" if compiled else "0")
    for rows, cols in ((300, 80), (1, 1), (130, 323), (256, 256), (384, 1100)):
        w = torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows)).to(dtype)
        v = w.float() * 1.01
        for value in (0.0, torch.nan, torch.inf):
            v[-1, -1] = value
            found = cpu_figures.figures(w, v)
            want = error_figures._figures_reference(w, v, None)
            assert torch.equal(found.isnan(), want.isnan())
            assert torch.equal(found.nan_to_num(), want.nan_to_num())
    assert (cpu_figures._compiled(w, v) is not None) == compiled
    assert cpu_figures.figures(w[:0], v[:0]).shape == (0, 6)
