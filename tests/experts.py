"""Small stacks of experts, in every layout that a model has, and the same experts one by one."""

import torch

from lowbitcli import api
from tests import checkpoints
from tests.checkpoints import single

P = "model.layers.0.mlp.experts."
UP, DOWN = P + "gate_up_proj", P + "down_proj"
E, H, INNER = 3, 128, 256
HIDDEN = {"hidden_size": H}
KINDS = {
    "llama4": ("in_out", "halves"),
    "gpt_oss": ("in_out", "interleaved"),
    "qwen3_vl_moe": ("in_out", "halves"),
    "qwen3_5_moe": ("out_in", "halves"),
    "granitemoe": ("out_in", "halves"),
}


def numbers(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


def apart():
    """The experts of a model one by one; up of the second expert is ten times as large."""
    found = {}
    for e in range(E):
        found[f"{P}{e}.gate_proj.weight"] = numbers(INNER, H, seed=e)
        found[f"{P}{e}.up_proj.weight"] = numbers(INNER, H, seed=10 + e) * (10 if e == 1 else 1)
        found[f"{P}{e}.down_proj.weight"] = numbers(H, INNER, seed=20 + e)
    return found


def biases():
    found = {}
    for e in range(E):
        for number, (name, rows) in enumerate(
            (("gate_proj", INNER), ("up_proj", INNER), ("down_proj", H))
        ):
            found[f"{P}{e}.{name}.bias"] = numbers(rows, seed=30 + 10 * number + e)
    return found


def woven(gate, up, rows):
    """Put rows of gate and up together: one after the other, or in turn."""
    if rows == "halves":
        return torch.cat((gate, up))
    return torch.stack((gate, up), 1).flatten(0, 1)


def stacked(axes, rows, one, other=None):
    """Stack experts as a model has them."""
    ups, downs = [], []
    for e in range(E):
        gate, up = (one[f"{P}{e}.{name}_proj.weight"] for name in ("gate", "up"))
        ups.append(woven(gate, up, rows))
        downs.append(one[f"{P}{e}.down_proj.weight"])
    up, down = torch.stack(ups), torch.stack(downs)
    if axes == "in_out":
        up, down = up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    found = {UP: up, DOWN: down}
    if other is not None:
        found[UP + "_bias"] = torch.stack(
            [
                woven(other[f"{P}{e}.gate_proj.bias"], other[f"{P}{e}.up_proj.bias"], rows)
                for e in range(E)
            ]
        )
        found[DOWN + "_bias"] = torch.stack([other[f"{P}{e}.down_proj.bias"] for e in range(E)])
    return found


def config_of(model):
    return {"model_type": model, "architectures": ["XForCausalLM"], "dtype": "bfloat16", **HIDDEN}


def model(path, kind, *, bias=False):
    axes, rows = KINDS[kind]
    other = biases() if bias else None
    return single(path, stacked(axes, rows, apart(), other), config_of(kind))


def problems(target, against):
    found = api.verify(target, against=against, device="cpu").problems
    return [one for one in found if one.severity != "warn"]


def same_tensors(one, other):
    a, b = checkpoints.read(one), checkpoints.read(other)
    assert a.keys() == b.keys()
    assert [name for name in a if not checkpoints.same(a[name], b[name])] == []
