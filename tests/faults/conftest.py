"""A small model with several jobs, a file alone, both quantized, and what runs of them write."""

import functools

import pytest
import torch

from tests import checkpoints
from tests.checkpoints import LAYER, sharded, weight
from tests.faults.commands import Models, undisturbed
from tests.faults.shim import run, warm


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Return a model of two shards (a fused group, single weights, kept tensors), the same kind of
    model as one file, and both quantized."""
    root = tmp_path_factory.mktemp("models")
    first = {f"{LAYER}self_attn.{x}_proj.weight": weight(64, 64, seed=ord(x)) for x in "qkv"}
    second = {
        LAYER + "mlp.down_proj.weight": weight(300, 64),
        LAYER + "mlp.up_proj.weight": weight(64, 96).float(),
        LAYER + "self_attn.o_proj.weight": weight(64, 64),
        "model.norm.weight": torch.ones(64, dtype=torch.bfloat16),
        "model.embed_tokens.weight": weight(50, 64),
    }
    source = sharded(root / "source", first, second)
    tensors = {
        f"{LAYER}mlp.{x}_proj.weight": weight(96, 64, seed=ord(x[0])) for x in ("up", "down")
    }
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.bfloat16)
    alone = checkpoints.write(root / "alone.safetensors", tensors)
    warm(source)
    quantized, quantized_alone = root / "quantized", root / "quantized.safetensors"
    for path, made in ((source, quantized), (alone, quantized_alone)):
        done = run(root, ["quantize", path, "-o", made, "--device", "cpu"])
        assert done.code == 0, done.err
    return Models(source, alone, quantized, quantized_alone)


@pytest.fixture(scope="session")
def expected(models, tmp_path_factory):
    """Return a function: command -> what an undisturbed run writes, and the number of its calls."""

    @functools.cache
    def do(command):
        return undisturbed(command, models, tmp_path_factory.mktemp("undisturbed"))

    return do


@pytest.fixture
def place(tmp_path):
    folder = tmp_path / "place"
    folder.mkdir()
    return folder
