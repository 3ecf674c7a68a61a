"""Fake quantization of a recipe: every weight in its own dtype, bit for bit what the quantized one
decodes to, by the same pipeline."""

import os
import signal

import pytest
import torch

from lowbitcli import api
from lowbitcli.api import Request, dequantize, quantize
from lowbitcli.errors import StoppedError, UsageError
from lowbitcli.pipeline import memory, proof, write
from lowbitcli.pipeline.memory import Budget
from tests import checkpoints
from tests.checkpoints import LAYER, single, weight

RULES = """
rules:
  - {match: "*.self_attn.*", scheme: mxfp8}
  - {match: "*.down_proj", scheme: mxfp4, scale: even}
  - {match: "*.o_proj", scheme: fp8_block128, scale: ue8m0}
  - {match: "*", scheme: nvfp4, scale: mse}
"""
ATTENTION = [f"{LAYER}self_attn.{one}_proj.weight" for one in "qkv"]
MLP = [f"{LAYER}mlp.{one}_proj.weight" for one in ("gate", "up", "down")]


def model():
    tensors = {name: weight(48, 64, seed=n) for n, name in enumerate((*ATTENTION, *MLP))}
    tensors[f"{LAYER}mlp.o_proj.weight"] = weight(130, 192).half()
    tensors["model.norm.weight"] = torch.ones(64)
    return tensors


@pytest.fixture
def source(tmp_path):
    return single(tmp_path / "source", model())


def recipe(folder, text, name="r.yaml"):
    (folder / name).write_text(text)
    return folder / name


def test_a_recipe_is_fake_bit_for_bit(tmp_path, source):
    fake = quantize(
        source, tmp_path / "f", Request(recipe=recipe(tmp_path, "fake: true" + RULES)), device="cpu"
    )
    real = Request(recipe=recipe(tmp_path, RULES, "real.yaml"), container="lowbit")
    real = quantize(source, tmp_path / "q", real, device="cpu")
    found = checkpoints.read(fake.output)
    decoded = {}
    for dtype in ("bf16", "fp16"):
        back = dequantize(real.output, tmp_path / dtype, dtype=dtype, device="cpu")
        decoded[dtype] = checkpoints.read(back.output)
    for name, tensor in model().items():
        dtype = "fp16" if tensor.dtype == torch.float16 else "bf16"
        expected = decoded[dtype][name] if tensor.ndim == 2 else tensor
        assert found[name].dtype == tensor.dtype
        assert checkpoints.same(found[name], expected), name
        assert checkpoints.same(found[name], tensor) == (tensor.ndim == 1), name
    assert fake.errors.keys() == real.errors.keys()
    assert {weight.target.name for weight in fake.plan.quantized} == {
        "mxfp8", "mxfp4", "fp8_block128", "nvfp4",
    }  # fmt: skip


def test_the_recipe_and_the_option_are_one(tmp_path, source):
    said = quantize(
        source, tmp_path / "a", Request(recipe=recipe(tmp_path, "fake: true" + RULES)), device="cpu"
    )
    asked = Request(recipe=recipe(tmp_path, RULES), fake=True)
    asked = quantize(source, tmp_path / "b", asked, device="cpu")
    assert checkpoints.read(said.output).keys() == checkpoints.read(asked.output).keys()
    for name, tensor in checkpoints.read(said.output).items():
        assert checkpoints.same(tensor, checkpoints.read(asked.output)[name])
    assert said.plan.container == asked.plan.container == "plain"
    assert said.plan.recipe == asked.plan.recipe
    beside = quantize(source, None, Request(recipe=recipe(tmp_path, "fake: true" + RULES)))
    assert beside.output.name == "source-r-fake"


def test_it_verifies_and_is_found_out_where_a_bit_is_not_so(tmp_path, source):
    request = Request(recipe=recipe(tmp_path, "fake: true" + RULES))
    done = quantize(source, tmp_path / "f", request, device="cpu")
    found = api.verify(done.output, against=source, device="cpu")
    assert found.passed
    assert {row.how for row in found.weights} == {"fake"}
    file = done.output / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-3] ^= 1
    file.write_bytes(raw)
    assert not api.verify(done.output, against=source, device="cpu").passed


def test_it_goes_on_with_what_was_left(tmp_path, source, monkeypatch):
    request = Request(recipe=recipe(tmp_path, "fake: true" + RULES))
    monkeypatch.setattr(memory, "budget", lambda *_: Budget(1, 1, 0))
    monkeypatch.setattr(proof, "SYNC_BYTES", 1)
    real, calls = write.Writer.write, []

    def send(self, part, offset, data):
        real(self, part, offset, data)
        calls.append(part)
        if len(calls) == 4:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(write.Writer, "write", send)
        with pytest.raises(StoppedError):
            quantize(source, tmp_path / "out", request, device="cpu")
    done = quantize(source, tmp_path / "out", request, device="cpu")
    whole = quantize(source, tmp_path / "other" / "out", request, device="cpu")
    assert done.resumed > 0
    assert checkpoints.hashes(done.output) == checkpoints.hashes(whole.output)
    assert quantize(source, tmp_path / "out", request, device="cpu").complete


@pytest.mark.parametrize("container", ["comfyui", "modelopt"])
def test_a_recipe_of_a_container_is_fake_with_its_numbers(source, tmp_path, container):
    """Readers of comfyui fuse nothing: there each weight has a scale of its own."""
    text = f"container: {container}\nrules: [{{match: '*', scheme: nvfp4}}]\n"
    done = {
        said: quantize(
            source, tmp_path / said, Request(recipe=recipe(tmp_path, text, "r.yaml"), fake=fake)
        ).output
        for said, fake in (("fake", True), ("real", False))
    }
    dequantize(done["real"], tmp_path / "back", dtype="bf16", device="cpu")
    found, back = checkpoints.read(done["fake"]), checkpoints.read(tmp_path / "back")
    for name in (*ATTENTION, *MLP):
        assert checkpoints.same(found[name], back[name]), name


def test_a_container_has_no_say_in_it(source, tmp_path):
    with pytest.raises(UsageError, match="the numbers of lowbit's container"):
        quantize(source, tmp_path / "out", Request(scheme="fp8", fake=True, container="modelopt"))
    said = recipe(tmp_path, "fake: true" + RULES)
    with pytest.raises(UsageError, match="the numbers of lowbit's container"):
        quantize(source, tmp_path / "out", Request(recipe=said, container="modelopt"))
