"""A small model with several jobs, and a folder for outputs that holds nothing else."""

import pytest
import torch

from tests import checkpoints
from tests.checkpoints import LAYER, sharded, weight


@pytest.fixture
def source(tmp_path):
    """Return a model of two shards: a fused group, single weights, kept tensors."""
    first = {f"{LAYER}self_attn.{x}_proj.weight": weight(64, 64, seed=ord(x)) for x in "qkv"}
    second = {
        LAYER + "mlp.down_proj.weight": weight(300, 64),
        LAYER + "mlp.up_proj.weight": weight(64, 96).float(),
        LAYER + "self_attn.o_proj.weight": weight(64, 64),
        "model.norm.weight": torch.ones(64, dtype=torch.bfloat16),
        "model.embed_tokens.weight": weight(50, 64),
    }
    return sharded(tmp_path / "source", first, second)


@pytest.fixture
def alone(tmp_path):
    """Return the same kind of model as one file."""
    tensors = {
        f"{LAYER}mlp.{x}_proj.weight": weight(96, 64, seed=ord(x[0])) for x in ("up", "down")
    }
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.bfloat16)
    return checkpoints.write(tmp_path / "alone.safetensors", tensors)


@pytest.fixture
def place(tmp_path):
    folder = tmp_path / "place"
    folder.mkdir()
    return folder
