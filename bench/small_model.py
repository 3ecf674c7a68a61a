"""A small Mixtral or Llama to train: our own few lines, saved as transformers has it.

The experts' matrices lie side by side, and every expert is run on every token and weighed by the
router (0 for those not chosen): at this size a GPU takes less for that than for sorting tokens.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

BALANCE = 0.01  # how much of the loss is that experts are used alike
EPS = 1e-5
THETA = 10000.0


@dataclass(frozen=True)
class Shape:
    """How large a model is; `experts` 0 for a dense one."""

    experts: int = 8
    chosen: int = 2
    layers: int = 5
    hidden: int = 384
    inner: int = 384
    heads: int = 6
    shared: int = 2  # heads of keys and values
    head: int = 64
    vocabulary: int = 8192
    length: int = 512

    @property
    def config(self) -> dict[str, object]:
        """Return the config.json of transformers."""
        dense = not self.experts
        of_experts = {
            "num_local_experts": self.experts,
            "num_experts_per_tok": self.chosen,
            "router_aux_loss_coef": BALANCE,
            "sliding_window": None,
        }
        return {
            "architectures": ["LlamaForCausalLM" if dense else "MixtralForCausalLM"],
            "model_type": "llama" if dense else "mixtral",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.shared,
            "head_dim": self.head,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.length,
            "hidden_act": "silu",
            "rms_norm_eps": EPS,
            "rope_theta": THETA,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "torch_dtype": "bfloat16",
            **({} if dense else of_experts),
        }


class Layer(nn.Module):
    """Attention and experts, each behind a norm, with the matrices of equal inputs as one."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        count, wide = max(shape.experts, 1), shape.hidden
        turned = (shape.heads + 2 * shape.shared) * shape.head
        self.norms = nn.Parameter(torch.ones(2, wide))
        self.qkv = nn.Parameter(torch.randn(turned, wide) * 0.02)
        small = 0.02 / math.sqrt(2 * shape.layers)
        self.o = nn.Parameter(torch.randn(wide, shape.heads * shape.head) * small)
        self.gate = nn.Parameter(torch.randn(count * shape.inner, wide) * 0.02)
        self.up = nn.Parameter(torch.randn(count * shape.inner, wide) * 0.02)
        self.down = nn.Parameter(torch.randn(wide, count * shape.inner) * small)
        if shape.experts:
            self.router = nn.Parameter(torch.randn(shape.experts, wide) * 0.02)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the next hidden states, and how unevenly experts were used (1 is evenly)."""
        x = x + self._attention(functional.rms_norm(x, x.shape[-1:], self.norms[0], EPS), turn)
        y = functional.rms_norm(x, x.shape[-1:], self.norms[1], EPS)
        inner = functional.silu(functional.linear(y, self.gate)) * functional.linear(y, self.up)
        uneven = x.new_zeros(())
        if self.shape.experts:
            weight, uneven = self._route(y)
            apart = inner.unflatten(-1, (self.shape.experts, -1))
            inner = (apart * weight.to(inner.dtype)[..., None]).flatten(-2)
        return x + functional.linear(inner, self.down), uneven

    def _attention(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        shape = self.shape
        every = functional.linear(x, self.qkv).unflatten(-1, (-1, shape.head)).transpose(1, 2)
        q, k, v = every.split([shape.heads, shape.shared, shape.shared], 1)
        times = shape.heads // shape.shared
        k, v = _turned(k, turn).repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        q = _turned(q, turn)
        out = functional.scaled_dot_product_attention(
            q.to(v.dtype), k.to(v.dtype), v, is_causal=True
        )
        return functional.linear(out.transpose(1, 2).flatten(-2), self.o)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return each expert's weight for each token, and how unevenly they were chosen."""
        p = functional.linear(x, self.router).float().softmax(-1)
        top, which = p.topk(self.shape.chosen, -1)
        weight = torch.zeros_like(p).scatter(-1, which, top / top.sum(-1, keepdim=True))
        used = (weight > 0).float().mean((0, 1)) / self.shape.chosen
        return weight, self.shape.experts * (used * p.mean((0, 1))).sum()


def _turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Return queries or keys turned by their positions, halves of a head as pairs."""
    low, high = x.chunk(2, -1)
    return x * turn[0] + torch.cat([-high, low], -1) * turn[1]


class Model(nn.Module):
    """A causal language model, head and embeddings the same matrix."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Parameter(torch.randn(shape.vocabulary, shape.hidden) * 0.02)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.hidden))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits, and the mean over layers of how unevenly experts were used."""
        half = torch.arange(0, self.shape.head, 2, device=ids.device) / self.shape.head
        angle = torch.arange(ids.shape[1], device=ids.device)[:, None] * THETA**-half
        turn = (angle.cos().repeat(1, 2), angle.sin().repeat(1, 2))
        x, uneven = functional.embedding(ids, self.embedding), torch.zeros((), device=ids.device)
        for layer in self.layers:
            x, more = layer(x, turn)
            uneven = uneven + more / self.shape.layers
        return functional.linear(
            functional.rms_norm(x, x.shape[-1:], self.norm, EPS), self.embedding
        ), uneven

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights in BF16, called and cut as transformers' checkpoints have them."""
        shape, found = self.shape, {"model.embed_tokens.weight": self.embedding}
        found["model.norm.weight"] = self.norm
        cut = [n * shape.head for n in (shape.heads, shape.shared, shape.shared)]
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            at = f"model.layers.{i}"
            found[f"{at}.input_layernorm.weight"] = layer.norms[0]
            found[f"{at}.post_attention_layernorm.weight"] = layer.norms[1]
            for name, w in zip("qkv", layer.qkv.split(cut), strict=True):
                found[f"{at}.self_attn.{name}_proj.weight"] = w
            found[f"{at}.self_attn.o_proj.weight"] = layer.o
            if shape.experts:
                found[f"{at}.block_sparse_moe.gate.weight"] = layer.router
            every = {"gate": layer.gate, "up": layer.up, "down": layer.down.T}
            for (name, matrix), own in zip(every.items(), ("w1", "w3", "w2"), strict=True):
                for e, w in enumerate(matrix.split(shape.inner)):
                    moe = f"block_sparse_moe.experts.{e}.{own}"
                    to = moe if shape.experts else f"mlp.{name}_proj"
                    found[f"{at}.{to}.weight"] = w.T if name == "down" else w
        return {n: w.detach().to("cpu", torch.bfloat16).contiguous() for n, w in found.items()}
