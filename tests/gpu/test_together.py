"""Small jobs done together on a GPU: the bytes and figures of one by one there, and of the CPU."""

import pytest
import torch

from lowbitcli.api import Request, quantize
from lowbitcli.errors import NonFiniteError
from lowbitcli.pipeline import alike, memory, together
from lowbitcli.pipeline.memory import Budget
from lowbitcli.schemes import SCHEMES
from tests import checkpoints
from tests.checkpoints import LAYER, single, weight

pytestmark = pytest.mark.gpu

# Everything in one step; many steps at once on streams of their own; a step of a few weights.
CUTS = (Budget(1, 1 << 30, 1 << 30), Budget(6, 200_000, 0), Budget(6, 40_000, 1 << 30))


def model():
    made = {f"{LAYER}self_attn.{x}_proj.weight": weight(256, 256, 0.1, seed=ord(x)) for x in "qkv"}
    for number in range(24):
        experts = f"{LAYER}mlp.experts.{number}."
        made[experts + "gate_proj.weight"] = weight(256, 128, seed=number)
        made[experts + "up_proj.weight"] = weight(256, 128, 3.0, seed=100 + number)
        made[experts + "down_proj.weight"] = weight(130, 256, seed=200 + number)  # a ragged band
        made[f"{LAYER}norm.{number}.weight"] = weight(1, 128, seed=number)[0]
    made[LAYER + "mlp.one_proj.weight"] = weight(130, 128, seed=3).float()
    made[LAYER + "mlp.two_proj.weight"] = weight(130, 128, seed=4).float()
    return made


@pytest.fixture
def use(monkeypatch):
    def chosen(is_on, budget=None):
        monkeypatch.setattr(together, "DEVICES", frozenset({"cuda"} if is_on else ()))
        if budget is not None:
            monkeypatch.setattr(memory, "budget", lambda *_: budget)

    return chosen


@pytest.mark.parametrize("scheme", [scheme.name for scheme in SCHEMES])
def test_the_bytes_and_figures_of_one_by_one(tmp_path, use, monkeypatch, scheme):
    source = single(tmp_path / "source", model())
    request = Request(scheme=scheme, container="lowbit")
    sizes, real = [], alike.quantize

    def quantize_and_tell(like, stack, amax):
        assert stack.is_cuda
        sizes.append(len(stack))
        return real(like, stack, amax)

    monkeypatch.setattr(alike, "quantize", quantize_and_tell)
    use(False)
    on_cpu = quantize(source, tmp_path / "cpu", request, device="cpu")
    alone = quantize(source, tmp_path / "alone", request, device="cuda")
    wanted = checkpoints.hashes(on_cpu.output), on_cpu.errors
    assert (checkpoints.hashes(alone.output), alone.errors) == wanted and not sizes
    for number, budget in enumerate((*CUTS, CUTS[1])):  # the second twice: streams may race
        use(True, budget)
        done = quantize(source, tmp_path / str(number), request, device="cuda")
        assert (checkpoints.hashes(done.output), done.errors) == wanted, budget
    assert max(sizes) >= 24


def test_what_is_refused_is_named(tmp_path, use):
    tensors = model()
    tensors[LAYER + "mlp.experts.5.up_proj.weight"][7, 9] = torch.nan
    source = single(tmp_path / "source", tensors)
    use(True, CUTS[0])
    with pytest.raises(NonFiniteError, match=r"experts\.5\.up_proj\.weight holds 1 NaN"):
        quantize(source, tmp_path / "out", device="cuda")
    assert not (tmp_path / "out").exists()
