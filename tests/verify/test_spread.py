"""How errors are spread: bins, sums, zeros, scales and the worst block against plain arithmetic,
and the same for every cut."""

import math

import pytest
import torch

from lowbit_kernels import error_looks
from lowbit_kernels.formats import E2M1, E4M3, E5M2, INT4, INT8
from lowbitcli.pipeline.arithmetic import ops_of
from lowbitcli.schemes import BY_NAME
from lowbitcli.tensors import DATA, GLOBAL_SCALE, SCALE
from lowbitcli.verify import spread
from lowbitcli.verify.bound import FP32_WRITER, half_gap, ruler, step_of
from lowbitcli.verify.spread import BINS, Spread

NAMES = ["fp8_tensor", "fp8_channel", "fp8_block128", "mxfp8", "mxfp4", "nvfp4", "int8_channel"]


def weight(rows: int = 384, cols: int = 256) -> torch.Tensor:
    w = torch.randn(rows, cols, generator=torch.Generator().manual_seed(7))
    w[100, 37] = 60.0
    return w.bfloat16()


def parts_of(name: str, w: torch.Tensor) -> dict[str, torch.Tensor]:
    ops, rule = ops_of(BY_NAME[name]), BY_NAME[name].rules[0]
    shared = None if ops.measure is None else ops.shared(ops.measure(w), rule)
    return dict(ops.quantize(w, shared, rule))


