"""Case 10: a pattern that matches nothing is an error of the recipe, with the nearest names.

vllm-project/compressed-tensors#712, vllm-project/llm-compressor#1428, vllm-project/vllm PR#22949:
a typo in an exclusion quantized the head and the router without a word.
"""

import pytest

from lowbitcli.api import Request, quantize
from lowbitcli.errors import RecipeError
from tests import checkpoints
from tests.checkpoints import LAYER, single, weight

GATE = """rules: [{match: "*", scheme: nvfp4}]
thresholds:
  - {match: "*.donw_proj", fail_under_db: 99}
"""
RECIPE = r"""rules:
  - match: "*"
    scheme: nvfp4
    exclude:
      - "lm_haed"
      - 're:.*\.gatee$'
"""


@pytest.fixture
def source(tmp_path):
    return single(
        tmp_path / "source",
        {
            LAYER + "mlp.down_proj.weight": weight(64, 64),
            LAYER + "mlp.gate.weight": weight(16, 64),
            "lm_head.weight": weight(64, 64, seed=1),
        },
    )


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def test_every_dead_pattern_is_listed_with_what_is_near(tmp_path, source, recipe):
    before = checkpoints.everything_below(tmp_path)
    with pytest.raises(RecipeError) as caught:
        quantize(source, tmp_path / "out", Request(recipe=recipe), device="cpu")
    message, hint = caught.value.message, caught.value.hint
    assert caught.value.exit_code == 3
    assert "recipe.yaml:5:9: 'lm_haed' matches no tensor" in message
    assert r"recipe.yaml:6:9: 're:.*\\.gatee$' matches no tensor" in message
    assert "lm_head.weight" in hint
    assert LAYER + "mlp.gate.weight" in hint
    assert checkpoints.everything_below(tmp_path) == before


def test_the_patterns_as_they_were_meant_are_taken(tmp_path, source, recipe):
    recipe.write_text(RECIPE.replace("haed", "head").replace("gatee", "gate"))
    done = quantize(source, tmp_path / "out", Request(recipe=recipe), device="cpu")
    assert [weight.name for weight in done.plan.quantized] == [LAYER + "mlp.down_proj.weight"]


def test_the_command(tmp_path, source, recipe, lowbit):
    said = lowbit("quantize", source, "--recipe", recipe, "-o", tmp_path / "out")
    assert said.code == 3
    assert "lm_haed" in said.err
    assert "gatee" in said.err
    assert "lm_head.weight" in said.err
    assert not (tmp_path / "out").exists()


def test_a_threshold_of_no_weight_would_let_everything_pass(source, tmp_path):
    recipe = tmp_path / "gate.yaml"
    recipe.write_text(GATE)
    with pytest.raises(RecipeError, match=r"'\*\.donw_proj' matches no tensor") as caught:
        quantize(source, tmp_path / "out", Request(recipe=recipe))
    assert "gate.yaml:3:" in str(caught.value) and "down_proj" in caught.value.hint
