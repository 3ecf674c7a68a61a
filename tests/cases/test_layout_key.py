"""Case 8, what is ambiguous: never guessed, and said by `layout:` in a recipe."""

import pytest

from lowbitcli.api import Request, dequantize, plan_quantize, quantize
from lowbitcli.errors import CheckpointError, RecipeError, UnsupportedError, UsageError
from tests import checkpoints
from tests.checkpoints import header_of, single, weight
from tests.experts import (
    DOWN,
    HIDDEN,
    INNER,
    KINDS,
    UP,
    E,
    H,
    P,
    apart,
    config_of,
    model,
    numbers,
    problems,
    same_tensors,
    stacked,
)


def recipe(path, text):
    path.write_text(text)
    return path


def unknown(path, kind="gpt_oss"):
    axes, rows = KINDS[kind]
    return single(path, stacked(axes, rows, apart()), config_of("other"))


def test_a_recipe_says_how_stacks_lie(tmp_path):
    source = unknown(tmp_path / "source")
    text = """
layout:
  "*.gate_up_proj": in_out interleaved
  "*.down_proj": in_out
rules: [{match: "*", scheme: nvfp4}]
"""
    said = recipe(tmp_path / "r.yaml", text)
    done = quantize(source, tmp_path / "q", Request(recipe=said), device="cpu")
    known = model(tmp_path / "known", "gpt_oss")
    other = quantize(known, tmp_path / "other", Request(scheme="nvfp4"), device="cpu")
    same_tensors(done.output, other.output)
    assert problems(done.output, source) == []
    stacks = Request(recipe=said, container="lowbit")
    done = quantize(source, tmp_path / "lowbit", stacks, device="cpu")
    assert problems(done.output, source) == []
    back = dequantize(done.output, tmp_path / "back", device="cpu")
    assert header_of(back.output / "model.safetensors")[UP]["shape"] == [E, H, 2 * INNER]


def test_a_list_of_layouts_goes_before_the_model(tmp_path):
    source = single(tmp_path / "s", stacked("out_in", "interleaved", apart()), config_of("llama4"))
    text = """
layout:
  - "*.gate_up_proj": out_in interleaved
  - "*": out_in
rules: [{match: "*", scheme: fp8_channel}]
"""
    said = recipe(tmp_path / "r.yaml", text)
    done = quantize(source, tmp_path / "q", Request(recipe=said), device="cpu")
    single_ = single(tmp_path / "apart", apart(), config_of("llama4"))
    other = quantize(single_, tmp_path / "o", Request(scheme="fp8-dynamic"), device="cpu")
    same_tensors(done.output, other.output)


AMBIGUOUS = "nothing says which of its axes is multiplied"


def test_what_is_ambiguous_is_kept_or_refused_never_guessed(tmp_path):
    source = unknown(tmp_path / "source")
    done = quantize(source, tmp_path / "q", Request(scheme="nvfp4"), device="cpu")
    assert {w.kept for w in done.plan.weights} == {f"a stack of experts, and {AMBIGUOUS}"}
    assert any(AMBIGUOUS in note for note in done.plan.notes)
    with pytest.raises(UnsupportedError, match=AMBIGUOUS) as caught:
        quantize(source, tmp_path / "x", Request(scheme="nvfp4", strict=True), device="cpu")
    assert "layout:" in caught.value.hint and "in_out" in caught.value.hint
    with pytest.raises(UnsupportedError, match=AMBIGUOUS):  # also where nothing but stacks counts
        request = Request(scheme="mxfp4", container="gpt-oss", strict=True)
        quantize(source, tmp_path / "x", request, device="cpu")
    exact = recipe(tmp_path / "r.yaml", f"rules: [{{match: '{UP}', scheme: nvfp4}}]")
    with pytest.raises(RecipeError, match=AMBIGUOUS) as caught:
        quantize(source, tmp_path / "x", Request(recipe=exact), device="cpu")
    assert f'layout: {{"{UP}": in_out}}' in caught.value.hint


def test_rows_of_which_nothing_is_said_are_not_taken_apart(tmp_path):
    source = unknown(tmp_path / "source")
    text = 'layout: {"*": in_out}\nrules: [{match: "*", scheme: nvfp4}]'
    said = recipe(tmp_path / "r.yaml", text)
    done = quantize(source, tmp_path / "q", Request(recipe=said), device="cpu")
    kept = {w.name: w.kept for w in done.plan.weights if w.target is None}
    assert list(kept) == [UP] and "nothing says whether their rows alternate" in kept[UP]
    whole = Request(recipe=said, container="lowbit")
    done = quantize(source, tmp_path / "lowbit", whole, device="cpu")
    assert {w.name for w in done.plan.quantized} == {UP, DOWN}


def test_a_shape_that_is_not_the_models_is_not_believed(tmp_path):
    wrong = stacked("out_in", "halves", apart())
    source = single(tmp_path / "source", wrong, config_of("llama4"))
    done = quantize(source, tmp_path / "q", Request(scheme="nvfp4"), device="cpu")
    assert {w.kept for w in done.plan.weights} == {f"a stack of experts, and {AMBIGUOUS}"}


