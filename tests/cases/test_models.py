"""Outputs of models that are more than a stack of layers are complete: tied heads, layers that
predict further tokens, vision towers, experts. Every reader is told what was left alone."""

import json

import pytest
import torch

from lowbitcli import api
from lowbitcli.api import Request, plan_quantize, quantize
from tests import checkpoints
from tests.checkpoints import sharded, single, weight

LAYER = "model.layers.{}."
WRITTEN = [
    ("compressed-tensors", "nvfp4"),
    ("compressed-tensors", "fp8-dynamic"),
    ("modelopt", "nvfp4"),
    ("deepseek", "fp8-block"),
    ("native-mxfp8", "mxfp8"),
]


def attention(prefix):
    return {
        f"{prefix}self_attn.{name}_proj.weight": weight(128, 128, seed=number)
        for number, name in enumerate("qkvo")
    }


def mlp(prefix):
    return {
        f"{prefix}gate_proj.weight": weight(256, 128, seed=5),
        f"{prefix}up_proj.weight": weight(256, 128, seed=6),
        f"{prefix}down_proj.weight": weight(128, 256, seed=7),
    }


def outside(prefix="model."):
    return {
        f"{prefix}embed_tokens.weight": weight(320, 128, seed=8),
        f"{prefix}norm.weight": weight(1, 128, seed=9)[0],
    }


def qwen3_moe():
    """Untied, a router, three experts, one dense layer."""
    tensors = {**outside(), "lm_head.weight": weight(320, 128, seed=10)}
    for layer in range(2):
        here = LAYER.format(layer)
        tensors |= attention(here)
        tensors |= {f"{here}self_attn.q_norm.weight": weight(1, 32)[0]}
    tensors |= mlp(LAYER.format(0) + "mlp.")
    tensors[LAYER.format(1) + "mlp.gate.weight"] = weight(3, 128, seed=11)
    for expert in range(3):
        tensors |= mlp(f"{LAYER.format(1)}mlp.experts.{expert}.")
    config = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    kept = {"lm_head", "model.embed_tokens", "model.layers.1.mlp.gate"}
    return config, tensors, kept


def deepseek_v3():
    """MLA, shared and single experts, and a layer that predicts the token after the next."""
    tensors = {**outside(), "lm_head.weight": weight(320, 128, seed=10)}
    for layer in range(2):
        here = LAYER.format(layer)
        tensors |= {
            f"{here}self_attn.q_a_proj.weight": weight(128, 128, seed=1),
            f"{here}self_attn.q_b_proj.weight": weight(128, 128, seed=2),
            f"{here}self_attn.kv_a_proj_with_mqa.weight": weight(192, 128, 8, seed=3),
            f"{here}self_attn.kv_b_proj.weight": weight(256, 128, seed=4),
            f"{here}self_attn.o_proj.weight": weight(128, 128, seed=5),
            f"{here}mlp.gate.weight": weight(2, 128, seed=11),
            f"{here}mlp.gate.e_score_correction_bias": weight(1, 2)[0].float(),
            **mlp(f"{here}mlp.shared_experts."),
            **mlp(f"{here}mlp.experts.0."),
            **mlp(f"{here}mlp.experts.1."),
        }
    last = LAYER.format(1)
    tensors |= {
        f"{last}eh_proj.weight": weight(128, 256, seed=12),
        f"{last}enorm.weight": weight(1, 128)[0],
        f"{last}hnorm.weight": weight(1, 128)[0],
        f"{last}embed_tokens.weight": weight(320, 128, seed=8),
        f"{last}shared_head.head.weight": weight(320, 128, seed=10),
        f"{last}shared_head.norm.weight": weight(1, 128)[0],
    }
    config = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    kept = {
        "lm_head",
        "model.embed_tokens",
        "model.layers.0.mlp.gate",
    }
    kept |= {
        name.removesuffix(".weight")
        for name, tensor in tensors.items()
        if name.startswith(last) and name.endswith(".weight") and tensor.dim() >= 2
    }
    return {**config, "num_hidden_layers": 1, "num_nextn_predict_layers": 1}, tensors, kept


def qwen3_vl():
    """Tied, with a vision tower beside the language model."""
    text = "model.language_model."
    tensors = outside(text)
    tensors |= attention(f"{text}layers.0.") | mlp(f"{text}layers.0.mlp.")
    tensors |= {
        "model.visual.patch_embed.proj.weight": torch.randn(32, 3, 2, 4, 4).bfloat16(),
        "model.visual.blocks.0.attn.qkv.weight": weight(384, 128, seed=13),
        "model.visual.blocks.0.mlp.linear_fc1.weight": weight(256, 128, seed=14),
        "model.visual.merger.linear_fc1.weight": weight(128, 128, seed=15),
    }
    config = {
        "model_type": "qwen3_vl",
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "tie_word_embeddings": True,
    }
    kept = {
        "lm_head",
        f"{text}embed_tokens",
        "model.visual.patch_embed.proj",
        "model.visual.blocks.0.attn.qkv",
        "model.visual.blocks.0.mlp.linear_fc1",
        "model.visual.merger.linear_fc1",
    }
    return config, tensors, kept


