"""Every pair of containers that hold the same scheme: from the first to the second and back, not a
byte of a tensor changes, but a global scale of NVFP4 that has no exact reciprocal."""

import itertools

import pytest
import torch

from lowbitcli.api import Request, dequantize, quantize
from lowbitcli.containers import CONTAINERS
from tests import checkpoints
from tests.checkpoints import LAYER, single, weight

WRITERS = {c.name: c for c in CONTAINERS if c.writes and c.stacks != "only"}
TRIPS = [
    (one, other, scheme)
    for one, other in itertools.permutations(WRITERS, 2)
    for scheme in WRITERS[one].writes
    if scheme in WRITERS[other].writes
    # what is written with scales of activations alone is held in test_static_peers
    and ("static",) not in (WRITERS[one].activations[scheme], WRITERS[other].activations[scheme])
]


def test_no_pair_is_forgotten():
    """gpt-oss holds nothing but stacks, which `tests/cases` send there and back."""
    assert {one for one, _, _ in TRIPS} == set(WRITERS)
    assert len(TRIPS) == len({*TRIPS}) > 40


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    tensors = {
        LAYER + "mlp.down_proj.weight": weight(200, 256),
        LAYER + "self_attn.q_proj.weight": weight(64, 128, 0.1),
        LAYER + "self_attn.k_proj.weight": weight(33, 128, 3.0),
        "model.norm.weight": weight(1, 64)[0],
    }
    return single(tmp_path_factory.mktemp("trips") / "source", tensors)


def through(source, output, scheme, container):
    request = Request(scheme=scheme, container=container)
    return quantize(source, output, request, device="cpu")


@pytest.mark.parametrize(("one", "other", "scheme"), TRIPS)
def test_there_and_back(tmp_path, source, one, other, scheme):
    first = through(source, tmp_path / "a", scheme, one)
    second = through(first.output, tmp_path / "b", scheme, other)
    third = through(second.output, tmp_path / "c", scheme, one)
    assert second.errors == third.errors == {}, "nothing was rounded"
    before, after = checkpoints.read(first.output), checkpoints.read(third.output)
    assert before.keys() == after.keys()
    moved = 0
    for name, tensor in before.items():
        if checkpoints.same(tensor, after[name]):
            continue
        assert scheme == "nvfp4" and "compressed-tensors" in (one, other)
        ulps = tensor.view(torch.int32) - after[name].view(torch.int32)
        assert tensor.dim() <= 1 and abs(int(ulps)) == 1, name
        moved += 1
    assert moved <= second.moved + third.moved
    assert (second.moved, third.moved) == (0, 0) or scheme == "nvfp4"


@pytest.mark.parametrize(("one", "other", "scheme"), TRIPS)
def test_both_stand_for_the_same_numbers(tmp_path, source, one, other, scheme):
    if one > other:
        return
    first = through(source, tmp_path / "a", scheme, one)
    second = through(first.output, tmp_path / "b", scheme, other)
    found = [
        checkpoints.read(dequantize(x.output, tmp_path / n, dtype="fp32", device="cpu").output)
        for n, x in (("x", first), ("y", second))
    ]
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        if second.moved and value.dim() == 2:
            assert torch.allclose(value, found[1][name], rtol=2**-22, atol=0), name
        else:
            assert checkpoints.same(value, found[1][name]), name
