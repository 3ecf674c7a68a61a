"""Stacks of experts taken apart under the names that programs which serve a model look for: w1, w3
and w2 for some, gate_proj, up_proj and down_proj for the others."""

import pytest
import torch

from lowbitcli.api import Request, dequantize, plan_quantize, quantize
from lowbitcli.containers.stacks import LETTERS, MODELS
from tests import checkpoints
from tests.checkpoints import single
from tests.experts import DOWN, UP, E, P, apart, config_of, problems, same_tensors, stacked

LETTER = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
OWN = "model.layers.0.block_sparse_moe.experts."


def lettered():
    """The experts one by one, as Mixtral is released."""
    found = {}
    for name, w in apart().items():
        expert, member, _ = name.removeprefix(P).split(".")
        found[f"{OWN}{expert}.{LETTER[member]}.weight"] = w
    return found


def moved(tensors):
    return {name.replace(P, OWN): w for name, w in tensors.items()}


@pytest.mark.parametrize("container", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("model", ["mixtral", "phimoe", "minimax_m2"])
def test_stacks_become_what_the_model_has_one_by_one(tmp_path, container, model):
    request = Request(scheme="nvfp4", container=container)
    tensors = moved(stacked("out_in", "halves", apart()))
    source = single(tmp_path / "stack", tensors, config_of(model))
    done = quantize(source, tmp_path / "a", request, device="cpu")
    alone = single(tmp_path / "alone", lettered(), config_of(model))
    other = quantize(alone, tmp_path / "b", request, device="cpu")
    same_tensors(done.output, other.output)
    assert checkpoints.config_of(done.output) == checkpoints.config_of(other.output)
    assert problems(done.output, source) == [] and problems(done.output, alone) == []
    assert not any("block_sparse_moe, and read no" in note for note in done.plan.notes)
    stored = checkpoints.read(done.output)
    globals_ = [n for n in stored if n.endswith(("weight_global_scale", "weight_scale_2"))]
    assert len(globals_) == 3 * E, "every member of every expert"
    for e in range(E):
        w1, w3 = (next(n for n in globals_ if f".{e}.{member}." in n) for member in ("w1", "w3"))
        assert torch.equal(stored[w1], stored[w3])
    back = dequantize(done.output, tmp_path / "d", device="cpu")
    assert checkpoints.read(back.output).keys() == lettered().keys()


def test_a_layout_in_a_recipe_changes_the_rows_and_not_the_names(tmp_path):
    tensors = moved(stacked("in_out", "interleaved", apart()))
    source = single(tmp_path / "stack", tensors, config_of("mixtral"))
    said = tmp_path / "r.yaml"
    said.write_text(
        'layout: {"*.gate_up_proj": in_out interleaved, "*.down_proj": in_out}\n'
        'rules: [{match: "*", scheme: fp8_channel}]'
    )
    done = quantize(source, tmp_path / "a", Request(recipe=said), device="cpu")
    alone = single(tmp_path / "alone", lettered(), config_of("mixtral"))
    other = quantize(alone, tmp_path / "b", Request(scheme="fp8_channel"), device="cpu")
    same_tensors(done.output, other.output)
    assert problems(done.output, source) == []


def test_stacks_called_by_letters_become_names_where_the_model_has_those(tmp_path):
    one = apart()
    tensors = {
        f"{P}{letter}": torch.stack([one[f"{P}{e}.{name}.weight"] for e in range(E)])
        for name, letter in LETTER.items()
    }
    said = tmp_path / "r.yaml"
    said.write_text('layout: {"*.w?": out_in}\nrules: [{match: "*", scheme: nvfp4}]')
    source = single(tmp_path / "stack", tensors, config_of("qwen3_moe"))
    done = quantize(source, tmp_path / "a", Request(recipe=said), device="cpu")
    alone = single(tmp_path / "alone", one, config_of("qwen3_moe"))
    other = quantize(alone, tmp_path / "b", Request(scheme="nvfp4"), device="cpu")
    same_tensors(done.output, other.output)
    source = single(tmp_path / "unknown", tensors, config_of("other"))
    plan = plan_quantize(source, None, Request(recipe=said))
    names = {weight.name for weight in plan.quantized}
    assert names == {f"{P}{e}.{letter}.weight" for e in range(E) for letter in LETTER.values()}
    assert any("nothing is known of programs that read single experts" in x for x in plan.notes)


def test_kept_stacks_are_ignored_by_the_names_that_readers_look_for(tmp_path):
    attention = "model.layers.0.self_attn.o_proj.weight"
    tensors = moved(stacked("out_in", "halves", apart()))
    tensors[attention] = apart()[f"{P}0.down_proj.weight"]
    source = single(tmp_path / "s", tensors, config_of("mixtral"))
    said = tmp_path / "r.yaml"
    said.write_text('rules: [{match: "*.self_attn.*", scheme: nvfp4}]')
    done = quantize(source, tmp_path / "a", Request(recipe=said), device="cpu")
    ignored = checkpoints.quantization_of(done.output)["ignore"]
    assert {f"{OWN}0.{letter}" for letter in LETTER.values()} <= set(ignored)
    assert not any("gate_proj" in name for name in ignored)


def test_transformers_own_name_of_the_module_is_told_of(tmp_path):
    source = single(tmp_path / "s", stacked("out_in", "halves", apart()), config_of("mixtral"))
    plan = plan_quantize(source, None, Request(scheme="nvfp4"))
    assert {UP, DOWN}.isdisjoint(weight.name for weight in plan.weights)
    assert any("block_sparse_moe, and read no `mlp`" in note for note in plan.notes)
    plan = plan_quantize(source, None, Request(scheme="nvfp4", container="lowbit"))
    assert not any("block_sparse_moe" in note for note in plan.notes)


def test_models_with_letters_are_models_that_are_known():
    assert MODELS.keys() >= LETTERS


@pytest.mark.parametrize(
    ("rules", "told"),
    [
        ('[{match: "*", scheme: nvfp4}]', ""),
        ('[{match: "*.experts.1.*", keep: true}, {match: "*", scheme: nvfp4}]', "kept, nvfp4"),
        ('[{match: "*.down_proj", scheme: mxfp8}, {match: "*", scheme: nvfp4}]', "mxfp8, nvfp4"),
    ],
)
def test_a_plan_says_that_experts_of_a_module_are_served_as_one(tmp_path, rules, told):
    source = single(tmp_path / "alone", apart(), config_of("qwen3_moe"))
    said = tmp_path / "r.yaml"
    said.write_text(f"container: compressed-tensors\nrules: {rules}")
    notes = plan_quantize(source, None, Request(recipe=said)).notes
    found = [note for note in notes if "take those of a module for one scheme" in note]
    assert len(found) == bool(told)
    assert all(note.endswith(f"mlp.experts: {told}") for note in found)
