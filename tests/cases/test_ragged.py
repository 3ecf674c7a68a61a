"""Case 5: columns that are no multiple of the block are decided from headers, kept and said.

vllm-project/llm-compressor#1983, compressed-tensors#353 and #447, llama.cpp PR#28474: writers that
aborted, padded or wrote ragged scales without a word.
"""

import pytest

from lowbitcli.api import Request, plan_quantize, quantize
from lowbitcli.errors import RecipeError, UnsupportedError
from tests import checkpoints
from tests.checkpoints import LAYER, single, weight

DOWN, UP = LAYER + "mlp.down_proj", LAYER + "mlp.up_proj"


@pytest.fixture
def source(tmp_path):
    return single(
        tmp_path / "odd", {DOWN + ".weight": weight(64, 40), UP + ".weight": weight(40, 64)}
    )


@pytest.mark.parametrize(("scheme", "multiple"), [("nvfp4", 16), ("mxfp8", 32)])
def test_it_is_kept_and_named_and_the_rest_quantized(tmp_path, source, scheme, multiple):
    plan = plan_quantize(source, tmp_path / "out", Request(scheme=scheme))
    kept = {weight.name: weight.kept for weight in plan.weights}
    assert kept[UP + ".weight"] == ""
    assert "40 columns" in kept[DOWN + ".weight"]
    assert str(multiple) in kept[DOWN + ".weight"]
    done = quantize(source, tmp_path / "out", Request(scheme=scheme), device="cpu")
    written = checkpoints.read(done.output)
    assert checkpoints.same(written[DOWN + ".weight"], weight(64, 40))
    assert UP + ".weight_scale" in written
    assert DOWN + ".weight_scale" not in written
    assert checkpoints.quantization_of(done.output)["ignore"] == ["lm_head", DOWN]


@pytest.mark.parametrize(
    ("scheme", "name"), [("fp8", "fp8_tensor"), ("FP8_DYNAMIC", "fp8_channel")]
)
def test_schemes_without_blocks_take_it(tmp_path, source, scheme, name):
    done = quantize(source, tmp_path / "out", Request(scheme=scheme), device="cpu")
    assert done.plan.counts.keys() == {name}


@pytest.mark.parametrize("scheme", ("nvfp4", "mxfp8"))
def test_strict_refuses_it_before_anything_is_written(tmp_path, source, scheme):
    with pytest.raises(UnsupportedError) as caught:
        quantize(source, tmp_path / "out", Request(scheme=scheme, strict=True), device="cpu")
    assert caught.value.exit_code == 4
    assert DOWN + ".weight" in caught.value.message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("named", (DOWN, DOWN + ".weight"))
def test_naming_it_exactly_is_an_error_of_the_recipe(tmp_path, source, named):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"rules:\n  - match: {named}\n    scheme: nvfp4\n")
    with pytest.raises(RecipeError) as caught:
        quantize(source, tmp_path / "out", Request(recipe=recipe), device="cpu")
    assert caught.value.exit_code == 3
    assert DOWN + ".weight" in caught.value.message
    assert "recipe.yaml:2:" in caught.value.message
    assert not (tmp_path / "out").exists()


def test_the_command(tmp_path, source, lowbit):
    said = lowbit("plan", source, "-v")
    assert said.code == 0
    assert DOWN + ".weight" in said.out
    assert "40 columns are no multiple of 16" in said.out
    said = lowbit("quantize", source, "-o", tmp_path / "out", "--device", "cpu")
    assert said.code == 0
    assert lowbit("quantize", source, "-o", tmp_path / "no", "--strict").code == 4
    assert not (tmp_path / "no").exists()
