"""Cases 14 and 15: an FP8 weight without its scale, a scale without its weight, and a scale that
lies in another shard than its weight."""

import json

import pytest
import torch

from lowbitcli.api import Request, dequantize, inspect, quantize, verify
from lowbitcli.errors import CheckpointError
from tests import checkpoints
from tests.checkpoints import CONFIG, INDEX, LAYER, sharded, single, weight

DOWN = LAYER + "mlp.down_proj.weight"
FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
}
DECLARED = {**CONFIG, "quantization_config": FP8}


def codes(rows=256, cols=256):
    return weight(rows, cols).float().clamp(-448, 448).to(torch.float8_e4m3fn)


def test_a_weight_without_its_scale_is_named_with_the_scale_it_lacks(tmp_path):
    source = single(tmp_path / "source", {DOWN: codes(128, 128)}, DECLARED)
    (found,) = inspect(source).findings
    assert (found.kind, found.tensor) == ("missing", DOWN)
    for run in (quantize, dequantize):
        with pytest.raises(CheckpointError) as caught:
            run(source, tmp_path / "out", device="cpu")
        assert DOWN + "_scale_inv" in caught.value.message
        assert caught.value.exit_code == 4
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("suffix", [".weight_scale_inv", ".weight_scale"])
def test_a_scale_without_its_weight_is_found_by_verify_too(tmp_path, suffix):
    orphan = LAYER + "mlp.up_proj" + suffix
    source = single(tmp_path / "source", {orphan: torch.ones(1, 1)}, DECLARED)
    (found,) = inspect(source).findings
    assert (found.kind, found.tensor) == ("orphan", orphan)
    assert not verify(source, device="cpu").passed
    with pytest.raises(CheckpointError, match="the weight is not there"):
        dequantize(source, tmp_path / "out", device="cpu")


@pytest.fixture
def apart(tmp_path):
    """The weight in one shard, its scales in another."""
    scale = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    return sharded(
        tmp_path / "source", {DOWN: codes()}, {DOWN + "_scale_inv": scale}, config=DECLARED
    )


def test_a_scale_in_another_shard_is_found(tmp_path, apart):
    done = dequantize(apart, tmp_path / "out", dtype="fp32", device="cpu")
    found = checkpoints.read(done.output)
    assert found.keys() == {DOWN}
    tiles = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).repeat_interleave(128, 0)
    assert torch.equal(found[DOWN], codes().float() * tiles.repeat_interleave(128, 1))
    index = json.loads((done.output / INDEX).read_text())
    assert index["weight_map"] == {DOWN: checkpoints.shard_name(1, 2)}
    assert index["metadata"]["total_size"] == 256 * 256 * 4
    assert "quantization_config" not in checkpoints.config_of(done.output)


@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp8", "fp8-block"])
def test_quantizing_it_is_dequantizing_and_quantizing(tmp_path, apart, scheme):
    plain = dequantize(apart, tmp_path / "plain", dtype="fp32", device="cpu")
    container = "lowbit" if scheme == "fp8-block" else "auto"
    request = Request(scheme=scheme, container=container)
    one = quantize(apart, tmp_path / "one", request, device="cpu")
    two = quantize(plain.output, tmp_path / "two", request, device="cpu")
    found, wanted = checkpoints.read(one.output), checkpoints.read(two.output)
    assert found.keys() == wanted.keys()
    if scheme == "fp8-block":  # it is that already: nothing is rounded again
        assert torch.equal(found[DOWN].float(), codes().float()) and one.errors == {}
    else:
        assert all(checkpoints.same(found[name], wanted[name]) for name in wanted)
        said = checkpoints.quantization_of(one.output)
        assert said["quant_method"] == "compressed-tensors"
    assert set(json.loads((one.output / INDEX).read_text())["weight_map"]) == found.keys()


@pytest.mark.parametrize("declared", [DECLARED, CONFIG], ids=["declared", "merely cast"])
def test_raw_fp8_takes_the_scale_for_one(tmp_path, declared, lowbit):
    source = single(tmp_path / "source", {DOWN: codes(128, 128)}, declared)
    done = dequantize(source, tmp_path / "out", dtype="fp32", raw_fp8=True, device="cpu")
    found = checkpoints.read(done.output)
    assert torch.equal(found[DOWN], codes(128, 128).float())
    assert found[DOWN].dtype == torch.float32
    said = lowbit("dequantize", source, "-o", tmp_path / "again", "--raw-fp8")
    assert said.code == 0
    assert torch.equal(checkpoints.read(tmp_path / "again")[DOWN].float(), found[DOWN])


def test_raw_fp8_leaves_a_scale_that_is_there(tmp_path, apart):
    one = dequantize(apart, tmp_path / "one", device="cpu")
    two = dequantize(apart, tmp_path / "two", raw_fp8=True, device="cpu")
    assert checkpoints.same(checkpoints.read(one.output)[DOWN], checkpoints.read(two.output)[DOWN])


@pytest.mark.parametrize("declared", [DECLARED, CONFIG], ids=["declared", "merely cast"])
def test_quantizing_takes_raw_fp8_too(tmp_path, declared, lowbit):
    source = single(tmp_path / "source", {DOWN: codes(128, 128)}, declared)
    said = lowbit("quantize", source, "-o", tmp_path / "out", "--scheme", "mxfp8", "--raw-fp8")
    assert said.code == 0, said.err
    plain = dequantize(source, tmp_path / "plain", raw_fp8=True, device="cpu")
    two = quantize(plain.output, tmp_path / "two", Request(scheme="mxfp8"), device="cpu")
    found, wanted = checkpoints.read(tmp_path / "out"), checkpoints.read(two.output)
    assert found.keys() == wanted.keys() and len(found) == 2
    assert all(checkpoints.same(found[name], wanted[name]) for name in wanted)
    said = lowbit("verify", tmp_path / "out", "--against", source)
    assert said.code == 0, said.out
