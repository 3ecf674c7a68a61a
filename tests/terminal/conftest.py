"""A folder with a small model in it, and the command line as a function."""

import os
from pathlib import Path

import pytest
import torch

from lowbitcli import program
from lowbitcli.cli import app
from tests.checkpoints import LAYER, single, weight

MODEL = {
    LAYER + "mlp.down_proj.weight": weight(64, 64),
    LAYER + "mlp.odd_proj.weight": weight(64, 40),
    "model.norm.weight": torch.ones(64, dtype=torch.bfloat16),
    "lm_head.weight": weight(32, 64),
}


@pytest.fixture(autouse=True)
def somewhere(tmp_path, monkeypatch):
    """Run where `model/` is a small model, with relative paths, so that outputs can be compared."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("LOWBIT_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "80")
    single(Path("model"), MODEL)
    return tmp_path


@pytest.fixture
def lowbit(capsys):
    """Return a function that runs a command line: words -> (exit code, stdout, stderr)."""

    def run(*words):
        capsys.readouterr()
        code = program.run(app, [str(word) for word in words])
        return (code, *capsys.readouterr())

    return run
