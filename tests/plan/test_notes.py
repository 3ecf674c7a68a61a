"""What a plan tells besides: nothing quantized, matrices refused, mixed dtypes, what is needed."""

from types import SimpleNamespace

import pytest

from lowbitcli import tables
from lowbitcli.api import Request, plan_quantize, quantize
from lowbitcli.plan import need
from tests.checkpoints import LAYER, single, weight


def planned(tmp_path, tensors, **request):
    return plan_quantize(single(tmp_path / "m", tensors), None, Request(**request))


def test_nothing_quantized_is_said_with_the_reasons(tmp_path):
    plan = planned(tmp_path, {"lm_head.weight": weight(32, 64), "model.norm.weight": weight(1, 64)})
    assert plan.notes == (
        "nothing is quantized; most tensors are kept because: head (1), norm (1)",
    )


def test_matrices_that_a_scheme_refuses_are_named_up_to_ten(tmp_path):
    tensors = {f"model.layers.{n:02}.mlp.up_proj.weight": weight(16, 40) for n in range(12)}
    tensors |= {LAYER + "self_attn.o_proj.weight": weight(32, 64), "lm_head.weight": weight(8, 40)}
    (note,) = planned(tmp_path, tensors).notes
    first, *named, last = note.split("\n")
    assert first == "a rule takes these, but they are kept:"
    reason = "40 columns are no multiple of 16, which nvfp4 needs"
    assert named == [f"model.layers.{n:02}.mlp.up_proj.weight: {reason}" for n in range(10)]
    assert last == "and 2 more"


@pytest.mark.parametrize(
    ("scheme", "container", "said"),
    [
        ("nvfp4", "auto", True),
        ("mxfp8", "auto", True),
        ("fp8", "auto", False),
        ("nvfp4", "lowbit", False),
    ],
)
def test_mixed_dtypes_are_said_where_transformers_makes_them(tmp_path, scheme, container, said):
    tensors = {LAYER + "self_attn.o_proj.weight": weight(32, 64).float()}
    notes = planned(tmp_path, tensors, scheme=scheme, container=container).notes
    assert ("dtype=bfloat16" in " ".join(notes)) == said


@pytest.mark.parametrize("layer", [0, 9])
def test_a_rule_of_a_recipe_that_ships_and_takes_nothing_is_told(tmp_path, layer):
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    tensors = {f"model.layers.{layer}.self_attn.{x}.weight": weight(64, 64) for x in names}
    notes = planned(tmp_path, tensors, recipe="mixed-4.5bit").notes
    told = "rule 1 of mixed-4.5bit takes nothing of this model: no fp8_channel in it"
    assert (told in notes) == (layer == 0)


def test_no_note_where_all_is_well(tmp_path):
    assert planned(tmp_path, {LAYER + "self_attn.o_proj.weight": weight(32, 64)}).notes == ()


@pytest.mark.parametrize(("scheme", "cost"), [("nvfp4", 34), ("mxfp8", 13), ("fp8", 8)])
def test_memory_is_that_of_the_largest_job_and_of_each_weight(tmp_path, scheme, cost):
    tensors = {
        LAYER + "mlp.down_proj.weight": weight(64, 64),
        LAYER + "self_attn.o_proj.weight": weight(32, 64),
        "lm_head.weight": weight(1024, 64),
    }
    plan = planned(tmp_path, tensors, scheme=scheme)
    assert need.memory(plan) == 300_000_000 + 2 * 10_000 + 4_000 + cost * 64 * 64
    assert tables.plan_document(plan)["memory_about"] == need.memory(plan)


def test_free_disk_is_that_where_the_output_goes(tmp_path, monkeypatch):
    asked = []

    def statvfs(path):
        asked.append(str(path))
        if path != tmp_path:
            raise FileNotFoundError
        return SimpleNamespace(f_bavail=7, f_frsize=4096)

    monkeypatch.setattr(need.os, "statvfs", statvfs)
    assert need.disk_free(tmp_path / "not" / "yet") == 7 * 4096
    assert asked == [str(tmp_path / "not" / "yet"), str(tmp_path / "not"), str(tmp_path)]


def test_requantization_is_said_with_what_errors_are_against(tmp_path):
    tensors = {LAYER + f"self_attn.{x}_proj.weight": weight(32, 64) for x in "qkv"}
    made = quantize(single(tmp_path / "m", tensors), None, Request(scheme="fp8")).output
    (note,) = plan_quantize(made, None, Request(scheme="nvfp4")).notes
    assert note == (
        "3 weights are requantized from fp8_tensor to nvfp4: the errors shown are against the "
        "fp8_tensor values, not the original"
    )
    assert plan_quantize(made, None, Request(scheme="fp8")).notes == ()


@pytest.mark.parametrize("config", [True, False])
def test_the_container_that_was_chosen_is_said_with_the_reason(tmp_path, config):
    source = single(tmp_path / "m", {LAYER + "self_attn.o_proj.weight": weight(32, 64)})
    source = source if config else source / "model.safetensors"
    first = tables.plan_lines(plan_quantize(source, None, Request()))[0]
    said = "compressed-tensors: config.json names a model"
    assert first.endswith(f"({said if config else 'lowbit: no config.json names a model'})")
    asked = tables.plan_lines(plan_quantize(source, None, Request(container="lowbit")))[0]
    assert asked.endswith("(lowbit)")
