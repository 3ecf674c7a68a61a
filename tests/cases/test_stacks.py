"""Case 8: experts stacked in one tensor. Which axis is multiplied is declared, and never told from
a shape: known models have theirs, and what nothing is known of is kept and said."""

import json

import pytest
import torch

from lowbit_kernels import mx, nvfp4
from lowbitcli import api
from lowbitcli.api import Request, dequantize, inspect, quantize
from lowbitcli.containers.stacks import MODELS, is_stack, stacking_of
from lowbitcli.errors import CheckpointError, UsageError
from tests import checkpoints
from tests.checkpoints import header_of, metadata_of, single

P = "model.layers.0.mlp.experts."
UP, DOWN = P + "gate_up_proj", P + "down_proj"
OSS = {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "dtype": "bfloat16"}


def stack(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


def tensors():
    """[E, in, out] as gpt-oss has it: blocks along the last axis would be those of the outputs."""
    return {
        UP: stack(2, 64, 128) * torch.tensor([1.0, 10.0]).reshape(2, 1, 1).bfloat16(),
        UP + "_bias": stack(2, 128),
        DOWN: stack(2, 96, 64, seed=1),
        DOWN + "_bias": stack(2, 64),
        "model.layers.0.self_attn.q_proj.weight": stack(64, 64),
    }


@pytest.fixture
def source(tmp_path):
    return single(tmp_path / "source", tensors(), OSS)


def test_what_nothing_is_known_of_is_kept_and_said(tmp_path):
    source = single(tmp_path / "source", tensors(), {**OSS, "model_type": "other"})
    done = quantize(source, tmp_path / "out", Request(container="lowbit"), device="cpu")
    kept = {w.name: w.kept for w in done.plan.weights if w.target is None}
    assert kept[UP] == kept[DOWN]
    assert kept[UP] == "a stack of experts, and nothing says which of its axes is multiplied"
    before, after = checkpoints.read(source), checkpoints.read(done.output)
    assert all(checkpoints.same(before[name], after[name]) for name in kept)


@pytest.mark.parametrize("scheme", ["mxfp4", "nvfp4", "mxfp8", "fp8", "fp8-dynamic", "int8"])
def test_each_expert_is_a_matrix_of_its_own(tmp_path, source, scheme):
    request = Request(scheme=scheme, container="lowbit")
    done = quantize(source, tmp_path / "out", request, device="cpu")
    assert {w.name for w in done.plan.quantized} >= {UP, DOWN}
    assert {w.shape for w in done.plan.quantized if w.name == UP} == {(2, 128, 64)}
    assert api.verify(done.output, against=source, device="cpu").problems == ()
    entry = json.loads(metadata_of(done.output / "model.safetensors")["lowbit.weights"])[UP]
    assert (entry["stacked"], entry["shape"]) == ("in_out", [2, 128, 64])
    back = dequantize(done.output, tmp_path / "back", dtype="fp32", device="cpu")
    before, after = checkpoints.read(source), checkpoints.read(back.output)
    assert {k: v.shape for k, v in before.items()} == {k: v.shape for k, v in after.items()}
    for name in (UP, DOWN):
        error = (after[name] - before[name].float()).norm() / before[name].float().norm()
        assert 0 < float(error) < 0.2
    for name in (UP + "_bias", DOWN + "_bias"):
        assert checkpoints.same(before[name], after[name])
    # the other way to the same numbers: expert by expert, transposed by hand
    if scheme == "nvfp4":
        for e in range(2):
            w = before[UP][e].t().contiguous()
            parts = nvfp4.quantize(w)
            assert torch.equal(after[UP][e].t(), nvfp4.dequantize(*parts, dtype=torch.float32))


def test_global_scales_are_one_for_each_expert(tmp_path, source):
    request = Request(scheme="nvfp4", container="lowbit")
    stored = checkpoints.read(quantize(source, tmp_path / "out", request, device="cpu").output)
    shared = stored[UP + ".weight_global_scale"]
    assert shared.shape == (2,) and float(shared[1] / shared[0]) > 5


def test_gpt_oss_blocks_and_scales(tmp_path, source):
    request = Request(scheme="mxfp4", container="gpt-oss")
    done = quantize(source, tmp_path / "out", request, device="cpu")
    header = header_of(done.output / "model.safetensors")
    found = {k: (v["dtype"], v["shape"]) for k, v in header.items() if "proj_" in k}
    assert found[UP + "_blocks"] == ("U8", [2, 128, 2, 16])
    assert found[UP + "_scales"] == ("U8", [2, 128, 2])
    assert found[DOWN + "_blocks"] == ("U8", [2, 64, 3, 16])
    kept = {w.name: w.kept for w in done.plan.weights if w.target is None}
    assert "nothing else" in kept["model.layers.0.self_attn.q_proj.weight"]
    assert checkpoints.quantization_of(done.output) == {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    }
    stored, before = checkpoints.read(done.output), checkpoints.read(source)
    data, scale = mx.quantize_mxfp4(before[UP].transpose(1, 2).contiguous())
    assert torch.equal(stored[UP + "_blocks"].flatten(-2), data)
    assert torch.equal(stored[UP + "_scales"], scale)
    assert api.verify(done.output, against=source, device="cpu").problems == ()


def test_to_lowbit_and_back_nothing_is_rounded(tmp_path, source):
    one = quantize(source, tmp_path / "one", Request(scheme="mxfp4", container="gpt-oss"))
    two = quantize(one.output, tmp_path / "two", Request(scheme="mxfp4", container="lowbit"))
    three = quantize(two.output, tmp_path / "three", Request(scheme="mxfp4", container="gpt-oss"))
    a, b = checkpoints.read(one.output), checkpoints.read(three.output)
    stacks = [name for name in a if name.startswith(P)]
    assert stacks and all(checkpoints.same(a[name], b[name]) for name in stacks)
    assert UP not in two.errors and three.errors == {}


def test_another_scheme_goes_through_fp32(tmp_path, source):
    one = quantize(source, tmp_path / "one", Request(scheme="mxfp4", container="gpt-oss"))
    plain = dequantize(one.output, tmp_path / "plain", dtype="fp32", device="cpu")
    request = Request(scheme="fp8-dynamic", container="lowbit")
    two = quantize(one.output, tmp_path / "two", request, device="cpu")
    three = quantize(plain.output, tmp_path / "three", request, device="cpu")
    a, b = checkpoints.read(two.output), checkpoints.read(three.output)
    assert all(checkpoints.same(a[name], b[name]) for name in a if name.startswith(UP))


def test_stacks_go_where_there_are_single_experts_and_stay_where_they_cannot(tmp_path, source):
    done = quantize(source, tmp_path / "out", Request(scheme="mxfp4"), device="cpu")
    names = {w.name for w in done.plan.quantized}
    assert names >= {P + "1.gate_proj.weight", P + "1.up_proj.weight", P + "1.down_proj.weight"}
    done = quantize(source, tmp_path / "comfy", Request(scheme="mxfp8", container="comfyui"))
    kept = {w.name: w.kept for w in done.plan.weights if w.target is None}
    assert kept[UP] == "a stack of experts, which comfyui holds one by one"


def test_gpt_oss_is_for_its_own_model(tmp_path):
    config = {**OSS, "model_type": "llama4"}
    source = single(tmp_path / "source", tensors(), config)
    with pytest.raises(UsageError, match="gpt_oss alone"):
        quantize(source, tmp_path / "out", Request(scheme="mxfp4", container="gpt-oss"))


FINDINGS = {
    "no scales": (lambda t: t.pop(UP + "_scales"), "missing"),
    "no blocks": (lambda t: t.pop(UP + "_blocks"), "orphan"),
    "three dimensions": (
        lambda t: t.update({UP + "_blocks": t[UP + "_blocks"].flatten(-2)}),
        "mismatch",
    ),
    "scales of another shape": (
        lambda t: t.update({UP + "_scales": t[UP + "_scales"][:, :, :1].contiguous()}),
        "mismatch",
    ),
}


@pytest.mark.parametrize("name", FINDINGS)
def test_blocks_and_scales_that_disagree_are_found(tmp_path, source, name):
    edit, kind = FINDINGS[name]
    done = quantize(source, tmp_path / "q", Request(scheme="mxfp4", container="gpt-oss"))
    file = done.output / "model.safetensors"
    stored = checkpoints.read(file)
    edit(stored)
    checkpoints.write(file, stored, {"format": "pt"})
    assert [one.kind for one in inspect(done.output).findings] == [kind]
    with pytest.raises(CheckpointError, match="disagrees with itself"):
        dequantize(done.output, tmp_path / "x", device="cpu")


def test_only_experts_of_known_models_have_a_layout():
    for model in MODELS:
        assert stacking_of(UP, (2, 64, 128), {"model_type": model}) is not None
        assert stacking_of(UP + "_bias", (2, 128), {"model_type": model}) is None
        assert stacking_of("model.conv.weight", (2, 3, 4), {"model_type": model}) is None
    assert stacking_of(UP, (2, 64, 128), {"model_type": "qwen"}) is None
    assert stacking_of(UP, (2, 64, 128), None) is None
    assert is_stack(UP, 3) and not is_stack(UP, 2) and not is_stack("conv.weight", 3)
