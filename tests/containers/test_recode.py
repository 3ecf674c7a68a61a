"""Between containers only layouts change: no code and no scale is rounded again.

`compressed-tensors` stores the reciprocal of an NVFP4 global scale; one that does not come back
from it moves by one ulp and is counted.
"""

import pytest
import torch

from lowbitcli.api import Request, dequantize, quantize
from lowbitcli.containers.layouts import RECIPROCAL1
from tests import checkpoints
from tests.checkpoints import LAYER, sharded, single, weight

SCHEMES = ("fp8", "fp8-dynamic", "fp8-block", "mxfp8", "mxfp4", "nvfp4", "int8")
CONTAINERS = ("lowbit", "compressed-tensors")
COUNT = 40


def through(source, output, scheme, container):
    return quantize(source, output, Request(scheme=scheme, container=container), device="cpu")


@pytest.fixture
def source(tmp_path):
    """Many matrices, so that some global scales have no exact reciprocal and others have."""
    tensors = {
        f"model.layers.{n}.mlp.down_proj.weight": weight(2, 32, seed=n) for n in range(COUNT)
    }
    tensors["model.norm.weight"] = weight(1, 64)[0]
    return single(tmp_path / "source", tensors)


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name != "nvfp4"])
@pytest.mark.parametrize("first", CONTAINERS)
def test_to_the_other_container_and_back_is_byte_identical(tmp_path, source, scheme, first):
    other = next(name for name in CONTAINERS if name != first)
    one = through(source, tmp_path / "one", scheme, first)
    two = through(one.output, tmp_path / "two", scheme, other)
    three = through(two.output, tmp_path / "three", scheme, first)
    direct = through(source, tmp_path / "direct", scheme, other)
    for a, b in ((one, three), (two, direct)):
        found, wanted = checkpoints.read(a.output), checkpoints.read(b.output)
        assert found.keys() == wanted.keys()
        assert all(checkpoints.same(found[name], wanted[name]) for name in wanted)
        assert checkpoints.config_of(a.output) == checkpoints.config_of(b.output)
    assert (two.moved, three.moved) == (0, 0)
    assert two.errors == three.errors == {}, "nothing was rounded"


@pytest.mark.parametrize("first", CONTAINERS)
def test_nvfp4_moves_nothing_but_global_scales_by_an_ulp(tmp_path, source, first):
    other = next(name for name in CONTAINERS if name != first)
    one = through(source, tmp_path / "one", "nvfp4", first)
    two = through(one.output, tmp_path / "two", "nvfp4", other)
    three = through(two.output, tmp_path / "three", "nvfp4", first)
    before, after = checkpoints.read(one.output), checkpoints.read(three.output)
    assert before.keys() == after.keys()
    moved = 0
    for name, tensor in before.items():
        if name.endswith("_global_scale"):
            ulps = int(tensor.view(torch.int32)) - int(after[name].view(torch.int32))
            assert abs(ulps) <= 1
            moved += ulps != 0
        else:
            assert checkpoints.same(tensor, after[name]), name
    if first == "lowbit":
        assert two.moved == moved
        assert 0 < moved < COUNT, "the sample has both kinds"
        assert three.moved == 0
    else:
        assert two.moved == three.moved == 0, "made for what the reader sees"


def test_what_has_moved_once_moves_no_more(tmp_path, source):
    one = through(source, tmp_path / "a", "nvfp4", "lowbit")
    two = through(one.output, tmp_path / "b", "nvfp4", "compressed-tensors")
    three = through(two.output, tmp_path / "c", "nvfp4", "lowbit")
    four = through(three.output, tmp_path / "d", "nvfp4", "compressed-tensors")
    assert two.moved > 0
    assert four.moved == 0
    a = dequantize(three.output, tmp_path / "e", dtype="fp32", device="cpu")
    b = dequantize(four.output, tmp_path / "f", dtype="fp32", device="cpu")
    found, wanted = checkpoints.read(a.output), checkpoints.read(b.output)
    assert all(checkpoints.same(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantizing_what_is_quantized_so_already_copies_it(tmp_path, scheme, container):
    source = sharded(
        tmp_path / "source",
        {LAYER + "mlp.down_proj.weight": weight(64, 64)},
        {LAYER + "self_attn.o_proj.weight": weight(64, 64, seed=1)},
    )
    one = through(source, tmp_path / "one", scheme, container)
    two = through(one.output, tmp_path / "two", scheme, container)
    before, after = checkpoints.hashes(one.output), checkpoints.hashes(two.output)
    before.pop("lowbit.json"), after.pop("lowbit.json")  # it names the plan, which differs
    assert before == after


def test_the_reciprocal_of_any_scale_is_finite_and_an_ulp_from_exact():
    """Subnormal scales have a reciprocal beyond fp32: the largest is stored instead."""
    generator = torch.Generator().manual_seed(2)
    bits = torch.randint(1, 0x7F7FFFFF, (20_000,), generator=generator, dtype=torch.int32)
    for value in (*bits[:2000].view(torch.float32), torch.tensor(2.0**-149)):
        back = RECIPROCAL1.decode(RECIPROCAL1.encode(value))
        assert 0 < float(back) < float("inf")
        if 2.0**-125 < float(value) < 2.0**125:
            assert abs(int(back.view(torch.int32)) - int(value.view(torch.int32))) <= 1
