"""Limits of what may be lost: for all, and by the patterns of a recipe."""

import pytest

from lowbitcli.errors import UsageError
from lowbitcli.recipe import load
from tests.verify.planted import told

DOWN = "model.layers.0.mlp.down_proj.weight"


def quality(found):
    return {one.tensor: one.message for one in found.problems if one.kind == "quality"}


def test_the_relative_error_that_every_weight_may_have(planted):
    output = planted.made("nvfp4", "lowbit")
    assert planted.verify(output, max_rel_error=0.2).passed
    found = planted.verify(output, max_rel_error=0.01)
    assert found.exit_code == 1 and len(quality(found)) == 7
    assert ", above 0.01" in quality(found)[DOWN]
    figure = next(row.figures for row in found.weights if row.name == DOWN)
    assert figure is not None and f"{figure.relative:.4g}" in quality(found)[DOWN]


def test_a_relative_error_needs_a_source(planted):
    with pytest.raises(UsageError):
        planted.verify(planted.made("nvfp4", "lowbit"), source=False, max_rel_error=0.1)


@pytest.mark.parametrize("limit", [-1.0, 0.0, 1e-400])
def test_a_limit_that_is_none(planted, limit):
    with pytest.raises(UsageError, match="--max-rel-error is above 0"):
        planted.verify(planted.made("nvfp4", "lowbit"), max_rel_error=limit)


def recipe(folder, text):
    path = folder / "r.yaml"
    path.write_text(f'rules: [{{match: "*", scheme: nvfp4}}]\nthresholds:\n{text}\n')
    return path


def test_the_first_threshold_that_takes_a_weight_is_its_limit(planted, tmp_path):
    text = '  - {match: "*.down_proj", fail_under_db: 60}\n  - {match: "*", max_rel_error: 0.5}'
    output = planted.made("nvfp4", "lowbit")
    found = planted.verify(output, recipe=recipe(tmp_path, text))
    assert told(found) == [("fail", "quality", DOWN)]
    assert found.problems[0].file == "model.safetensors"
    message = quality(found)[DOWN]
    assert "below 60 dB, the limit of '*.down_proj'" in message and "r.yaml:3:" in message
    (check,) = [one for one in found.checks if one.what.startswith("weights keep the thresh")]
    assert (check.count, check.ok) == (7, False)


def test_a_threshold_of_no_weight_is_warned_of(planted, tmp_path):
    text = "  - {match: nothing, fail_under_db: 10}"
    output = planted.made("nvfp4", "lowbit")
    found = planted.verify(output, recipe=recipe(tmp_path, text))
    assert told(found) == [("warn", "quality", "")]
    assert "r.yaml:3:" in quality(found)[""] and "near it" not in quality(found)[""]
    text = '  - {match: "*.dwon_proj", fail_under_db: 10}'
    found = planted.verify(output, recipe=recipe(tmp_path, text))
    assert f"; near it: {DOWN}" in quality(found)[""]


def test_thresholds_need_a_source(planted, tmp_path):
    file = recipe(tmp_path, '  - {match: "*", fail_under_db: 10}')
    with pytest.raises(UsageError, match="needs a source"):
        planted.verify(planted.made("nvfp4", "lowbit"), source=False, recipe=file)
    found = planted.verify(planted.source, recipe=file)
    (check,) = [one for one in found.checks if one.what.startswith("weights keep the thresh")]
    assert check.ok is None and "nothing was measured" in check.note
    assert not [one for one in found.checks if one.what == "SQNR of every weight"]


def test_thresholds_change_no_byte_of_the_output(planted, tmp_path):
    limited = load(str(recipe(tmp_path, '  - {match: "*", fail_under_db: 10}')))
    assert limited.thresholds[0].fail_under_db == 10
    assert limited.digest == limited.model_copy(update={"thresholds": ()}).digest
