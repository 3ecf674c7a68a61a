"""Quantizing with an importance file: whose columns are weighed, by bytes, and what is said of the
rest."""

import json

import pytest
import torch

from lowbit_kernels import importance as arithmetic
from lowbit_kernels import mx, nvfp4
from lowbitcli.api import Request, plan_quantize, quantize, verify
from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.errors import CheckpointError, StoppedError, UsageError
from lowbitcli.pipeline import memory, write
from lowbitcli.pipeline.memory import Budget
from lowbitcli.plan.asked import Asked
from lowbitcli.plan.importance import Importance, model_of
from tests import checkpoints
from tests.checkpoints import LAYER, single, weight
from tests.experts import DOWN, INNER, UP, E, H, P, model

NAMES = [f"{LAYER}self_attn.{x}_proj" for x in "qkv"] + [f"{LAYER}mlp.down_proj"]
SEARCH = "rules: [{match: '*', scheme: %s, scale: mse}]\n"
METADATA = {"lowbit.importance": "1", "tokens": "512", "seed": "0"}


def exponents(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-20, 20, shape, generator=generator).to(torch.int8)


def stats(path, tensors, metadata=METADATA):
    return checkpoints.write(path, tensors, metadata)


@pytest.fixture
def source(tmp_path):
    tensors = {f"{name}.weight": weight(160, 64, seed=n) for n, name in enumerate(NAMES)}
    return single(tmp_path / "source", tensors)


@pytest.fixture
def recipe(tmp_path):
    def written(scheme="nvfp4"):
        path = tmp_path / f"{scheme}-search.yaml"
        path.write_text(SEARCH % scheme)
        return path

    return written


@pytest.fixture
def file(tmp_path):
    h = exponents(64)
    return stats(tmp_path / "stats.safetensors", dict.fromkeys(NAMES[:3], h) | {NAMES[3]: -h})


def asked(recipe, file, scheme="nvfp4", container="lowbit"):
    return Request(recipe=recipe(scheme), container=container, importance=file)


@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp4"])
def test_bytes_are_those_of_the_kernels_with_weights(tmp_path, source, recipe, file, scheme):
    done = quantize(source, tmp_path / "out", asked(recipe, file, scheme), device="cpu")
    plain = quantize(source, tmp_path / "plain", Request(recipe=recipe(scheme)), device="cpu")
    found, h = checkpoints.read(done.output), checkpoints.read(file)
    before = checkpoints.read(source)
    shared = max(before[f"{name}.weight"].float().abs().max() for name in NAMES[:3])
    for name in NAMES:
        w, own = before[f"{name}.weight"], arithmetic.values_of(h[name])
        if scheme == "nvfp4":
            amax = shared if name in NAMES[:3] else w.float().abs().max()
            data, scale, _ = nvfp4.quantize(w, nvfp4.global_scale_of(amax), "mse", own)
        else:
            data, scale = mx.quantize_mxfp4(w, "mse", importance=own)
        assert torch.equal(found[f"{name}.weight"], data)
        assert checkpoints.same(found[f"{name}.weight_scale"].view(scale.dtype), scale)
    assert done.errors[f"{NAMES[0]}.weight"].error > plain.errors[f"{NAMES[0]}.weight"].error
    told = f"4 of 4 searched weights have their columns weighed by {file.name} (512 random tokens)"
    assert told in done.plan.notes
    assert verify(done.output, against=source, device="cpu").passed


def test_small_slices_have_the_same_bytes(tmp_path, source, recipe, file, monkeypatch):
    one = quantize(source, tmp_path / "one", asked(recipe, file), device="cpu")
    monkeypatch.setattr(memory, "budget", lambda *_: Budget(2, 1, 0))
    other = quantize(source, tmp_path / "other", asked(recipe, file), device="cpu")
    assert checkpoints.hashes(one.output) == checkpoints.hashes(other.output)


def test_another_importance_is_another_plan(tmp_path, source, recipe, file, monkeypatch):
    real = write.Writer.write
    monkeypatch.setattr(memory, "budget", lambda *_: Budget(1, 1, 0))
    with monkeypatch.context() as patched:

        def fail(*arguments):
            real(*arguments)
            raise StoppedError(2, "stopped")

        patched.setattr(write.Writer, "write", fail)
        with pytest.raises(StoppedError):
            quantize(source, tmp_path / "out", asked(recipe, file), device="cpu")
    digests = {plan_quantize(source, None, Request(recipe=recipe())).digest}
    digests.add(plan_quantize(source, None, asked(recipe, file)).digest)
    stats(file, dict.fromkeys(NAMES, exponents(64, seed=9)), METADATA | {"seed": "1"})
    digests.add(plan_quantize(source, None, asked(recipe, file)).digest)
    assert len(digests) == 3
    done = quantize(source, tmp_path / "out", asked(recipe, file), device="cpu")
    fresh = quantize(source, tmp_path / "fresh", asked(recipe, file), device="cpu")
    assert done.resumed == 0
    assert checkpoints.hashes(done.output) == checkpoints.hashes(fresh.output)
    assert quantize(source, tmp_path / "out", asked(recipe, file), device="cpu").complete
    stats(file, dict.fromkeys(NAMES, exponents(64, seed=9)), METADATA | {"seed": "2"})
    same = plan_quantize(source, None, asked(recipe, file)).digest
    assert same in digests, "what it was measured on decides nothing"


