"""The interval of every code, at its ends and on both sides of them; and one wrong code among
sixteen million."""

import itertools
import math
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit_kernels import rounding
from lowbit_kernels.formats import E2M1, E4M3, E5M2, F32, INT4, INT8, Format
from lowbitcli import api
from lowbitcli.containers import container
from lowbitcli.containers.container import Declaration
from lowbitcli.containers.lowbit import LOWBIT
from lowbitcli.pipeline.arithmetic import ops_of
from lowbitcli.schemes import SCHEMES, scheme
from lowbitcli.tensors import DATA, GLOBAL_SCALE, SCALE
from lowbitcli.verify.bound import (
    BF16_WRITER,
    EXACT,
    FP32_WRITER,
    Fit,
    codes_of,
    fit,
    is_exact,
    values_of,
)
from tests import checkpoints
from tests.checkpoints import single, weight
from tests.verify.planted import CONTAINERS, DOWN, poke, told


def magnitudes(element: Format) -> list[float]:
    """Return the values of a format from 0 up: that of code n is the n-th."""
    values = values_of(element)[: 1 << (element.bits - 1)]
    return [float(value) for value in values if math.isfinite(value)]


ELEMENTS = {"nvfp4": E2M1, "fp8_tensor": E4M3}


def parts_for(name: str, codes: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return parts with a step of one for codes `[rows, 16n]`."""
    rows, cols = codes.shape
    if name == "nvfp4":
        scale = torch.ones(rows, cols // 16).to(torch.float8_e4m3fn)
        data = rounding.pack(codes.to(torch.uint8))
        return {DATA: data, SCALE: scale, GLOBAL_SCALE: torch.tensor(1.0)}
    return {DATA: codes.to(torch.uint8).view(torch.float8_e4m3fn), SCALE: torch.tensor(1.0)}


def fit_all(name: str, x: list[float], codes: list[int]) -> Fit:
    """Hold elements against codes, padded to blocks of 16 with what fits."""
    pad = -len(x) % 16
    w = torch.tensor([x + [0.0] * pad])
    return fit(scheme(name), w, parts_for(name, torch.tensor([codes + [0] * pad])))


@pytest.mark.parametrize("one", SCHEMES, ids=lambda one: one.name)
def test_every_scheme_has_codes_that_can_be_looked_at(one):
    assert magnitudes(one.element)[-1] == one.element.max
    assert magnitudes(one.element) == sorted(magnitudes(one.element))


def test_two_s_complement_and_formats_with_infinity():
    int8 = replace(scheme("fp8_tensor"), element=INT8)
    codes = torch.tensor([[0, 1, 127, -127, -1, -128]], dtype=torch.int8)
    x = torch.tensor([[0.5, 1.4, 130.0, -127.5, -0.6, -128.0]])
    parts = {DATA: codes, SCALE: torch.tensor(1.0)}
    assert fit(int8, x, parts, widening=None) == (1, (0, 5), 2, 0)
    assert fit(int8, -x, parts, widening=None).outside == 5
    # Others write the least code too, but not for what is nearer to the next one.
    assert fit(int8, x, parts)[:2] == (0, None)
    assert fit(int8, x + torch.tensor([0, 0, 0, 0, 0, 0.6]), parts)[:2] == (1, (0, 5))
    # What that code stands for is not clipped (130 and -127.5 are), what is beyond it is.
    assert fit(int8, x, parts).clipped == 2
    assert fit(int8, x - torch.tensor([0, 0, 0, 0, 0, 0.6]), parts).clipped == 3
    assert values_of(E5M2).isfinite().sum() == 2 * 124
    assert values_of(INT4)[[0, 7, 9, 15]].tolist() == [0, 7, -7, -1]
    assert values_of(INT4)[8].isnan()
    with pytest.raises(ValueError, match="F32"):
        values_of(F32)


@pytest.mark.parametrize("name", ELEMENTS)
def test_every_value_midpoint_and_what_lies_beyond(name):
    """All codes, both signs; what lies beyond a midpoint by 2^-20 is outside, by 2^-22 inside."""
    values = magnitudes(ELEMENTS[name])
    top = len(values) - 1
    sign = 1 << (ELEMENTS[name].bits - 1)
    inside, outside = [], []
    for code, value in enumerate(values):
        low = (values[code - 1] + value) / 2 if code else None
        high = (value + values[code + 1]) / 2 if code < top else None
        inside.append((value, code))
        if low is not None:
            inside += [(low, code), (low * (1 - 2.0**-22), code)]
            outside += [(low * (1 - 2.0**-20), code), (0.0, code), (-value, code), (-low, code)]
        if high is not None:
            inside += [(high, code), (high * (1 + 2.0**-22), code)]
            outside += [(high * (1 + 2.0**-20), code)]
        if high is None:
            inside += [(value * 1.01, code), (value * 1000, code), (math.inf, code)]
        outside.append((math.nan, code))
    inside += [(-x, code | sign) for x, code in inside]
    outside += [(-x, code | sign) for x, code in outside]
    assert fit_all(name, *map(list, zip(*inside, strict=True)))[:2] == (0, None)
    for x, code in outside:
        assert fit_all(name, [x], [code])[:2] == (1, (0, 0)), (x, code)
    assert len(inside) > 5 * top and len(outside) > 5 * top


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nothing_is_in_the_interval_of_nan(code):
    for x in (0.0, 1.0, -1.0, 448.0, math.inf, -math.inf, math.nan):
        assert fit_all("fp8_tensor", [x], [code]).outside == 1


@pytest.mark.parametrize("name", ELEMENTS)
def test_zero_takes_either_sign(name):
    sign = 1 << (ELEMENTS[name].bits - 1)
    tiny = magnitudes(ELEMENTS[name])[1] / 4
    for code in (0, sign):
        assert fit_all(name, [0.0, -0.0, tiny, -tiny], [code] * 4).outside == 0


def test_clipped_elements_are_counted():
    assert fit_all("nvfp4", [6.0, 6.001, 7.0, -9.0, 5.9], [7, 7, 7, 15, 7]) == (0, None, 3, 0)


def test_a_step_of_zero_counts_what_is_lost_and_says_nothing_of_codes():
    parts = parts_for("nvfp4", torch.full((1, 32), 3))
    parts[SCALE].view(torch.uint8)[0, 1] = 0
    w = torch.full((1, 32), 1.5)
    w[0, 31] = 0
    assert fit(scheme("nvfp4"), w, parts) == (0, None, 0, 15)


def test_the_step_is_the_product_rounded():
    """fl(scale * global_scale) may be 0 where neither is."""
    parts = parts_for("nvfp4", torch.zeros(1, 16))
    parts[SCALE] = torch.tensor([[0.25]]).to(torch.float8_e4m3fn)
    parts[GLOBAL_SCALE] = torch.tensor(2.0**-149)
    assert fit(scheme("nvfp4"), torch.ones(1, 16), parts).underflow == 16


def test_a_writer_in_bf16_is_given_more():
    w = torch.full((1, 16), 0.25 * (1 + 2.0**-8))
    parts = parts_for("nvfp4", torch.zeros(1, 16))
    assert fit(scheme("nvfp4"), w, parts).outside == 16
    assert fit(scheme("nvfp4"), w, parts, widening=BF16_WRITER).outside == 0


def test_scales_of_blocks_of_rows_begin_where_the_rows_begin():
    """A scheme of 128x128 blocks, rows from the middle, and a last block that is not whole."""
    blocks = replace(scheme("fp8_channel"), block=(4, 8))
    scale = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
    step = scale.repeat_interleave(4, 0).repeat_interleave(8, 1)[2:7, :20]
    codes = torch.full((5, 20), 0x38, dtype=torch.uint8)  # 1.0
    parts = {DATA: codes.view(torch.float8_e4m3fn), SCALE: scale}
    assert fit(blocks, step, parts, first_row=2).outside == 0
    assert fit(blocks, step, parts, first_row=0).outside == 40
    below = {DATA: parts[DATA][3:], SCALE: scale[1:]}  # scales are those of the rows given
    assert fit(blocks, step[3:], below, first_row=5).outside == 0
    wrong = step.clone()
    wrong[3, 17] *= 1.5
    assert fit(blocks, wrong, parts, first_row=2)[:2] == (1, (3, 17))


@pytest.mark.parametrize("widening", [None, FP32_WRITER])
@pytest.mark.parametrize("name", [one.name for one in SCHEMES])
def test_a_flip_to_a_neighbour_is_outside(name, widening):
    """Every element of a weight, its code moved up by one and down by one. bf16 numbers often lie
    on ties, where only the code that lowbit writes is right; the other weight has none."""
    one = scheme(name)
    w = weight(16, 128 if name == "int4_g128" else 64).float()
    if widening is not None:
        w += torch.rand(w.shape, generator=torch.Generator().manual_seed(1)) * 1e-3
    ops = ops_of(one)
    shared = ops.shared(ops.measure(w), "amax")
    parts = ops.quantize(w, shared, "amax")
    codes = codes_of(one.element, parts[DATA])
    top = len(magnitudes(one.element)) - 1
    sign = 1 << (one.element.bits - 1)
    flips = 0
    for move in (-1, 1):
        moved = (codes & (sign - 1)) + move
        moved = torch.where((moved < 0) | (moved > top), codes & (sign - 1), moved)
        packed = moved | (codes & sign)
        data = packed.to(torch.uint8)
        if one.element.per_byte == 2:
            data = rounding.pack(data)
        changed = {**parts, DATA: data.view(parts[DATA].dtype)}
        expected = int((packed != codes).sum())
        flips += expected
        assert fit(one, w, changed, widening=widening).outside == expected
    assert flips > 0.8 * 2 * w.numel()
    assert fit(one, w, parts, widening=widening).outside == 0


@pytest.mark.parametrize("name", ELEMENTS)
def test_a_tie_has_one_code_where_the_writer_is_known(name):
    values = magnitudes(ELEMENTS[name])
    sign = 1 << (ELEMENTS[name].bits - 1)
    one = scheme(name)
    seen = 0
    for code, (a, b) in enumerate(itertools.pairwise(values)):
        for turn, bit in ((1.0, 0), (-1.0, sign)):
            w = torch.full((1, 16), turn * (a + b) / 2)
            even, odd = (code, code + 1) if code % 2 == 0 else (code + 1, code)
            for other, wrong in ((even, 0), (odd, 16)):
                parts = parts_for(name, torch.full((1, 16), other | bit))
                assert fit(one, w, parts, widening=None).outside == wrong
                assert fit(one, w, parts).outside == 0
                seen += 1
    assert seen == 4 * (len(values) - 1)


def test_only_schemes_whose_order_of_operations_is_known_are_exact():
    assert {one.name for one in SCHEMES if is_exact(one, one.rules[:1])} == set(EXACT)
    assert is_exact(scheme("nvfp4"), ())
    assert is_exact(scheme("nvfp4"), ("amax", "mse"))
    assert not is_exact(scheme("nvfp4"), ("amax", "four_over_six"))
    assert not is_exact(replace(scheme("nvfp4"), name="other"), ())


numbers = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.integers(-96, 96).map(lambda n: n / 16),
    st.sampled_from([0.0, -0.0, 2.0**-149, -(2.0**-126), 6.0, 448.0, 0.25, 2.5, 3.3e38, -5.0]),
)
exponents = st.integers(-149, 120)


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        (one.name, stored)
        for one in SCHEMES
        for stored in CONTAINERS
        if one.name in container(stored).bindings
    ],
)
@settings(max_examples=150, deadline=None)
@given(
    values=st.lists(numbers, min_size=1, max_size=24),
    exponent=exponents,
    scaled=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_what_the_arithmetic_writes_is_inside(name, stored, values, exponent, scaled, dtype):
    one = scheme(name)
    w = torch.tensor(values, dtype=torch.float32).repeat(256)[:256].reshape(2, 128)
    if scaled:
        w = (w.clamp(-448, 448).double() * 2.0**exponent).float()
    w = w.clamp(-3e38, 3e38).to(dtype)
    w = torch.where(torch.isfinite(w), w, torch.zeros_like(w))
    ops = ops_of(one)
    shared = ops.shared(ops.measure(w), "amax")
    if shared is not None:  # as the container's reader will see it
        bound = container(stored).bindings[name]
        layout = bound[GLOBAL_SCALE if GLOBAL_SCALE in bound else SCALE].layout
        shared = layout.decode(layout.encode(shared))
    parts = ops.quantize(w, shared, "amax")
    for widening in (None, FP32_WRITER) if is_exact(one, ()) else (FP32_WRITER,):
        found = fit(one, w, parts, widening=widening)
        assert (found.outside, found.first) == (0, None)


@pytest.mark.parametrize("name", [one.name for one in SCHEMES])
def test_a_stack_of_matrices_is_looked_at_matrix_by_matrix(tmp_path, name):
    """Three matrices, each with scales of its own, of more rows than a band has."""
    one = scheme(name)
    w = torch.stack([weight(300, 128, 10.0**n, seed=n) for n in range(3)])
    ops = ops_of(one)
    parts = ops.quantize(w, ops.shared(ops.measure(w), "amax"), "amax")
    bound = LOWBIT.bindings[name]
    said = LOWBIT.declare([Declaration("m.weight", one, tuple(w.shape), "BF16")], None)
    stored = {f"m{bound[part].suffix}": tensor for part, tensor in parts.items()}
    output, source = tmp_path / "out.safetensors", tmp_path / "source.safetensors"
    checkpoints.write(output, stored, said.metadata)
    checkpoints.write(source, {"m.weight": w})
    assert told(api.verify(output, against=source, device="cpu")) == []
    row_bytes = 128 // one.element.per_byte
    poke(output, "m.weight", (2 * 300 + 287) * row_bytes + 5, lambda byte: byte ^ 0x01)
    found = api.verify(output, against=source, device="cpu")
    assert told(found) == [("fail", "bound", "m.weight")]
    (row,) = found.weights
    assert row.figures is not None
    assert row.figures.first_outside == (2, 287, 5 * one.element.per_byte)


def test_one_flipped_code_among_sixteen_million(tmp_path):
    """sgl-project/sglang PR#28974: the mean error hides it. One core, under 20 seconds."""
    source = single(tmp_path / "source", {DOWN + "weight": weight(4096, 4096)})
    output = tmp_path / "out"
    api.quantize(source, output, device="cpu")
    (output / "lowbit.json").unlink()
    clean = api.verify(output, against=source, device="cpu")
    assert told(clean) == []
    poke(output, DOWN + "weight_packed", 2048 * 3333 + 1234, lambda byte: byte ^ 0x10)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    started = time.process_time()
    try:
        found = api.verify(output, against=source, device="cpu")
    finally:
        torch.set_num_threads(threads)
    assert time.process_time() - started < 20
    assert told(found) == [("fail", "bound", DOWN + "weight")]
    assert found.problems[0].message.startswith("1 of 16777216 elements are not in the interval")
    (row,), (before,) = found.weights, clean.weights
    assert row.figures is not None and before.figures is not None
    assert row.figures.first_outside == (3333, 2469)
    assert row.figures.sqnr_db == pytest.approx(before.figures.sqnr_db, abs=0.01)
