"""Stacks that are not quantized lie as their quantized form says, where nothing else does."""

import pytest
import torch

from lowbitcli import api
from tests import checkpoints
from tests.checkpoints import CONFIG, single, weight, write
from tests.verify.planted import change, told

EXPERTS = "model.layers.0.mlp.experts."
GATE_UP, DOWN = EXPERTS + "gate_up_proj", EXPERTS + "down_proj"
CONV = "model.layers.0.mlp.c_fc.weight"
RECIPE = """
rules: [{match: "*", scheme: SCHEME}]
layout: {"*.gate_up_proj": in_out interleaved, "*.down_proj": in_out, "*.c_fc": in_out}
"""


def stack(out, cols, seed):
    return torch.stack([weight(out, cols, 0.1 * (n + 1), seed=seed + n) for n in range(3)])


def stacks():
    return {GATE_UP: stack(64, 96, 0), DOWN: stack(64, 64, 5)}  # square: no shape tells


def quantized(source, tmp_path, container, scheme):
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE.replace("SCHEME", scheme))
    if container == "gpt-oss":
        path.write_text(path.read_text().replace(', "*.c_fc": in_out', ""))
    request = api.Request(recipe=path, container=container)
    name = "q.safetensors" if source.is_file() else "q"
    return api.quantize(source, tmp_path / name, request, device="cpu").output


def wrong(one, other):
    found = api.verify(one, against=other, device="cpu")
    return [problem for problem in told(found) if problem[0] == "fail"]


@pytest.fixture(params=["file", "directory", "of a model that says otherwise"])
def source(request, tmp_path):
    tensors = stacks() | {CONV: weight(64, 96, seed=9)}
    if request.param == "file":
        return write(tmp_path / "st.safetensors", tensors)
    model = "qwen3_moe" if request.param.startswith("of a model") else "of_none"
    return single(tmp_path / "source", tensors, {**CONFIG, "model_type": model})


def test_what_was_dequantized_lies_as_it_did_before_it_was_quantized(source, tmp_path):
    q = quantized(source, tmp_path, "lowbit", "nvfp4")
    d = api.dequantize(q, tmp_path / ("d.safetensors" if source.is_file() else "d")).output
    assert wrong(d, q) == wrong(d, source) == wrong(q, source) == []

    def turn(tensors):
        tensors[DOWN][1] = tensors[DOWN][1].T.clone()

    change(d, turn)
    assert ("fail", "bound", DOWN) in wrong(d, q)


def test_stacks_of_gpt_oss_lie_as_its_models_do(tmp_path):
    source = single(tmp_path / "source", stacks(), {**CONFIG, "model_type": "gpt_oss"})
    q = quantized(source, tmp_path, "gpt-oss", "mxfp4")
    d = api.dequantize(q, tmp_path / "d").output
    alone = write(tmp_path / "alone.safetensors", checkpoints.read(d))
    (q / "lowbit.json").unlink()  # which would hold its codes to the weights they were made of
    assert wrong(d, q) == wrong(alone, q) == wrong(q, alone) == []
