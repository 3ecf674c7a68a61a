"""The schemes that few containers have, FP8 E5M2 and INT4 in groups, through every command."""

import math

import pytest
import torch

from lowbit_kernels import integer
from lowbitcli import api
from lowbitcli.errors import NonFiniteError, UnsupportedError
from tests import checkpoints
from tests.checkpoints import LAYER, single, weight
from tests.verify.planted import poke, told

DOWN, UP = LAYER + "mlp.down_proj.weight", LAYER + "mlp.up_proj.weight"
SCHEMES = {"fp8_tensor_e5m2": (torch.float8_e5m2, 24), "int4_g128": (torch.uint8, 15)}


@pytest.fixture
def source(tmp_path):
    tensors = {DOWN: weight(48, 256), UP: weight(64, 128, 1e-3).float()}
    return single(tmp_path / "source", {**tensors, "model.norm.weight": torch.ones(128)})


def made(source, output, scheme, **chosen):
    request = api.Request(scheme=scheme, container="lowbit", **chosen)
    return api.quantize(source, output, request, device="cpu")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_there_and_back(tmp_path, source, scheme):
    dtype, least = SCHEMES[scheme]
    done = made(source, tmp_path / "out", scheme)
    assert {weight.name for weight in done.plan.quantized} == {DOWN, UP}
    assert checkpoints.read(done.output)[DOWN].dtype == dtype
    assert all(sums.sqnr_db > least for sums in done.errors.values())
    assert told(api.verify(done.output, against=source, device="cpu")) == []
    back = api.dequantize(done.output, tmp_path / "back", dtype="fp32", device="cpu")
    restored, tensors = checkpoints.read(back.output), checkpoints.read(source)
    for name, sums in done.errors.items():
        lost = (restored[name] - tensors[name].float()).double()
        noise = float(lost.square().sum() / tensors[name].double().square().sum())
        assert sums.sqnr_db == pytest.approx(-10 * math.log10(noise), abs=1e-3)
    assert told(api.verify(back.output, against=done.output, device="cpu")) == [
        ("warn", "nothing", "")
    ]
    fake = made(source, tmp_path / "fake", scheme, fake=True)
    assert fake.errors == done.errors


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_other_one_is_made_of_it_as_of_its_values(tmp_path, source, scheme):
    (other,) = SCHEMES.keys() - {scheme}
    first = made(source, tmp_path / "first", scheme)
    direct = made(first.output, tmp_path / "direct", other)
    floats = api.dequantize(first.output, tmp_path / "floats", dtype="fp32", device="cpu")
    twice = made(floats.output, tmp_path / "twice", other)
    found, wanted = checkpoints.read(direct.output), checkpoints.read(twice.output)
    assert found.keys() == wanted.keys()
    if other == "int4_g128":  # the weight is known to be BF16, and so are its scales
        of = checkpoints.read(floats.output)[DOWN]
        data, scale = integer.quantize_int4(of, 128, torch.bfloat16)
        wanted |= {DOWN: data, f"{DOWN}_scale": scale.bfloat16()}
    assert all(checkpoints.same(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_zeros_and_what_is_no_number(tmp_path, scheme):
    w = weight(16, 128)
    source = single(tmp_path / "zeros", {DOWN: torch.zeros_like(w), UP: w})
    done = made(source, tmp_path / "out", scheme)
    assert told(api.verify(done.output, against=source, device="cpu")) == []
    back = api.dequantize(done.output, tmp_path / "back", device="cpu")
    assert (checkpoints.read(back.output)[DOWN] == 0).all()
    w[3, 5] = torch.inf
    source = single(tmp_path / "inf", {DOWN: w, UP: weight(16, 128)})
    with pytest.raises(NonFiniteError, match="1 Inf"):
        made(source, tmp_path / "refused", scheme)


@pytest.mark.parametrize(("byte", "what"), [(0x7C, "Inf"), (0x7F, "NaN")])
def test_verify_finds_a_code_of_e5m2_that_is_no_number(tmp_path, source, byte, what):
    done = made(source, tmp_path / "out", "fp8_tensor_e5m2")
    poke(done.output, DOWN, 300, lambda _: byte)
    found = told(api.verify(done.output, against=source, device="cpu"))
    assert ("fail", "code", DOWN) in found and ("fail", "bound", DOWN) in found, what


def test_verify_finds_a_code_of_int4_that_is_not_used_and_a_neighbour(tmp_path, source):
    done = made(source, tmp_path / "out", "int4_g128")
    poke(done.output, DOWN, 300, lambda byte: byte & 0xF0 | 8)
    found = told(api.verify(done.output, against=source, device="cpu"))
    assert ("warn", "code", DOWN) in found and ("fail", "bound", DOWN) in found
    done = made(source, tmp_path / "again", "int4_g128")
    poke(done.output, DOWN, 300, lambda byte: byte ^ 1)
    assert ("fail", "bound", DOWN) in told(api.verify(done.output, against=source, device="cpu"))


def test_columns_that_are_no_multiple_of_a_group_are_kept(tmp_path):
    source = single(tmp_path / "source", {DOWN: weight(48, 192), UP: weight(64, 128)})
    done = made(source, tmp_path / "out", "int4_g128")
    assert [weight.name for weight in done.plan.quantized] == [UP]
    (kept,) = [weight.kept for weight in done.plan.weights if weight.name == DOWN]
    assert "192 columns are no multiple of 128" in str(kept)
    with pytest.raises(UnsupportedError, match="192 columns"):
        made(source, tmp_path / "strict", "int4_g128", strict=True)
