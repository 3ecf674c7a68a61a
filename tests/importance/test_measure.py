"""What `lowbit importance` measures, against hooks on the whole model, loaded as transformers loads
it; and what it refuses."""

import importlib
import json

import pytest
import torch
from safetensors import safe_open
from torch import nn

from lowbit_kernels.importance import exponents_of
from lowbitcli import api
from lowbitcli.errors import (
    CheckpointError,
    LowbitError,
    OutputError,
    UnsupportedError,
    UsageError,
)
from lowbitcli.importance import model as streamed
from lowbitcli.importance.tokens import random_ids
from tests.checkpoints import single, weight
from tests.consumers.models import tiny_experts, tiny_llama

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
TOKENS = 48


def contents(path):
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def measured(source, path, **how):
    return contents(api.importance(source, path, device="cpu", **{"tokens": TOKENS} | how).output)


def hooked(folder, ids, **given):
    """Return exponents of the inputs of every linear layer, by name in memory."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):

            def keep(_, args, __, name=name):
                found[name] = args[0].flatten(0, -2)

            module.register_forward_hook(keep)
    with torch.no_grad():
        model(torch.tensor([ids]), **given)
    found.pop("lm_head", None)
    return model, {name: exponents_of(x.double().square().mean(0)) for name, x in found.items()}


@pytest.mark.parametrize("tied", [False, True])
def test_layers_are_as_in_the_whole_model(tmp_path, tied):
    source = tiny_llama(tmp_path / "m", tied=tied)
    found, said = measured(source, tmp_path / "h.safetensors", seed=5)
    _, wanted = hooked(source, random_ids(TOKENS, 256, 5))
    assert found.keys() == wanted.keys() and len(found) == 14
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    assert said["lowbit.importance"] == "1" and said["tokens"] == "48" and said["seed"] == "5"
    assert torch.equal(found["model.layers.0.mlp.up_proj"], found["model.layers.0.mlp.gate_proj"])
    other, _ = measured(source, tmp_path / "other.safetensors", seed=6)
    assert any(not torch.equal(found[name], other[name]) for name in found)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_all_experts_see_all_tokens(tmp_path, kind, stacked):
    source = tiny_experts(tmp_path / "m", kind, stacked=stacked)
    found, _ = measured(source, tmp_path / "h.safetensors")
    model, _ = hooked(source, random_ids(TOKENS, 256, 0))
    # The same model with experts that see everything: as many are chosen as there are.
    seen = {}
    for number, layer in enumerate(model.model.layers):
        experts = layer.mlp.experts

        def keep(_, args, number=number):
            seen[number] = args[0]

        experts.register_forward_pre_hook(keep)
    with torch.no_grad():
        model(torch.tensor([random_ids(TOKENS, 256, 0)]))
    assert seen[0].shape[0] == TOKENS
    names = {"gate_up_proj": ("gate_up_proj",), "down_proj": ("down_proj",)}
    where = "mlp.experts"
    if not stacked:
        names = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
        if kind == "mixtral":
            names = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
            where = "block_sparse_moe.experts"
    for number, x in seen.items():
        experts = model.model.layers[number].mlp.experts
        for name in names["gate_up_proj"]:
            wanted = exponents_of(x.double().square().mean(0))
            assert torch.equal(found[f"model.layers.{number}.{where}.{name}"], wanted)
        with torch.no_grad():
            gate, up = (x @ experts.gate_up_proj.transpose(1, 2)).chunk(2, -1)
            inner = nn.functional.silu(gate) * up
        wanted = exponents_of(inner.double().square().mean(1))
        own = found[f"model.layers.{number}.{where}.{names['down_proj'][0]}"]
        assert own.shape == wanted.shape
        assert (own != wanted).double().mean() < 0.01  # products in another order


def test_a_quantized_source_is_measured_as_what_it_stands_for(tmp_path):
    source = tiny_llama(tmp_path / "m", tied=False)
    done = api.quantize(source, tmp_path / "q", api.Request(scheme="fp8_block128"), device="cpu")
    back = api.dequantize(done.output, tmp_path / "b", dtype="fp32", device="cpu")
    one, _ = measured(done.output, tmp_path / "one.safetensors")
    other, _ = measured(back.output, tmp_path / "other.safetensors")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_one_layer_is_in_memory_at_a_time(tmp_path, monkeypatch):
    source = tiny_llama(tmp_path / "m", tied=False)
    most = []
    real = streamed.Streamed._check

    def check(self, named):
        real(self, named)
        here = [n for n, p in self.model.named_parameters() if not p.is_meta and ".layers." in n]
        most.append({name.split(".")[2] for name in here})

    monkeypatch.setattr(streamed.Streamed, "_check", check)
    done = api.importance(source, tmp_path / "h.safetensors", tokens=8, device="cpu")
    assert most == [set(), {"0"}, {"1"}]
    assert done.largest == 4 * (256 * (256 + 128 + 128 + 256) + 3 * 256 * 512 + 2 * 256)


def test_a_model_without_layers_is_read_whole(tmp_path, monkeypatch):
    source = tiny_llama(tmp_path / "m", tied=False)
    one, _ = measured(source, tmp_path / "one.safetensors")
    monkeypatch.setattr(streamed, "_units", lambda *_: iter(()))
    done = api.importance(source, tmp_path / "other.safetensors", tokens=TOKENS, device="cpu")
    other, _ = contents(done.output)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert done.notes[0].startswith("no layers were found, so the whole model was in memory: 5 MB")


def test_the_file_is_used_and_both_halves_say_it(tmp_path):
    source = tiny_llama(tmp_path / "m", tied=False)
    file = api.importance(source, tmp_path / "h.safetensors", tokens=8, device="cpu").output
    recipe = tmp_path / "r.yaml"
    recipe.write_text("rules: [{match: '*', scheme: nvfp4, scale: mse}]\n")
    plan = api.plan_quantize(source, None, api.Request(recipe=recipe, importance=file))
    assert "14 of 14 searched weights" in plan.notes[-1] and "(8 random tokens)" in plan.notes[-1]
    assert all(len(weight.importance) == weight.shape[-1] for weight in plan.quantized)


def refused(kind, words, *arguments, **how):
    with pytest.raises(kind, match=words) as caught:
        api.importance(*arguments, device="cpu", **how)
    assert isinstance(caught.value, LowbitError)
    return caught.value.hint


def test_refusals(tmp_path, monkeypatch):
    source, out = tiny_llama(tmp_path / "m", tied=False), tmp_path / "h.safetensors"
    refused(UsageError, "at least 1", source, out, tokens=0)
    refused(UsageError, "no model's directory", source / "model.safetensors", out)
    bare = single(tmp_path / "bare", {"a.weight": weight(16, 32)}, {"model_type": "unheard"})
    refused(UnsupportedError, "transformers has no model for it", bare, out)
    (tmp_path / "text").write_text("a few words")
    assert "random tokens" in refused(
        UsageError, "no tokenizer", source, out, text=tmp_path / "text"
    )
    lacking, _ = contents(source / "model.safetensors")
    del lacking["model.layers.1.mlp.up_proj.weight"]
    config = (source / "config.json").read_text()
    short = single(tmp_path / "short", lacking, None)
    (short / "config.json").write_text(config)
    refused(CheckpointError, "needs model.layers.1.mlp.up_proj.weight", short, out)
    assert not out.exists()
    out.write_text("something")
    assert "--force" in refused(OutputError, "exists", source, out)
    assert "make it first" in refused(OutputError, "is no directory", source, out / "x" / "h")
    refused(UsageError, "is a source|the source", source, source / "model.safetensors", force=True)


@pytest.mark.parametrize("tokens", [128, 512])
def test_a_config_of_another_vocabulary_is_refused(tmp_path, tokens):
    folder = tiny_llama(tmp_path / "model", tied=False)
    config = json.loads((folder / "config.json").read_text())
    assert config["vocab_size"] not in (128, 512)
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": tokens}))
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight is .* config.json makes it"):
        measured(folder, tmp_path / "i.safetensors", tokens=16)


def test_without_transformers(tmp_path, monkeypatch):
    source = tiny_llama(tmp_path / "m", tied=False)
    real = importlib.import_module

    def absent(name, *rest):
        if name == "transformers":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(streamed.importlib, "import_module", absent)
    hint = refused(UsageError, "measured with transformers", source, tmp_path / "h.safetensors")
    assert hint == "pip install 'lowbit[importance]'"
    monkeypatch.setattr(streamed.importlib, "import_module", real)
    monkeypatch.setattr(real("transformers"), "__version__", "4.57.0")
    refused(UsageError, "4.57.0 is too old", source, tmp_path / "h.safetensors")
