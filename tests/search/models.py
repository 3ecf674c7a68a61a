"""Small models for searches: layers of different difficulty, so that there is something to choose.

Heavy tails cost schemes with one scale for a matrix most; rows of different size cost them too.
"""

from pathlib import Path

import torch
from torch import Tensor

from tests.checkpoints import single

HIDDEN, INNER = 128, 192
MOE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "torch_dtype": "bfloat16",
    "hidden_size": HIDDEN,
}


def matrix(rows: int, cols: int, seed: int, spread: float = 0.0) -> Tensor:
    """Return bf16 `[rows, cols]`; with `spread` rows differ in size and some elements stand out."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, cols, generator=generator) * 0.05
    w *= torch.exp(spread * torch.randn(rows, 1, generator=generator))
    if spread:
        w.view(-1)[:: 97 + seed] *= 1 + 10 * spread
    return w.to(torch.bfloat16)


def attention(layer: int, spread: float) -> dict[str, Tensor]:
    at, seed = f"model.layers.{layer}.self_attn.", 100 * layer
    return {
        f"{at}q_proj.weight": matrix(HIDDEN, HIDDEN, seed + 1, spread),
        f"{at}k_proj.weight": matrix(32, HIDDEN, seed + 2, spread),
        f"{at}v_proj.weight": matrix(32, HIDDEN, seed + 3),
        f"{at}o_proj.weight": matrix(HIDDEN, HIDDEN, seed + 4, spread / 2),
    }


def around() -> dict[str, Tensor]:
    return {
        "model.embed_tokens.weight": matrix(256, HIDDEN, 1),
        "model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
        "lm_head.weight": matrix(256, HIDDEN, 2),
    }


def dense(path: Path, layers: int = 4, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a dense decoder whose layers get harder and easier in turn."""
    tensors = around()
    for layer in range(layers):
        spread = (layer * 3 % 5) / 4
        tensors |= attention(layer, spread)
        at, seed = f"model.layers.{layer}.mlp.", 100 * layer
        tensors[f"{at}gate_proj.weight"] = matrix(INNER, HIDDEN, seed + 5, spread)
        tensors[f"{at}up_proj.weight"] = matrix(INNER, HIDDEN, seed + 6)
        tensors[f"{at}down_proj.weight"] = matrix(HIDDEN, INNER, seed + 7, 1 - spread / 2)
    return single(path, {name: w.to(dtype) for name, w in tensors.items()})


def experts(path: Path, layers: int = 3, number: int = 4) -> Path:
    """Write a mixture of experts, each expert's matrices on their own, routers beside them."""
    tensors = around()
    for layer in range(layers):
        tensors |= attention(layer, layer / 3)
        tensors[f"model.layers.{layer}.mlp.gate.weight"] = matrix(number, HIDDEN, layer)
        for expert in range(number):
            at = f"model.layers.{layer}.mlp.experts.{expert}."
            seed = 1000 * layer + 10 * expert
            tensors[f"{at}gate_proj.weight"] = matrix(64, HIDDEN, seed + 1, layer / 4)
            tensors[f"{at}up_proj.weight"] = matrix(64, HIDDEN, seed + 2)
            tensors[f"{at}down_proj.weight"] = matrix(HIDDEN, 64, seed + 3, expert / 8)
    return single(path, tensors, MOE)
