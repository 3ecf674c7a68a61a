"""What is decided together, and what each choice costs, on paper."""

import json

import pytest

from lowbitcli import api
from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.errors import RecipeError, UnsupportedError, UsageError
from lowbitcli.search.candidates import candidates, notes, told
from lowbitcli.search.units import paper
from tests import experts as stacks
from tests.checkpoints import single, weight
from tests.search import models

AT = "model.layers.0."
PARTS = ("transformer", "transformer_2", "text_encoder")


def units(path, schemes="nvfp4,mxfp8,fp8,keep", container="auto"):
    with Checkpoint.open(path) as checkpoint:
        return paper(checkpoint, candidates(schemes), container)


def members(found):
    return {unit.name: unit.members for unit in found.units}


def test_weights_that_are_served_as_one_are_one_unit(tmp_path):
    found = members(units(models.dense(tmp_path / "m", layers=1)))
    assert found == {
        f"{AT}mlp.down_proj": (f"{AT}mlp.down_proj.weight",),
        f"{AT}mlp.{{gate_proj,up_proj}}": (
            f"{AT}mlp.gate_proj.weight",
            f"{AT}mlp.up_proj.weight",
        ),
        f"{AT}self_attn.o_proj": (f"{AT}self_attn.o_proj.weight",),
        f"{AT}self_attn.{{q_proj,k_proj,v_proj}}": tuple(
            f"{AT}self_attn.{x}_proj.weight" for x in "kqv"
        ),
    }


def test_a_container_whose_readers_fuse_nothing_has_units_of_one(tmp_path):
    found = units(models.dense(tmp_path / "m", layers=1), "nvfp4,fp8,keep", "comfyui")
    assert len(found.units) == 7
    assert all(len(unit.members) == 1 for unit in found.units)


def test_all_experts_of_a_module_are_one_unit(tmp_path):
    found = members(units(models.experts(tmp_path / "m", layers=2, number=3)))
    assert len(found[f"{AT}mlp.experts"]) == 9
    assert len([name for name in found if "experts" in name]) == 2
    assert not any("mlp.gate.weight" in one for names in found.values() for one in names)


@pytest.mark.parametrize("kind", ["qwen3_vl_moe", "gpt_oss"])
def test_stacks_are_one_unit_by_the_names_that_recipes_see(tmp_path, kind):
    found = units(stacks.model(tmp_path / "m", kind), "nvfp4,fp8,keep")
    (unit,) = found.units
    assert unit.members == (stacks.DOWN, stacks.UP)
    assert len(unit.weights["nvfp4"]) == 3 * stacks.E
    assert len(unit.weights["keep"]) == 2
    assert unit.elements == 3 * stacks.E * stacks.H * stacks.INNER
    assert unit.costs["keep"] == 2 * unit.elements


def test_a_cost_is_what_the_planner_writes(tmp_path):
    source = models.dense(tmp_path / "m", layers=2)
    found = units(source)
    for name, scheme in (("nvfp4", "nvfp4"), ("mxfp8", "mxfp8"), ("fp8", "fp8_tensor")):
        plan = api.plan_quantize(source, None, api.Request(scheme=name))
        costs = sum(unit.costs[name] for unit in found.units)
        assert costs == sum(w.bytes_out for w in plan.weights if w.target is not None)
        assert {w.target.name for w in plan.quantized} == {scheme}
        assert costs + found.rest >= plan.bytes_out
    assert all(unit.costs["keep"] == 2 * unit.elements for unit in found.units)


def test_what_a_scheme_cannot_take_is_no_choice(tmp_path):
    source = single(tmp_path / "m", {f"{AT}mlp.down_proj.weight": weight(32, 24)})
    (unit,) = units(source).units
    assert set(unit.costs) == {"fp8", "keep"}
    with pytest.raises(UnsupportedError, match="no weight that these schemes can take"):
        units(source, "nvfp4,mxfp8,keep")


def test_what_is_fused_with_a_weight_that_nothing_takes_is_left_alone(tmp_path):
    tensors = {
        f"{AT}self_attn.q_proj.weight": weight(32, 64),
        f"{AT}self_attn.k_proj.weight": weight(32, 24),
        f"{AT}self_attn.v_proj.weight": weight(32, 64),
        f"{AT}self_attn.o_proj.weight": weight(32, 32),
    }
    source = single(tmp_path / "m", tensors)
    assert set(members(units(source, "nvfp4,mxfp8,keep"))) == {f"{AT}self_attn.o_proj"}
    found = {unit.name: unit for unit in units(source).units}
    assert set(found[f"{AT}self_attn.{{q_proj,k_proj,v_proj}}"].costs) == {"fp8", "keep"}


