"""The shipped recipes over models of the families that they are for: every matrix is quantized, or
kept for the reason that tests/golden/kept.json has, which was read line by line."""

import json
import re
from collections import defaultdict
from pathlib import Path

import pytest

from lowbitcli.api import Request, plan_quantize
from lowbitcli.containers import container
from lowbitcli.errors import RecipeError
from lowbitcli.recipe import Matcher, load, names
from tests import families

KEPT = json.loads((Path(__file__).parents[1] / "golden" / "kept.json").read_text())
UNIFORM = sorted({one.name for one in names()} - {"mixed-4.5bit", "nvfp4-qkv-fp8"})
LLMS = [one for one in families.FAMILIES if families.document(one)["config"] is not None
        and "architectures" in families.document(one)["config"]]  # fmt: skip
BITS = {"nvfp4": 4.5, "mxfp4": 4.25, "mxfp8": 8.25, "fp8": 8, "int8": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("families")
    return {family: families.make(made / family, family) for family in families.FAMILIES}


def template(name):
    return re.sub(r"(?<=\.)\d+(?=\.)", "#", name)


def becomes(plan):
    """Return reason, or scheme, -> templates of names of matrices, each once and in order."""
    found = defaultdict(dict)
    for weight in plan.weights:
        if len(weight.shape) >= 2:
            said = weight.target.name if weight.target is not None else weight.kept
            found[said][template(weight.name)] = None
    return {said: list(lines) for said, lines in found.items()}


def test_every_family_of_the_page_is_there():
    assert set(KEPT) == set(families.FAMILIES)
    assert len(KEPT) == 28
    assert sum(len(families.tensors(family)) for family in KEPT) > 1_500


@pytest.mark.parametrize("family", families.FAMILIES)
@pytest.mark.parametrize("recipe", UNIFORM)
def test_what_is_quantized_and_what_is_kept_and_why(folder, family, recipe):
    (scheme,) = {rule.scheme for rule in load(recipe).rules}
    alone = folder[family].is_file() and scheme not in container("comfyui").writes
    request = Request(recipe=recipe, container="lowbit" if alone else "auto")
    plan = plan_quantize(folder[family], None, request)
    expected = {scheme if k == "quantized" else k: lines for k, lines in KEPT[family].items()}
    assert becomes(plan) == expected
    vectors = [weight for weight in plan.weights if len(weight.shape) < 2]
    assert all(weight.target is None for weight in vectors)
    near = BITS.get(recipe.partition("-")[0], 8)
    assert near <= plan.bits_per_weight < near + 0.1


def refused(source, recipe, tmp_path, consumer):
    """Return why a consumer would not load what a recipe makes of a model."""
    text = tmp_path / "r.yaml"
    text.write_text(f"extends: {recipe}\nconsumer: {consumer}\n")
    try:
        plan_quantize(source, None, Request(recipe=text))
    except RecipeError as error:
        return error.message
    return ""


@pytest.mark.parametrize("family", LLMS)
def test_vllm_loads_what_the_recipes_write(folder, family, tmp_path):
    for recipe in ("nvfp4-best", "fp8-block", "mxfp8", "mixed-4.5bit", "nvfp4-qkv-fp8"):
        why = refused(folder[family], recipe, tmp_path, "vllm")
        if (family, recipe) == ("gpt-oss", "fp8-block"):
            assert "2880 rows are no multiple of 128" in why
        else:
            assert why == "", recipe


# What the table above must have: the cases that recipes are written for.
SAID = [
    ("deepseek-v3", "quantized", "model.layers.#.self_attn.kv_a_proj_with_mqa.weight"),
    ("deepseek-v3", "router", "model.layers.#.mlp.gate.weight"),
    ("deepseek-v3", "multi-token prediction layer", "model.layers.#.eh_proj.weight"),
    ("deepseek-v3", "multi-token prediction layer", "model.layers.#.self_attn.q_a_proj.weight"),
    ("mixtral", "quantized", "model.layers.#.block_sparse_moe.experts.#.w2.weight"),
    ("qwen3-moe", "router", "model.layers.#.mlp.gate.weight"),
    ("qwen3-next", "convolution", "model.layers.#.linear_attn.conv1d.weight"),
    ("qwen3-next", "gate of linear attention", "model.layers.#.linear_attn.in_proj_ba.weight"),
    ("qwen3-next", "quantized", "model.layers.#.linear_attn.in_proj_qkvz.weight"),
    ("qwen3-next", "router", "model.layers.#.mlp.shared_expert_gate.weight"),
    ("gpt-oss", "quantized", "model.layers.#.mlp.experts.#.gate_proj.weight"),
    ("gpt-oss", "router", "model.layers.#.mlp.router.weight"),
    ("qwen2.5-vl", "vision or audio tower", "visual.merger.mlp.#.weight"),
    ("llava", "vision or audio tower", "multi_modal_projector.linear_1.weight"),
    ("gemma3", "vision or audio tower", "multi_modal_projector.mm_input_projection_weight"),
    ("bert", "head", "bert.pooler.dense.weight"),
    ("modernbert", "head", "decoder.weight"),
    ("flux", "quantized", "double_blocks.#.img_mod.lin.weight"),
    ("flux", "head", "final_layer.adaLN_modulation.#.weight"),
    ("flux-diffusers", "quantized", "transformer_blocks.#.norm1.linear.weight"),
    ("sd3", "quantized", "model.diffusion_model.joint_blocks.#.x_block.adaLN_modulation.#.weight"),
    ("sd3", "text encoder or VAE", "first_stage_model.decoder.mid.attn_1.to_q.weight"),
    ("wan", "embedding", "time_projection.#.weight"),
    ("qwen-image", "quantized", "transformer_blocks.#.img_mod.#.weight"),
]


@pytest.mark.parametrize(("family", "said", "name"), SAID)
def test_the_table_says(family, said, name):
    assert name in KEPT[family][said]


@pytest.mark.parametrize("family", ["flux", "flux-diffusers", "sd3", "sd3-diffusers", "qwen-image"])
def test_modulations_are_kept_where_a_recipe_says_so(folder, family, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("extends: nvfp4\ndefaults: {modulations: keep}\n")
    plan = plan_quantize(folder[family], None, Request(recipe=recipe))
    found = becomes(plan)
    moved = set(KEPT[family]["quantized"]) - set(found["nvfp4"])
    assert set(found["modulation"]) == moved and len(moved) >= 2
    assert all(re.search(r"_mod\.|modulation|\.norm\w*\.linear", name) for name in moved)


def test_models_of_one_kind_are_treated_alike_under_both_of_their_names(folder):
    """The same share of Flux is quantized under the names of its release and of diffusers."""
    shares = []
    for family in ("flux", "flux-diffusers"):
        plan = plan_quantize(folder[family], None, Request(recipe="nvfp4"))
        done = sum(weight.numel for weight in plan.quantized)
        shares.append(done / sum(weight.numel for weight in plan.weights))
    assert shares[0] == pytest.approx(shares[1], rel=1e-3)


def test_kinds_do_not_take_what_only_sounds_like_them():
    matcher = Matcher(load("nvfp4"))
    for name in (
        "model.decoder.layers.0.fc1.weight",
        "decoder.block.0.layer.1.wo.weight",
        "blocks.0.attn1.to_q.weight",
        "model.layers.0.mlp.dense_h_to_4h.weight",
    ):
        assert matcher.decide(name).rule is not None, name


QKV = {
    "llama": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "phi3": ["self_attn.qkv_proj"],
    "bert": ["attention.self.query", "attention.self.key", "attention.self.value"],
    "modernbert": ["attn.Wqkv"],
    "deepseek-v3": ["self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa",
                    "self_attn.kv_b_proj"],
    "qwen3-next": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
                   "linear_attn.in_proj_qkvz"],
    "qwen3.5-moe": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
                    "linear_attn.in_proj_qkv", "linear_attn.in_proj_z"],
}  # fmt: skip


