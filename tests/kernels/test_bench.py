"""What the benches of `kv_nvfp4` and `fake_quant` time can be called, and passes their check."""

import importlib
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parents[2] / "kernels" / "bench"


@pytest.mark.parametrize(("family", "shape"), [("kv", (64, 4, 64)), ("fakes", (32, 128))])
def test_every_contender_runs(monkeypatch, family, shape):
    monkeypatch.syspath_prepend(BENCH)
    module = importlib.import_module(family)
    listed = importlib.import_module("run").FAMILIES
    assert family in listed
    w = torch.randn(shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    for operation in module.OPERATIONS:
        assert operation.shapes and operation.minimal(w) > w.numel()
        assert any(contender.name == "lowbit" for contender in operation.contenders)
        if operation.check is not None:
            operation.check(w)
        for contender in operation.contenders:
            assert contender.prepare(w)() is not None