def test_workers_plan_the_same(source, recipe, file, monkeypatch):
    request = asked(recipe, file)
    whole = plan_quantize(source, None, request)
    said = json.loads(json.dumps(Asked.to_quantize(source, request, {}).document(), default=str))
    monkeypatch.chdir("/")
    with Asked.of(said).planned(None) as (plan, _):
        assert plan.digest == whole.digest
        assert [w.importance for w in plan.weights] == [w.importance for w in whole.weights]


def test_what_lacks_importance_is_said(tmp_path, source, recipe, file):
    h = exponents(64)
    stats(file, {**dict.fromkeys(NAMES[:3], h), "model.layers.7.mlp.up_proj": h})
    done = quantize(source, tmp_path / "out", asked(recipe, file), device="cpu")
    plain = quantize(source, tmp_path / "plain", Request(recipe=recipe()), device="cpu")
    notes = "\n".join(done.plan.notes)
    assert "3 of 4 searched weights" in notes
    assert f"which the file lacks:\n{NAMES[3]}.weight" in notes
    assert "that this checkpoint lacks:\nmodel.layers.7.mlp.up_proj" in notes
    down = f"{NAMES[3]}.weight"
    assert done.errors[down] == plain.errors[down]


def test_wrong_files_are_refused(tmp_path, source, recipe, file):
    def refused(kind, words, request=None):
        with pytest.raises(kind, match=words):
            plan_quantize(source, None, request or asked(recipe, file))

    refused(UsageError, "no rule searches", Request(scheme="nvfp4", importance=file))
    refused(CheckpointError, "a directory", asked(recipe, source))
    stats(file, {NAMES[0]: exponents(96)})
    refused(CheckpointError, rf"importance of {NAMES[0]} is \[96\], and .* is \[160, 64\]")
    stats(file, {"other.module": exponents(64)})
    refused(UsageError, "importance of none of the 4 weights")
    stats(file, {NAMES[0]: exponents(64)}, {"format": "pt"})
    refused(CheckpointError, "no importance file")
    stats(file, {NAMES[0]: exponents(64).float()})
    refused(CheckpointError, r"F32 \[64\], and exponents are I8")
    refused(CheckpointError, "No such file", asked(recipe, tmp_path / "absent.safetensors"))


@pytest.mark.parametrize("kind", ["qwen3_5_moe", "gpt_oss"])
def test_experts_have_their_own(tmp_path, recipe, kind):
    source = model(tmp_path / "source", kind)
    up, down = exponents(H), exponents(E, INNER, seed=1)
    file = stats(tmp_path / "stats.safetensors", {UP: up, DOWN: down})
    request = Request(recipe=recipe("mxfp4"), container="compressed-tensors", importance=file)
    plan = plan_quantize(source, None, request)
    given = {weight.name: weight.importance for weight in plan.quantized}
    assert len(given) == 3 * E
    for e in range(E):
        for member in ("gate_proj", "up_proj"):
            assert given[f"{P}{e}.{member}.weight"] == checkpoints.raw(up)
        assert given[f"{P}{e}.down_proj.weight"] == checkpoints.raw(down[e])
    whole = Request(recipe=recipe("mxfp4"), container="lowbit", importance=file)
    apart = quantize(source, tmp_path / "apart", request, device="cpu")
    stack = quantize(source, tmp_path / "stack", whole, device="cpu")
    assert len(stack.errors) == 2
    one, other = checkpoints.read(stack.output), checkpoints.read(apart.output)
    data = next(w for name, w in one.items() if name.startswith(DOWN) and w.shape[-1] > 8)
    for e in range(E):
        assert torch.equal(data[e], other[f"{P}{e}.down_proj.weight_packed"])
    assert Importance.open(file).key(f"{P}1.up_proj") == (UP, 1)
    assert Importance.open(stats(file, {"another": up})).key(f"{P}1.up_proj") is None


@pytest.mark.parametrize("model", ["", "0" * 64, None])
def test_a_file_that_was_measured_on_other_files_is_told(tmp_path, source, recipe, model):
    """ "" stands for the digest of the source itself; older files have none."""
    with Checkpoint.open(source) as checkpoint:
        digest = model_of(checkpoint) if model == "" else model
    metadata = METADATA | ({} if digest is None else {"model": digest})
    file = stats(tmp_path / "s.safetensors", dict.fromkeys(NAMES, exponents(64)), metadata)
    told = plan_quantize(source, None, Request(recipe=recipe(), importance=file)).notes
    foreign = "s.safetensors was measured on other files than these"
    assert any(note.startswith(foreign) for note in told) == (model == "0" * 64)