def test_what_is_quantized_already_keeps_its_bytes(tmp_path):
    source = models.dense(tmp_path / "m", layers=1)
    made = tmp_path / "q"
    api.quantize(source, made, api.Request(scheme="FP8_BLOCK"))
    found = units(made, "nvfp4,keep")
    assert all(unit.costs["keep"] < 1.1 * unit.elements for unit in found.units)
    assert all(unit.costs["nvfp4"] < 0.6 * unit.elements for unit in found.units)


def pipeline(path):
    for part in PARTS:
        tensors = {
            f"blocks.{n}.attn.to_out.weight": weight(64, 64 + 32 * n, seed=n) for n in range(4)
        }
        single(path / part, tensors, {"_class_name": "XTransformer2DModel"})
        made = path / part / "model.safetensors"
        made.rename(path / part / "diffusion_pytorch_model.safetensors")
    index = {"_class_name": "XPipeline"} | {part: ["diffusers", "X"] for part in PARTS}
    (path / "model_index.json").write_text(json.dumps(index))
    return path


def test_denoisers_of_a_pipeline_share_names(tmp_path):
    source = pipeline(tmp_path / "p")
    found = members(units(source, container="lowbit"))
    assert found == {
        f"blocks.{n}.attn.to_out": tuple(
            f"{part}/blocks.{n}.attn.to_out.weight" for part in PARTS[:2]
        )
        for n in range(4)
    }


def test_a_recipe_for_a_pipeline_gives_its_denoisers_what_was_chosen(tmp_path):
    source, path = pipeline(tmp_path / "p"), tmp_path / "r.yaml"
    wanted = api.Wanted(bits=6.4, schemes="nvfp4,fp8", container="lowbit")
    found = api.choose(source, wanted, api.Allowed("cpu"), path)
    made = api.quantize(source, tmp_path / "q", api.Request(recipe=path), device="cpu")
    assert {w.target.name for w in made.plan.quantized} == {"nvfp4", "fp8_tensor"}
    assert len(made.plan.quantized) == 8
    schemes = {w.name: w.target.name for w in made.plan.quantized}
    for score, name in zip(found.scores, found.chosen.names, strict=True):
        assert {schemes[one] for one in score.members} == {{"fp8": "fp8_tensor"}.get(name, name)}


# Candidates.


def test_candidates_are_named_as_recipes_name_schemes():
    found = candidates("NVFP4, nvfp4_mse,FP8_DYNAMIC,keep,nvfp4,nvfp4:mse,mxfp8")
    assert told(found) == "NVFP4,nvfp4_mse,FP8_DYNAMIC,keep,mxfp8"
    rules = [one.rule for one in found]
    assert [one.scheme for one in rules] == ["nvfp4", "nvfp4", "fp8_channel", None, "mxfp8"]
    assert [one.scale for one in rules] == ["amax", "mse", "amax", "", "amax"]
    assert [one.activations for one in rules] == ["none", "none", "dynamic", "none", "dynamic"]
    assert [one.keeps for one in found] == [False, False, False, True, False]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("", ""),
        ("nvfp4,nvfp4:mse,keep", ""),
        ("nvfp4_mse,nvfp4:mse", "nvfp4:mse is nvfp4_mse"),
        ("nvfp4,keep,nvfp4,NVFP4", "nvfp4 is there twice; NVFP4 is nvfp4"),
        ("mxfp8,MXFP8A16", "MXFP8A16 is mxfp8 but for activations, which stay dynamic"),
    ],
)
def test_what_is_named_again_is_told_of(asked, said):
    assert notes(asked) == ((f"--schemes: {said}; each is measured once",) if said else ())


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("nvfp5", "no scheme is called 'nvfp5'"),
        ("nvfp4:best", "nvfp4 has no scale rule 'best'"),
        ("nvfp4_mse:amax", "nvfp4_mse has its scale rule already"),
        ("Keep", "Keep is no scheme"),
        ("keep:mse", "keep:mse is no scheme"),
        (" , ", "no scheme to choose from"),
    ],
)
def test_candidates_that_there_are_none_of(asked, message):
    with pytest.raises(UsageError, match=message):
        candidates(asked)


def test_a_container_that_lacks_a_scheme_is_told_of(tmp_path):
    source = models.dense(tmp_path / "m", layers=1)
    with pytest.raises(RecipeError, match="comfyui has no int8_channel") as raised:
        units(source, "nvfp4,int8", "comfyui")
    assert raised.value.hint.endswith("leave int8 out of --schemes")
