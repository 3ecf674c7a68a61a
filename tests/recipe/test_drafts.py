"""Layers numbered on behind the model's own predict further tokens, where config.json says so: they
are kept whole, as those that are called mtp."""

import pytest

from lowbitcli.api import Request, plan_quantize
from lowbitcli.recipe import Matcher, Recipe
from lowbitcli.recipe.drafts import first_draft, is_draft
from tests.checkpoints import single, weight

LABEL = "multi-token prediction layer"
OWN, DRAFT = (f"model.layers.{n}.mlp.down_proj.weight" for n in (60, 61))
CONFIG = {"model_type": "deepseek_v3", "num_hidden_layers": 61}


@pytest.mark.parametrize(
    ("config", "first"),
    [
        ({**CONFIG, "num_nextn_predict_layers": 1}, 61),
        ({"num_hidden_layers": 4, "num_mtp_layers": 2}, 4),
        ({"text_config": {"num_hidden_layers": 4, "mtp_num_hidden_layers": 1}}, 4),
        ({**CONFIG, "num_nextn_predict_layers": 0}, None),
        ({**CONFIG, "num_nextn_predict_layers": "1"}, None),
        ({"num_nextn_predict_layers": 1}, None),
        (CONFIG, None),
        (None, None),
    ],
)
def test_a_config_tells_where_they_begin(config, first):
    assert first_draft(config) == first


def test_names():
    assert is_draft(DRAFT, 61)
    assert not is_draft(OWN, 61)
    assert is_draft("model.language_model.layers.61.mlp.up_proj.weight", 61)
    assert is_draft("language_model.model.layers.100.input_layernorm.weight", 61)
    assert not is_draft("model.visual.layers.61.mlp.up_proj.weight", 61)
    assert not is_draft("model.layers.61", 61)


def planned(tmp_path, text="", config=None):
    tensors = {name: weight(32, 64) for name in (OWN, DRAFT)}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f'rules:\n  - {{match: "*", scheme: nvfp4}}\n{text}')
    config = config or {**CONFIG, "num_nextn_predict_layers": 1}
    plan = plan_quantize(single(tmp_path / "m", tensors, config), None, Request(recipe=recipe))
    return {one.name: one.kept or str(one.target and one.target.name) for one in plan.weights}


def test_they_are_kept_with_the_reason(tmp_path):
    assert planned(tmp_path) == {OWN: "nvfp4", DRAFT: LABEL}
    assert planned(tmp_path, config=CONFIG) == {OWN: "nvfp4", DRAFT: "nvfp4"}


@pytest.mark.parametrize("text", ["defaults: {mtp: quantize}", "quantize: [mtp]"])
def test_a_recipe_can_quantize_them(tmp_path, text):
    assert planned(tmp_path, text) == {OWN: "nvfp4", DRAFT: "nvfp4"}


def test_a_rule_that_names_one_takes_it():
    matcher = Matcher(
        Recipe.model_validate({"rules": [{"match": [DRAFT], "scheme": "fp8_channel"}]}), 61
    )
    assert matcher.decide(DRAFT).rule is not None


def test_the_kind_is_said():
    matcher = Matcher(Recipe.model_validate({"rules": [{"match": ["*"], "scheme": "nvfp4"}]}), 61)
    assert (matcher.decide(DRAFT).kind, matcher.decide(OWN).kind) == ("mtp", "")
    assert matcher.decide("model.layers.61.input_layernorm.weight").kind == "mtp"
    assert matcher.decide("model.layers.60.input_layernorm.weight").kind == "norms"