@pytest.mark.parametrize("family", LLMS)
def test_a_mixed_recipe_is_for_queries_keys_and_values(folder, family):
    plan = plan_quantize(folder[family], None, Request(recipe="nvfp4-qkv-fp8"))
    found = becomes(plan)
    eight = found.pop("fp8_channel")
    assert sorted([*eight, *found.pop("nvfp4")]) == sorted(KEPT[family]["quantized"])
    assert found == {k: v for k, v in KEPT[family].items() if k != "quantized"}
    if family in QKV:
        modules = {name.removesuffix(".weight").split(".#.", 1)[1] for name in eight}
        assert modules == set(QKV[family])


@pytest.mark.parametrize("family", LLMS)
def test_the_other_takes_the_same_in_every_tenth_layer(family):
    every, tenth = Matcher(load("nvfp4-qkv-fp8")), Matcher(load("mixed-4.5bit"))
    chosen = 0
    for name in families.tensors(family):
        for number in (0, 8, 9, 10, 19, 90, 99):
            deep = re.sub(r"(\blayers?\.)\d+", rf"\g<1>{number}", name)
            rule, other = every.decide(deep).rule, tenth.decide(deep).rule
            is_eight = rule is not None and rule.scheme == "fp8_channel" and number % 10 == 9
            chosen += is_eight
            scheme = None if rule is None else "fp8_channel" if is_eight else "nvfp4"
            assert scheme == (other.scheme if other is not None else None), deep
    assert chosen >= 3


