"""Weights that are served as one matrix, and their partners that are not there."""

import pytest

from lowbitcli.api import Request, plan_quantize
from lowbitcli.errors import RecipeError
from lowbitcli.recipe import Recipe
from tests.checkpoints import single, weight

L = "model.layers.3."
# a reader's fused matrix -> what a checkpoint calls its members
SERVED = {
    "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "gate and up": ["mlp.gate_proj", "mlp.up_proj"],
    "an expert": ["mlp.experts.7.gate_proj", "mlp.experts.7.up_proj"],
    "an expert of Mixtral's": ["block_sparse_moe.experts.7.w1", "block_sparse_moe.experts.7.w3"],
    "shared experts": ["mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"],
    "MLA": ["self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"],
    "MLA as DeepSeek calls it": ["attn.wq_a", "attn.wkv_a"],
    "MLA as llm-compressor has it": ["attn.wq_a", "attn.wkv_a_with_mqa"],
    "DeepSeek-V4": ["attn.wq_a", "attn.wkv"],
    "DeepSeek-V4's compressor": ["attn.compressor.wkv", "attn.compressor.wgate"],
    "Gated DeltaNet": ["linear_attn.in_proj_qkv", "linear_attn.in_proj_z"],
    "its gates": ["linear_attn.in_proj_b", "linear_attn.in_proj_a"],
    "Kimi's linear attention": [f"self_attn.{x}_proj" for x in ("q", "k", "v", "b", "f_a")],
    "OLMo hybrid's": [f"linear_attn.{x}_proj" for x in ("q", "k", "v", "g")],
    "BERT": ["attention.self.query", "attention.self.key", "attention.self.value"],
}
ALONE = ["self_attn.o_proj", "self_attn.kv_b_proj", "mlp.down_proj", "mlp.experts.7.w2"]


def names(modules):
    return [f"{L}{module}.weight" for module in modules]


@pytest.mark.parametrize("served", SERVED)
def test_what_is_served_as_one_is_one_group(served):
    listed = names(SERVED[served])
    others = names(ALONE) + [name.replace(".3.", ".13.") for name in listed]
    groups = Recipe().groups(listed + others)
    assert len({groups[name] for name in listed}) == 1
    assert groups[listed[0]] not in {groups.get(name) for name in others}
    assert Recipe().missing(listed) == {}


def test_layers_that_stand_alone_are_in_no_group():
    assert Recipe().groups(names(ALONE)) == {}
    assert Recipe().missing(names(ALONE)) == {}


def test_partners_that_are_not_there_are_named():
    found = Recipe().missing(names(["self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj"]))
    assert found == {
        f"{L}self_attn.q_proj.weight": (f"{L}self_attn.k_proj",),
        f"{L}self_attn.v_proj.weight": (f"{L}self_attn.k_proj",),
        f"{L}mlp.up_proj.weight": (f"{L}mlp.gate_proj",),
    }


def test_a_recipe_adds_groups():
    recipe = Recipe.model_validate({"fuse": [["{}.left", "{}.right"]]})
    listed = names(["mlp.left", "mlp.right", "mlp.other"])
    groups = recipe.groups(listed)
    assert groups[listed[0]] == groups[listed[1]] and listed[2] not in groups
    assert recipe.missing(listed[:1]) == {listed[0]: (f"{L}mlp.right",)}


@pytest.mark.parametrize(
    ("fuse", "dead"),
    [
        ('["{}.fc1", "{}.fc3"]', "{}.fc3"),
        ('["model.{}.fc1", "x.{}.fc2"]', "x.{}.fc2"),
        ('["{}.fc1", "model.layers.0.{}.layers.0.mlp.fc2"]', "model.layers.0.{}.layers.0.mlp.fc2"),
        ('["{}.fc1", "model.layers.{}.fc2.weight"]', ""),
    ],
)
def test_a_template_that_takes_nothing_is_an_error(tmp_path, fuse, dead):
    tensors = {f"model.layers.0.mlp.{one}.weight": weight(32, 64) for one in ("fc1", "fc2")}
    source, path = single(tmp_path / "m", tensors), tmp_path / "r.yaml"
    path.write_text(f"extends: nvfp4\nfuse:\n  - {fuse}\n")
    if not dead:
        assert len(plan_quantize(source, None, Request(recipe=path)).quantized) == 2
        return
    with pytest.raises(RecipeError) as told:
        plan_quantize(source, None, Request(recipe=path))
    assert told.value.message == f"{path}:3:5: fuse: {dead!r} matches no tensor"
    assert told.value.exit_code == 3
