"""Scales that are not whole, and scales that are elsewhere: what one rank saved is found, and what
lies in another shard is read, in every container."""

import json

import pytest

from lowbitcli.api import Request, dequantize, inspect, quantize
from lowbitcli.errors import CheckpointError
from tests import checkpoints
from tests.checkpoints import LAYER, single, weight

DOWN = LAYER + "mlp.down_proj"


def written(tmp_path, scheme, container):
    tensors = {DOWN + ".weight": weight(256, 128), "model.norm.weight": weight(1, 64)[0]}
    source = single(tmp_path / "source", tensors)
    request = Request(scheme=scheme, container=container)
    return quantize(source, tmp_path / "out", request, device="cpu")


def edited(root, edit):
    file = root / "model.safetensors"
    tensors, metadata = checkpoints.read(file), checkpoints.metadata_of(file)
    edit(tensors)
    checkpoints.write(file, tensors, metadata)


def presharded(tensors, suffix):
    """Leave of each scale what one of two ranks would have."""
    name = DOWN + suffix
    scale = tensors[name]
    tensors[name] = scale[: max(1, scale.shape[0] // 2)].clone() if scale.dim() else scale[None]


PRESHARDED = [
    ("modelopt", "nvfp4", ".weight_scale"),
    ("modelopt", "mxfp8", ".weight_scale"),
    ("modelopt", "fp8_channel", ".weight_scale"),
    ("modelopt", "fp8_block128", ".weight_scale"),
    ("deepseek", "fp8_block128", ".weight_scale_inv"),
    ("native-mxfp8", "mxfp8", ".weight_scale_inv"),
    ("compressed-tensors", "fp8_channel", ".weight_scale"),
    ("compressed-tensors", "fp8_block128", ".weight_scale"),
    ("compressed-tensors", "nvfp4", ".weight_scale"),
]


@pytest.mark.parametrize(("container", "scheme", "suffix"), PRESHARDED)
def test_scales_of_one_rank_are_found_before_any_work(tmp_path, container, scheme, suffix):
    """A checkpoint saved by one rank of tensor parallelism has a part of each scale."""
    done = written(tmp_path, scheme, container)
    edited(done.output, lambda tensors: presharded(tensors, suffix))
    (found,) = inspect(done.output).findings
    assert (found.kind, found.tensor) == ("mismatch", DOWN + suffix)
    with pytest.raises(CheckpointError, match="the shape"):
        dequantize(done.output, tmp_path / "x", device="cpu")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(("container", "scheme", "suffix"), PRESHARDED)
def test_scales_in_another_shard_are_found(tmp_path, container, scheme, suffix):
    """Case 15, for every container: the weight in one file and its scale in the other."""
    done = written(tmp_path, scheme, container)
    tensors = checkpoints.read(done.output)
    config = checkpoints.config_of(done.output)
    scale = {DOWN + suffix: tensors.pop(DOWN + suffix)}
    source = checkpoints.sharded(tmp_path / "parted", tensors, scale, config=config)
    assert inspect(source).findings == ()
    one = dequantize(source, tmp_path / "one", device="cpu")
    other = dequantize(done.output, tmp_path / "other", device="cpu")
    found, wanted = checkpoints.read(one.output), checkpoints.read(other.output)
    assert found.keys() == wanted.keys()
    assert all(checkpoints.same(found[name], value) for name, value in wanted.items())
    index = json.loads((one.output / checkpoints.INDEX).read_text())
    assert not [name for name in index["weight_map"] if "scale" in name]