def cut(name: str, parts: dict[str, torch.Tensor], start: int, stop: int):
    high, scale = BY_NAME[name].block[0], parts[SCALE]
    return {
        **parts,
        DATA: parts[DATA][start:stop],
        SCALE: scale if high is None else scale[start // high : -(-stop // high)],
    }


def seen(name: str, w: torch.Tensor, parts: dict[str, torch.Tensor], first=0, lead=()) -> Spread:
    scheme = BY_NAME[name]
    v = ops_of(scheme).dequantize(parts, torch.float32)
    step, held_to = step_of(scheme, parts, first, len(w)), ruler(scheme.element, FP32_WRITER)
    look = error_looks.look(w, v, parts[DATA], step, held_to, scheme.block)
    return spread.seen(scheme, look, w, v, parts, first, lead)


def whole(name: str, w: torch.Tensor) -> Spread:
    return seen(name, w, parts_of(name, w))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("high", [128, 256])
def test_no_cut_changes_anything(name, high):
    w = weight()
    parts, total = parts_of(name, w), Spread()
    for start in range(0, w.shape[0], high):
        stop = min(start + high, w.shape[0])
        total = total.plus(seen(name, w[start:stop], cut(name, parts, start, stop), start))
    assert total == whole(name, w)


@pytest.mark.parametrize("name", NAMES)
def test_figures_are_what_plain_arithmetic_says(name):
    scheme, w = BY_NAME[name], weight()
    parts, found = parts_of(name, w), whole(name, w)
    rows, cols = w.shape
    width = scheme.block[1] or cols
    step = step_of(scheme, parts, 0, rows).double()
    step = step.unsqueeze(-1).expand(rows, cols // width, width).reshape(rows, cols)
    v = ops_of(scheme).dequantize(parts, torch.float32).double()
    e = (v - w.double()) / step
    half = half_gap(scheme.element)
    assert sum(found.counts) == w.numel()
    mean, bias = found.in_steps(found.far, half), found.in_steps(found.bias, half)
    assert mean == pytest.approx(float(e.abs().mean()), rel=1e-5)
    assert bias == pytest.approx(float(e.mean()), abs=1e-5 * half)
    assert found.zeros == int(((v == 0) & (w != 0)).sum())
    inward = (v.float() - w.float()).double() / step / half * (1 - 2.0**-18)
    expected = torch.histogram(inward, BINS, range=(-1.0, 1.0)).hist
    assert sum(abs(a - b) for a, b in zip(found.counts[1:-1], expected.tolist(), strict=True)) < 99
    high = scheme.block[0] or 1
    square = (v - w.double()).square().reshape(rows // high, high, cols // width, width)
    norms = square.sum((1, 3)).sqrt()
    down, across = divmod(int(norms.argmax()), norms.shape[1])
    worst = found.worst
    assert worst is not None and found.blocks == norms.numel()
    assert (worst.place, worst.shape) == ((down * high, across * width), (high, width))
    assert worst.error == pytest.approx(float(norms[down, across]), rel=1e-5)
    block = w[down * high : (down + 1) * high, across * width : (across + 1) * width].double()
    assert worst.largest == float(block.abs().max())
    assert worst.relative == pytest.approx(worst.error / float(block.norm()), rel=1e-5)


def test_half_of_the_widest_gap():
    found = [half_gap(element) for element in (E2M1, E4M3, E5M2, INT8, INT4)]
    assert found == [1.0, 16.0, 4096.0, 0.5, 0.5]


def test_the_worst_block_is_the_one_with_the_outlier():
    worst = whole("nvfp4", weight()).worst
    assert worst is not None
    assert (worst.place, worst.shape, worst.largest) == ((100, 32), (1, 16), 60.0)
    lead = seen("nvfp4", weight(), parts_of("nvfp4", weight()), 128, (3, 1)).worst
    assert lead is not None and lead.place == (3, 1, 228, 32)


def test_a_block_at_a_ragged_edge_is_as_small_as_it_is():
    w = torch.zeros(130, 140)
    w[129, 139] = 1.0
    w[129, 138] = 0.03
    worst = whole("fp8_block128", w).worst
    assert worst is not None
    assert (worst.place, worst.shape) == ((128, 128), (2, 12))


def test_errors_lie_in_the_bins_of_their_size():
    w = torch.zeros(1, 16)
    w[0, :6] = torch.tensor([6.0, 5.5, 4.5, 0.25, 5.0, 7.0])
    values = torch.tensor([6.0, 6.0, 4.0, 0.0, 4.0, 6.0])
    codes = torch.tensor([7, 7, 6, 0, 6, 7] + [0] * 10)
    parts = {
        DATA: (codes[0::2] | codes[1::2] << 4).to(torch.uint8)[None],
        SCALE: torch.ones(1, 1).to(torch.float8_e4m3fn),
        GLOBAL_SCALE: torch.tensor(1.0),
    }
    found = seen("nvfp4", w, parts)
    bins = {n - 1: count for n, count in enumerate(found.counts) if count}
    # errors 0 (eleven times), 0.5, -0.5, -0.25; -1 twice: a tie, and one that was clipped
    assert bins == {16: 11, 23: 1, 8: 1, 12: 1, 0: 2}
    assert found.in_steps(found.far, 1.0) == float((values - w[0, :6]).abs().sum()) / 16
    assert found.in_steps(found.bias, 1.0) == float((values - w[0, :6]).sum()) / 16
    assert found.zeros == 1
    w[0, 5], w[0, 6] = 7.25, -9.0
    bins = seen("nvfp4", w, parts).counts
    assert (bins[0], bins[-1]) == (1, 1)


def test_a_block_without_a_step_is_lost_and_in_no_bin():
    w = weight(128, 64)
    w[6, :16] = 0
    parts = parts_of("nvfp4", w)
    scale = parts[SCALE].float()
    scale[100, 2] = scale[6, 0] = 0
    parts[SCALE] = scale.to(torch.float8_e4m3fn)
    found = seen("nvfp4", w, parts)
    assert (found.lost, sum(found.counts)) == (1, 128 * 64 - 32)
    assert found.worst is not None
    assert (found.worst.place, found.worst.relative) == ((100, 32), 1.0)
    assert found.worst.error == pytest.approx(float(w[100, 32:48].float().norm()), rel=1e-6)
    assert found.least == float(scale[scale > 0].min()) and found.most == float(scale.max())


def test_numbers_that_are_not_finite_do_not_stop_it():
    w = weight(128, 64)
    parts = parts_of("fp8_channel", w)
    parts[DATA].view(torch.uint8)[3, 4] = 0x7F
    w[0, 0] = math.inf
    found = seen("fp8_channel", w, parts)
    assert sum(found.counts) == w.numel()
    assert found.worst is not None


def test_of_blocks_that_are_equally_bad_the_first_stays():
    w = weight(256, 64)
    w[128:] = w[:128]
    parts = parts_of("mxfp8", w)
    worst = whole("mxfp8", w).worst
    assert worst is not None and worst.place[0] < 128
    above, below = (seen("mxfp8", w[n : n + 128], cut("mxfp8", parts, n, n + 128), n)
                    for n in (0, 128))  # fmt: skip
    assert above.plus(below).worst == worst == above.worst != below.worst


def test_nothing_is_nothing():
    assert Spread().plus(Spread()) == Spread()
    assert Spread().in_steps(0, 1.0) is None
