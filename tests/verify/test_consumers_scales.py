"""Scales that a consumer would not load, or would make other numbers of, planted."""

from pathlib import Path

import pytest
import torch

from tests import checkpoints
from tests.checkpoints import LAYER, weight
from tests.verify.asked import asked, made, told
from tests.verify.planted import DOWN, GATE, UP, change, model

GOLDEN = Path(__file__).parents[1] / "golden"
Q, K, V = (f"{LAYER}self_attn.{name}_proj." for name in "qkv")


def test_global_scales_that_differ_and_what_becomes_of_the_numbers(planted):
    output = planted.copy("nvfp4", "compressed-tensors")
    change(output, lambda tensors: tensors[GATE + "weight_global_scale"].mul_(4))
    for consumer in ("vllm", "sglang"):
        found = told(output, consumer, "global scales differ in a group")
        assert f"{GATE[:-1]} x 1," in found.message and f"{UP[:-1]} x 0.25" in found.message
        assert (found.tensor, found.file) == (GATE + "weight_global_scale", "model.safetensors")
    assert asked(output, "transformers") == []


def test_multipliers_that_differ_make_weights_too_large(tmp_path):
    output = made(tmp_path, "nvfp4", "modelopt", model())
    change(output, lambda tensors: tensors[K + "weight_scale_2"].mul_(2))
    found = told(output, "vllm", "global scales differ in a group")
    assert f"{K[:-1]} x 1," in found.message and f"{Q[:-1]} x 2," in found.message
    assert "AssertionError" in told(output, "tensorrt-llm", "global scales differ").message


def test_tensor_scales_that_differ_are_requantized(planted):
    output = planted.copy("fp8_tensor", "compressed-tensors")
    change(output, lambda tensors: tensors[UP + "weight_scale"].mul_(8))
    found = told(output, "vllm", "it requantizes all to", "warn")
    assert f"{GATE[:-1]} to 0.125 of its range" in found.message


def test_scales_in_the_shape_of_another_container(planted, tmp_path):
    output = planted.copy("fp8_channel", "compressed-tensors")
    name = DOWN + "weight_scale"
    change(output, lambda tensors: tensors.update({name: tensors[name].reshape(-1)}))
    for consumer in ("vllm", "sglang"):
        assert told(output, consumer, "[64, 1] is asserted").tensor == name
    output = made(tmp_path, "fp8_channel", "modelopt", model())
    change(output, lambda tensors: tensors.update({name: tensors[name].reshape(-1, 1)}))
    assert told(output, "vllm", "[64] is asserted").tensor == name


def test_block_scales_of_two_dimensions_in_modelopt(tmp_path):
    output = made(tmp_path, "fp8_block128", "modelopt", {DOWN + "weight": weight(256, 128)})
    name = DOWN + "weight_scale"
    change(output, lambda tensors: tensors.update({name: tensors[name].reshape(2, 1)}))
    assert told(output, "vllm", "four dimensions are asserted").tensor == name


def test_a_scale_that_is_missing_and_one_that_is_alone(planted):
    output = planted.copy("nvfp4", "compressed-tensors")
    change(output, lambda tensors: tensors.pop(DOWN + "weight_scale"))
    assert "memory that nothing was written to" in told(output, "vllm", "is not there").message
    told(output, "transformers", "initialised anew")
    output = planted.copy("nvfp4", "compressed-tensors")
    lost = f"{LAYER}mlp.lost_proj.weight_scale"
    change(output, lambda tensors: tensors.update({lost: tensors[DOWN + "weight_scale"]}))
    assert told(output, "vllm", "no module or parameter").tensor == lost


@pytest.mark.parametrize("consumer", ["vllm", "transformers", "tensorrt-llm"])
def test_exponents_that_are_said_to_be_e8m0(planted, consumer):
    output = planted.copy("mxfp4", "compressed-tensors")

    def relabel(tensors):
        for name in tensors:
            if name.endswith("weight_scale"):
                tensors[name] = tensors[name].view(torch.float8_e8m0fnu)

    change(output, relabel)
    assert told(output, consumer, "7 scales are stored as F8_E8M0").tensor.endswith("_scale")


def test_exponents_that_are_said_to_be_e8m0_in_a_file_for_comfyui(tmp_path):
    golden, output = GOLDEN / "comfyui" / "mxfp8.safetensors", tmp_path / "a.safetensors"
    assert asked(golden, "comfyui") == []
    tensors = checkpoints.read(golden)
    for name in tensors:
        if name.endswith(".weight_scale"):
            tensors[name] = tensors[name].view(torch.float8_e8m0fnu)
    checkpoints.write(output, tensors, checkpoints.metadata_of(golden))
    told(output, "comfyui", "KeyError: 'F8_E8M0'")


def test_blocks_that_are_not_whole(tmp_path):
    tensors = {
        Q + "weight": weight(192, 128),
        K + "weight": weight(192, 128),
        V + "weight": weight(192, 128),
    }
    output = made(tmp_path, "fp8_block128", "deepseek", tensors)
    assert "merged columns" in told(output, "vllm", "192 rows are no multiple of 128").message
    wrong = [one.message for one in asked(output, "transformers")]
    assert len(wrong) == 3 and all("blocks for 96 x 128: read wrong, silently" in x for x in wrong)
