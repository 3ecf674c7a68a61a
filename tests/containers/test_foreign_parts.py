"""Parts of a quantized weight that only another container would have: named, and never carried
along. Case 14, the scale that nobody reads."""

import json

import pytest
import torch

from lowbitcli.api import Request, dequantize, inspect, quantize, verify
from lowbitcli.containers.plain import QUANTIZED_SUFFIXES
from lowbitcli.containers.suffixes import UNREAD
from lowbitcli.errors import CheckpointError
from tests import checkpoints
from tests.checkpoints import LAYER, single, weight

DOWN = LAYER + "mlp.down_proj"
SUFFIXES = (*(one for one in QUANTIZED_SUFFIXES if one.startswith(".")), ".scale", *UNREAD)
STORED = (
    ("compressed-tensors", "fp8_channel"),
    ("compressed-tensors", "nvfp4"),
    ("modelopt", "mxfp8"),
    ("deepseek", "fp8_block128"),
    ("native-mxfp8", "mxfp8"),
    ("comfyui", "fp8_tensor"),
    ("comfyui", "nvfp4"),
    ("lowbit", "nvfp4"),
)


def made(tmp_path, container, scheme):
    source = single(tmp_path / "source", {DOWN + ".weight": weight(64, 64)})
    request = Request(scheme=scheme, container=container)
    return quantize(source, tmp_path / "made", request, device="cpu").output


@pytest.mark.parametrize("container, scheme", STORED)
def test_a_part_that_is_another_containers_is_found(tmp_path, container, scheme):
    root = made(tmp_path, container, scheme)
    file = root / "model.safetensors"
    tensors, metadata = checkpoints.read(file), checkpoints.metadata_of(file)
    assert not inspect(root).findings
    for suffix in SUFFIXES:
        if DOWN + suffix in tensors:
            continue
        checkpoints.write(file, {**tensors, DOWN + suffix: torch.ones(1)}, metadata)
        assert DOWN + suffix in {one.tensor for one in inspect(root).findings}, suffix
        assert DOWN + suffix in {one.tensor for one in verify(root, device="cpu").problems}
        with pytest.raises(CheckpointError, match=DOWN + suffix):
            dequantize(root, tmp_path / "floats", device="cpu")
        with pytest.raises(CheckpointError, match=DOWN + suffix):
            quantize(root, tmp_path / "other", Request(scheme="int8"), device="cpu")


def test_what_scales_something_else_stays(tmp_path):
    """A norm's `scale` is no scale of a quantized weight."""
    norm = {LAYER + "norm.scale": torch.ones(4), LAYER + "norm.weight": torch.ones(4)}
    source = single(tmp_path / "source", {DOWN + ".weight": weight(64, 64), **norm})
    request = Request(scheme="nvfp4", container="lowbit")
    root = quantize(source, tmp_path / "made", request, device="cpu").output
    assert not inspect(root).findings


@pytest.mark.parametrize("method", ("modelopt", "compressed-tensors", "awq"))
def test_a_config_that_declares_another_container(tmp_path, method):
    root = made(tmp_path, "lowbit", "nvfp4")
    config = checkpoints.config_of(root)
    config["quantization_config"] = {"quant_method": method}
    (root / "config.json").write_text(json.dumps(config))
    (found,) = inspect(root).findings
    assert found.tensor == "config.json"
    assert method in found.message and "lowbit" in found.message
    with pytest.raises(CheckpointError, match="quant_method"):
        dequantize(root, tmp_path / "floats", device="cpu")