def qwen3_next():
    """Linear attention beside the usual, and layers that predict further tokens under mtp."""
    tensors = {**outside(), "lm_head.weight": weight(320, 128, seed=10)}
    here = f"{LAYER.format(0)}linear_attn."
    tensors |= {
        f"{here}in_proj_qkvz.weight": weight(512, 128, seed=1),
        f"{here}in_proj_ba.weight": weight(128, 128, seed=2),
        f"{here}conv1d.weight": torch.randn(384, 1, 4).bfloat16(),
        f"{here}out_proj.weight": weight(128, 128, seed=3),
        f"{here}A_log": weight(1, 4)[0].float(),
        "mtp.fc.weight": weight(128, 256, seed=4),
        **attention("mtp.layers.0."),
    }
    config = {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]}
    kept = {"lm_head", "model.embed_tokens", f"{here}conv1d", f"{here}in_proj_ba", "mtp.fc"}
    kept |= {f"mtp.layers.0.self_attn.{name}_proj" for name in "qkvo"}
    return config, tensors, kept


MODELS = {
    "qwen3_moe": qwen3_moe,
    "deepseek_v3": deepseek_v3,
    "qwen3_vl": qwen3_vl,
    "qwen3_next": qwen3_next,
}


def ignored(folder, container):
    """Return the modules that a reader is told to leave alone."""
    said = checkpoints.quantization_of(folder)
    if container == "modelopt":
        beside = json.loads((folder / "hf_quant_config.json").read_text())
        assert beside["quantization"]["exclude_modules"] == said["ignore"]
    for key in ("ignore", "modules_to_not_convert", "ignored_layers"):
        if key in said:
            return {one.removeprefix("re:").removesuffix(r"\Z") for one in said[key]}
    raise AssertionError(said)


@pytest.mark.parametrize(("container", "scheme"), WRITTEN)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_whole_and_says_what_was_left_alone(tmp_path, name, container, scheme):
    config, tensors, kept = MODELS[name]()
    listed = list(tensors.items())
    half = len(listed) // 2
    source = sharded(tmp_path / "m", dict(listed[:half]), dict(listed[half:]), config=config)
    (source / "generation_config.json").write_text("{}")
    request = Request(scheme=scheme, container=container)
    done = quantize(source, tmp_path / "q", request, device="cpu")
    drafts = {"model.layers.1.mlp.experts"} if name == "deepseek_v3" else set()
    assert ignored(done.output, container) == kept | (drafts if container == "modelopt" else set())
    quantized = {weight.name.removesuffix(".weight") for weight in done.plan.quantized}
    matrices = {
        name.removesuffix(".weight")
        for name, tensor in tensors.items()
        if tensor.dim() >= 2 and name.endswith(".weight")
    }
    assert quantized | kept == matrices | ({"lm_head"} & kept) and not quantized & kept
    stored = checkpoints.read(done.output)
    index = json.loads((done.output / checkpoints.INDEX).read_text())
    assert set(index["weight_map"]) == stored.keys()
    size = sum(len(checkpoints.raw(tensor)) for tensor in stored.values())
    assert index["metadata"]["total_size"] == size
    assert (done.output / "generation_config.json").read_text() == "{}"
    left = checkpoints.config_of(done.output)
    del left["quantization_config"]
    assert left == config
    for key, tensor in tensors.items():
        if key.removesuffix(".weight") not in quantized:
            assert checkpoints.same(stored[key], tensor)
    assert api.verify(done.output, against=source, device="cpu").problems == ()


def test_fused_matrices_of_mla_share_a_global_scale(tmp_path):
    config, tensors, _ = deepseek_v3()
    source = single(tmp_path / "m", tensors, config)
    done = quantize(source, tmp_path / "q", Request(scheme="nvfp4"), device="cpu")
    stored = checkpoints.read(done.output)
    here = f"{LAYER.format(0)}self_attn."
    scales = {
        name: stored[f"{here}{name}.weight_global_scale"]
        for name in ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "o_proj")
    }
    assert checkpoints.same(scales["q_a_proj"], scales["kv_a_proj_with_mqa"])
    assert len({float(scale) for scale in scales.values()}) == 4


@pytest.mark.parametrize("scheme", ["nvfp4", "fp8"])
def test_a_fused_matrix_without_its_partner_is_told_of(tmp_path, scheme):
    tensors = attention(LAYER.format(0))
    del tensors[f"{LAYER.format(0)}self_attn.k_proj.weight"]
    source = single(tmp_path / "m", tensors)
    for container, told in (("compressed-tensors", True), ("comfyui", False)):
        request = Request(scheme=scheme, container=container)
        notes = "\n".join(plan_quantize(source, None, request).notes)
        assert ("q_proj.weight: model.layers.0.self_attn.k_proj not quantized" in notes) == told
    notes = "\n".join(plan_quantize(source, None, Request(scheme="mxfp8")).notes)
    assert "k_proj" not in notes


@pytest.mark.parametrize("container", ["compressed-tensors", "modelopt", "deepseek"])
def test_kept_stacks_are_named_as_readers_know_them(tmp_path, container):
    """Its layers are quantized, its experts not: nothing says how they lie."""
    here = LAYER.format(0)
    tensors = {
        **attention(here),
        f"{here}mlp.experts.gate_up_proj": torch.randn(2, 256, 128).bfloat16(),
        f"{here}mlp.experts.down_proj": torch.randn(2, 128, 128).bfloat16(),
    }
    source = single(tmp_path / "m", tensors, {"model_type": "x", "architectures": ["X"]})
    request = Request(scheme="fp8-block", container=container)
    done = quantize(source, tmp_path / "q", request, device="cpu")
    names = ignored(done.output, container)
    assert f"{here}mlp.experts" in names
    singly = {f"{here}mlp.experts.0.{name}_proj" for name in ("gate", "up", "down")}
    assert singly <= names if container == "compressed-tensors" else not singly & names
    assert api.verify(done.output, against=source, device="cpu").problems == ()
