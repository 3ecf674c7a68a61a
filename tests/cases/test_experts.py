"""Case 8, the other half: stacks of experts taken apart for readers who want them one by one.

What is written must be, to the bit, what is written of the same model with its experts one by one.
"""

import json

import pytest
import torch

from lowbitcli import api
from lowbitcli.api import Request, dequantize, plan_quantize, quantize
from lowbitcli.pipeline import memory
from tests import checkpoints
from tests.checkpoints import sharded, single
from tests.experts import (
    DOWN,
    INNER,
    KINDS,
    UP,
    E,
    H,
    P,
    apart,
    biases,
    config_of,
    model,
    problems,
    same_tensors,
    stacked,
)

WRITTEN = [
    ("compressed-tensors", "nvfp4"),
    ("compressed-tensors", "mxfp4"),
    ("compressed-tensors", "fp8"),
    ("compressed-tensors", "fp8-dynamic"),
    ("compressed-tensors", "fp8-block"),
    ("compressed-tensors", "mxfp8"),
    ("compressed-tensors", "int8"),
    ("modelopt", "nvfp4"),
    ("modelopt", "fp8-dynamic"),
    ("deepseek", "fp8-block"),
    ("native-mxfp8", "mxfp8"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("container", "scheme"), WRITTEN[:3])
def test_every_layout_gives_what_single_experts_give(tmp_path, kind, container, scheme):
    request = Request(scheme=scheme, container=container)
    source = model(tmp_path / "stacked", kind)
    one = quantize(source, tmp_path / "one", request, device="cpu")
    apart_ = single(tmp_path / "apart", apart(), config_of(kind))
    other = quantize(apart_, tmp_path / "other", request, device="cpu")
    same_tensors(one.output, other.output)
    assert checkpoints.quantization_of(one.output) == checkpoints.quantization_of(other.output)
    found = api.verify(one.output, against=source, device="cpu")
    assert found.problems == ()
    assert len(found.weights) == 3 * E and all(row.figures for row in found.weights)


@pytest.mark.parametrize(("container", "scheme"), WRITTEN)
def test_every_container_has_them_one_by_one(tmp_path, container, scheme):
    request = Request(scheme=scheme, container=container)
    source = model(tmp_path / "stacked", "gpt_oss", bias=True)
    one = quantize(source, tmp_path / "one", request, device="cpu")
    apart_ = single(tmp_path / "apart", {**apart(), **biases()}, config_of("gpt_oss"))
    other = quantize(apart_, tmp_path / "other", request, device="cpu")
    same_tensors(one.output, other.output)
    assert problems(one.output, source) == []
    back = dequantize(one.output, tmp_path / "back", device="cpu")
    assert checkpoints.read(back.output).keys() == {**apart(), **biases()}.keys()
    assert problems(back.output, one.output) == []


def test_verify_sees_another_expert_and_another_bias(tmp_path):
    source = model(tmp_path / "stacked", "gpt_oss", bias=True)
    done = quantize(source, tmp_path / "q", Request(scheme="fp8-dynamic"), device="cpu")
    file = done.output / "model.safetensors"
    stored = checkpoints.read(file)
    a, b = f"{P}0.gate_proj.bias", f"{P}1.gate_proj.bias"
    stored[a], stored[b] = stored[b], stored[a]
    a, b = f"{P}0.up_proj.weight", f"{P}2.up_proj.weight"
    stored[a], stored[b] = stored[b], stored[a]
    missing = f"{P}2.down_proj.bias"
    del stored[missing]
    checkpoints.write(file, stored, {"format": "pt"})
    (done.output / "lowbit.json").unlink()
    found = api.verify(done.output, against=source, device="cpu").problems
    kinds = {(one.kind, one.tensor) for one in found}
    assert kinds >= {
        ("changed", f"{P}0.gate_proj.bias"),
        ("changed", f"{P}1.gate_proj.bias"),
        ("bound", f"{P}0.up_proj.weight"),
        ("bound", f"{P}2.up_proj.weight"),
        ("missing", missing),
    }


def test_gate_and_up_of_an_expert_share_what_is_one_for_a_matrix(tmp_path):
    source = model(tmp_path / "stacked", "llama4")
    for scheme, suffix in (("nvfp4", "weight_global_scale"), ("fp8", "weight_scale")):
        done = quantize(source, tmp_path / scheme, Request(scheme=scheme), device="cpu")
        stored = checkpoints.read(done.output)
        gates = [stored[f"{P}{e}.gate_proj.{suffix}"] for e in range(E)]
        ups = [stored[f"{P}{e}.up_proj.{suffix}"] for e in range(E)]
        assert all(map(checkpoints.same, gates, ups))
        assert not checkpoints.same(gates[0], gates[1])


def test_stacks_of_gate_and_of_up_are_fused_by_expert(tmp_path):
    one = apart()
    stacks = {
        f"{P}{name}": torch.stack([one[f"{P}{e}.{name}.weight"] for e in range(E)])
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    source = single(tmp_path / "stacked", stacks, config_of("qwen3_moe"))
    first = quantize(source, tmp_path / "one", Request(scheme="nvfp4"), device="cpu")
    apart_ = single(tmp_path / "apart", one, config_of("qwen3_moe"))
    second = quantize(apart_, tmp_path / "other", Request(scheme="nvfp4"), device="cpu")
    same_tensors(first.output, second.output)


@pytest.mark.parametrize("kind", ["llama4", "gpt_oss", "qwen3_5_moe"])
def test_slices_change_no_byte(tmp_path, kind, monkeypatch):
    source = model(tmp_path / "stacked", kind, bias=True)
    request = Request(scheme="nvfp4")
    whole = quantize(source, tmp_path / "whole", request, device="cpu")
    monkeypatch.setattr(memory, "CPU_ELEMENTS", 128 * H)
    cut = quantize(source, tmp_path / "cut", request, device="cpu")
    assert checkpoints.hashes(whole.output) == checkpoints.hashes(cut.output)
    lowbit = Request(scheme="mxfp8", container="lowbit")
    stacks = quantize(source, tmp_path / "stacks", lowbit, device="cpu")
    back = dequantize(stacks.output, tmp_path / "back", dtype="fp32", device="cpu")
    monkeypatch.undo()
    other = quantize(source, tmp_path / "other", lowbit, device="cpu")
    assert checkpoints.hashes(stacks.output) == checkpoints.hashes(other.output)
    again = dequantize(other.output, tmp_path / "again", dtype="fp32", device="cpu")
    assert checkpoints.hashes(back.output) == checkpoints.hashes(again.output)
    assert problems(again.output, other.output) == []


def test_the_same_again_is_complete_and_another_source_is_not(tmp_path):
    source = model(tmp_path / "stacked", "gpt_oss", bias=True)
    request = Request(scheme="mxfp8")
    assert not quantize(source, tmp_path / "q", request, device="cpu").complete
    assert quantize(source, tmp_path / "q", request, device="cpu").complete
    tensors = checkpoints.read(source)
    tensors[UP + "_bias"][2, 3] += 1
    checkpoints.write(source / "model.safetensors", tensors, {"format": "pt"})
    again = quantize(source, tmp_path / "q", request, device="cpu", force=True)
    stored = checkpoints.read(again.output)
    assert checkpoints.same(stored[f"{P}2.up_proj.bias"], tensors[UP + "_bias"][2, 1::2])


def test_shards_keep_what_is_of_their_stacks(tmp_path):
    tensors = stacked("in_out", "interleaved", apart(), biases())
    shards = ({k: v for k, v in tensors.items() if k.startswith(x)} for x in (UP, DOWN))
    source = sharded(tmp_path / "source", *shards, config=config_of("gpt_oss"))
    done = quantize(source, tmp_path / "q", Request(scheme="nvfp4"), device="cpu")
    index = json.loads((done.output / checkpoints.INDEX).read_text())
    files = {name: file for name, file in index["weight_map"].items() if name.startswith(P)}
    assert {file for name, file in files.items() if ".down_proj." in name} == {
        "model-00002-of-00002.safetensors"
    }
    stored = checkpoints.read(done.output)
    assert stored.keys() == files.keys()
    total = sum(len(checkpoints.raw(tensor)) for tensor in stored.values())
    assert index["metadata"]["total_size"] == total


@pytest.mark.parametrize("target", ["compressed-tensors", "lowbit"])
def test_gpt_oss_as_released_is_recoded_without_rounding(tmp_path, target):
    source = model(tmp_path / "bf16", "gpt_oss", bias=True)
    request = Request(scheme="mxfp4", container="gpt-oss")
    released = quantize(source, tmp_path / "released", request, device="cpu")
    request = Request(scheme="mxfp4", container=target)
    done = quantize(released.output, tmp_path / "q", request, device="cpu")
    assert done.errors == {}
    assert problems(done.output, released.output) == []
    first = quantize(source, tmp_path / "first", request, device="cpu")
    a, b = checkpoints.read(done.output), checkpoints.read(first.output)
    assert a.keys() == b.keys() and all(checkpoints.same(a[name], b[name]) for name in a)


@pytest.mark.parametrize("scheme", ["nvfp4", "fp8", "fp8-dynamic", "int8", "fp8-block"])
def test_quantized_stacks_are_taken_apart(tmp_path, scheme):
    source = model(tmp_path / "bf16", "llama4")
    stacks = quantize(
        source, tmp_path / "stacks", Request(scheme=scheme, container="lowbit"), device="cpu"
    )
    request = Request(scheme=scheme, container="compressed-tensors")
    done = quantize(stacks.output, tmp_path / "q", request, device="cpu")
    assert done.errors == {}
    if scheme != "nvfp4":  # whose codes are for the global scale that a reader will see
        first = quantize(source, tmp_path / "first", request, device="cpu")
        same_tensors(done.output, first.output)
    plain = dequantize(stacks.output, tmp_path / "plain", dtype="fp32", device="cpu")
    values = checkpoints.read(plain.output)
    back = checkpoints.read(
        dequantize(done.output, tmp_path / "back", dtype="fp32", device="cpu").output
    )
    for e in range(E):
        assert torch.allclose(
            values[UP][e].t()[:INNER], back[f"{P}{e}.gate_proj.weight"], rtol=1e-6
        )
        assert torch.allclose(values[DOWN][e].t(), back[f"{P}{e}.down_proj.weight"], rtol=1e-6)


def test_nan_keeps_the_experts_of_its_layer_together(tmp_path):
    tensors = stacked("out_in", "halves", apart())
    tensors[UP][1, 3, 5] = torch.nan
    source = single(tmp_path / "source", tensors, config_of("qwen3_5_moe"))
    request = Request(scheme="nvfp4", nonfinite="keep")
    done = quantize(source, tmp_path / "q", request, device="cpu")
    assert list(done.non_finite) == [f"{P}1.gate_proj.weight"]
    same_tensors(done.output, source)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("gpt_oss", "neither transformers 5.24 nor vLLM 0.33"),
        ("llama4", "transformers 5.24 does not take experts of llama4 one by one"),
        ("qwen3_5_moe", ""),
    ],
)
def test_readers_that_do_not_take_single_experts_are_told_of(tmp_path, kind, said):
    source = model(tmp_path / "m", kind)
    for container, told in (("compressed-tensors", bool(said)), ("lowbit", False)):
        request = Request(scheme="mxfp8", container=container)
        notes = "\n".join(plan_quantize(source, None, request).notes)
        assert ("one by one" in notes) == told and (said in notes or not told)
