"""What the benches time can be called, and passes their check."""

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


@pytest.mark.parametrize(
    "family", ["fp8", "mx", "nvfp4", "grouped", "stores", "searches", "errors"]
)
def test_our_own_passes_the_check_of_every_operation(monkeypatch, family):
    monkeypatch.syspath_prepend(BENCH)
    w = torch.randn((2, 128, 128), generator=torch.Generator().manual_seed(2)).bfloat16()
    for operation in importlib.import_module(family).OPERATIONS:
        if operation.check is not None:
            operation.check(w)
        (ours,) = (one for one in operation.contenders if one.name == "lowbit")
        assert ours.prepare(w)() is not None