def bits_of(plan, experts=4):
    """Return bits for each weight where there are so many experts, of whom four are planned."""
    total = size = 0
    for weight in plan.quantized:
        times = experts // 4 if ".experts." in weight.name else 1
        total += times * weight.numel
        size += times * weight.bytes_out
    return 8 * size / total


# family -> experts of the released model, and bits of its weights
BITS_OF = {"qwen3-moe": (128, 4.56), "qwen3-next": (512, 4.54), "deepseek-v3": (256, 4.54),
           "mixtral": (8, 4.56), "gpt-oss": (128, 4.52)}  # fmt: skip
DENSE = {"llama": 4.90, "qwen3": 4.96, "qwen2": 4.75, "mistral": 4.90, "gemma2": 5.02}


@pytest.mark.parametrize("family", [*BITS_OF, *DENSE])
def test_how_many_bits_queries_keys_and_values_take(folder, family):
    plan = plan_quantize(folder[family], None, Request(recipe="nvfp4-qkv-fp8"))
    experts, bits = BITS_OF.get(family, (4, DENSE.get(family)))
    assert bits_of(plan, experts) == pytest.approx(bits, abs=0.05)


# family -> layers of a released model, and bits of its weights with q/k/v of every tenth in FP8
DEEP = {"llama": (32, 4.538), "qwen3": (36, 4.538), "qwen2": (28, 4.518), "mistral": (32, 4.538),
        "gemma2": (42, 4.549), "gemma3-text": (26, 4.518), "phi2": (32, 4.582),
        "phi3": (32, 4.582), "mixtral": (32, 4.506), "gpt-oss": (24, 4.501)}  # fmt: skip


@pytest.mark.parametrize("family", DEEP)
def test_the_recipe_of_four_and_a_half_bits_has_about_as_many(tmp_path, family):
    layers, bits = DEEP[family]
    shapes = families.tensors(family)
    for name in tuple(shapes):
        if ".layers.1." in name:
            copies = range(2, layers)
            shapes |= {name.replace(".1.", f".{n}.", 1): shapes[name] for n in copies}
    source = families.make(tmp_path / family, family, shapes)
    plan = plan_quantize(source, None, Request(recipe="mixed-4.5bit"))
    found = bits_of(plan, BITS_OF.get(family, (4,))[0])
    assert 4.4 < found < 4.6
    assert found == pytest.approx(bits, abs=0.002)