@pytest.mark.parametrize("axes", ["in_out", "out_in"])
def test_a_layout_against_the_hidden_size_is_believed_and_said(tmp_path, axes):
    source = unknown(tmp_path / "source")  # in_out
    text = f"""
layout: {{"*.gate_up_proj": {axes} interleaved, "*.down_proj": {axes}}}
rules: [{{match: "*", scheme: nvfp4}}]
"""
    request = Request(recipe=recipe(tmp_path / "r.yaml", text), container="lowbit")
    notes = [x for x in plan_quantize(source, None, request).notes if "hidden_size" in x]
    if axes == "in_out":
        assert notes == []
        return
    first, *named = notes[0].split("\n")
    assert first.startswith("the recipe's layout is believed")
    assert named == [f"{DOWN}: [{E}, {INNER}, {H}]", f"{UP}: [{E}, {H}, {2 * INNER}]"]


def test_a_layout_that_takes_nothing_is_an_error(tmp_path):
    source = model(tmp_path / "source", "llama4")
    text = 'layout: {"*.up_gate": in_out}\nrules: [{match: "*", scheme: nvfp4}]'
    said = recipe(tmp_path / "r.yaml", text)
    with pytest.raises(RecipeError, match="takes no stack of experts and no matrix") as caught:
        quantize(source, tmp_path / "q", Request(recipe=said), device="cpu")
    assert "r.yaml:1:10" in str(caught.value)


def test_experts_in_both_ways_are_refused(tmp_path):
    name = f"{P}0.gate_proj.weight"
    tensors = {**stacked("in_out", "halves", apart()), name: apart()[name]}
    source = single(tmp_path / "source", tensors, config_of("llama4"))
    with pytest.raises(CheckpointError, match="is there besides the stack"):
        quantize(source, tmp_path / "q", Request(scheme="nvfp4"), device="cpu")


def test_stacks_without_names_for_single_experts_stay_whole(tmp_path):
    name = "model.layers.0.block_sparse_moe.input_linear.weight"
    tensors = {name: numbers(2, 64, H, seed=1)}
    source = single(tmp_path / "source", tensors, config_of("granitemoe"))
    done = quantize(source, tmp_path / "q", Request(scheme="nvfp4"), device="cpu")
    assert "no names for one by one" in done.plan.weights[0].kept
    whole = Request(scheme="nvfp4", container="lowbit")
    done = quantize(source, tmp_path / "lowbit", whole, device="cpu")
    assert [w.name for w in done.plan.quantized] == [name]
    assert problems(done.output, source) == []


GPT2 = "transformer.h.0.attn.c_attn.weight"


def test_conv1d_is_quantized_where_a_recipe_says_how_it_lies(tmp_path):
    w = numbers(64, 192, seed=3)
    source = single(tmp_path / "source", {GPT2: w}, {"model_type": "gpt2", **HIDDEN})
    text = 'layout: {"*.c_attn": in_out}\nrules: [{match: "*", scheme: nvfp4}]'
    request = Request(recipe=recipe(tmp_path / "r.yaml", text), container="lowbit")
    done = quantize(source, tmp_path / "q", request, device="cpu")
    turned = single(tmp_path / "turned", {"x.weight": w.t().contiguous()}, None)
    other = quantize(turned, tmp_path / "o", Request(scheme="nvfp4"), device="cpu")
    a, b = checkpoints.read(done.output), checkpoints.read(other.output)
    assert all(map(checkpoints.same, a.values(), b.values()))
    assert problems(done.output, source) == []
    back = dequantize(done.output, tmp_path / "back", device="cpu")
    assert checkpoints.read(back.output)[GPT2].shape == w.shape
    request = Request(recipe=request.recipe, container="compressed-tensors")
    done = quantize(source, tmp_path / "ct", request, device="cpu")
    assert "readers of compressed-tensors do not expect" in done.plan.weights[0].kept


def test_a_kept_stack_is_held_against_the_source_as_it_is_stored(tmp_path):
    """`in_out` says nothing of the rows of gate and up, so that stack stays; the other does not."""
    source = unknown(tmp_path / "source")
    text = """
        rules: [{match: "*", scheme: nvfp4}]
        layout: {"*.gate_up_proj": in_out, "*.down_proj": in_out}
        """
    said = recipe(tmp_path / "recipe.yaml", text)
    request = Request(recipe=str(said), container="compressed-tensors")
    output = quantize(source, tmp_path / "out", request, device="cpu").output
    assert checkpoints.read(output)[UP].shape == checkpoints.read(source)[UP].shape
    assert DOWN not in checkpoints.read(output)
    assert not problems(output, source)


@pytest.mark.parametrize("scheme", ["mxfp4", "nvfp4"])
def test_gpt_oss_is_refused_for_other_models_even_where_nothing_is_quantized(tmp_path, scheme):
    tensors = {"lm_head.weight": weight(64, 64)}
    source = single(tmp_path / "source", tensors)
    with pytest.raises(UsageError, match="for models of the type gpt_oss alone"):
        plan_quantize(source, None, Request(scheme=scheme, container="gpt-oss"))
    ours = single(tmp_path / "ours", tensors, {**checkpoints.CONFIG, "model_type": "gpt_oss"})
    assert not plan_quantize(ours, None, Request(scheme=scheme, container="gpt-oss")).quantized
