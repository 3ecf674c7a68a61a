"""Every way to choose scales goes through quantize, verify and dequantize, in every scheme that has
it, and verify knows whose codes it may hold to the exact nearest."""

import pytest

from lowbitcli import api
from lowbitcli.schemes import SCHEMES
from tests.checkpoints import LAYER, single, weight
from tests.verify.planted import poke, told

PAIRS = [(scheme.name, rule) for scheme in SCHEMES for rule in scheme.rules]
DOWN = LAYER + "mlp.down_proj.weight"


def quantized(tmp_path, scheme, rule):
    cols = 256 if scheme == "int4_g128" else 96
    tensors = {DOWN: weight(160, cols), LAYER + "x.weight": weight(8, cols)}
    source = single(tmp_path / "source", tensors)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f'rules: [{{match: "*", scheme: {scheme}, scale: {rule}}}]\n')
    request = api.Request(recipe=recipe, container="lowbit")
    return source, api.quantize(source, tmp_path / "out", request, device="cpu")


@pytest.mark.parametrize(("scheme", "rule"), PAIRS)
def test_what_is_written_passes(tmp_path, scheme, rule):
    source, done = quantized(tmp_path, scheme, rule)
    found = api.verify(done.output, against=source, device="cpu")
    assert told(found) == []
    assert {row.scheme for row in found.weights} == {scheme}
    assert len(found.weights) == 2


def test_the_nearest_code_is_asked_for_unless_the_rule_rounds_in_another_order(tmp_path):
    """A code on the other side of a tie is wrong where lowbit divides, and may be right where it
    multiplies by a reciprocal."""
    for rule, problems in (("mse", 1), ("four_over_six", 0)):
        folder = tmp_path / rule
        folder.mkdir()
        w = weight(16, 32)
        w[:] = 6.0
        w[0, 1] = 2.5  # a tie between codes 4 (2.0) and 5 (3.0)
        w[0, 2:12] = 1.0  # so that no other scale of this block is better
        source = single(folder / "source", {DOWN: w})
        recipe = folder / "recipe.yaml"
        recipe.write_text(f'rules: [{{match: "*", scheme: nvfp4, scale: {rule}}}]\n')
        request = api.Request(recipe=recipe, container="lowbit")
        done = api.quantize(source, folder / "out", request, device="cpu")
        poke(done.output, DOWN, 0, lambda byte: byte ^ 0x10)
        found = api.verify(done.output, against=source, device="cpu")
        wrong = [one for one in told(found) if one[1] == "bound"]
        assert wrong == [("fail", "bound", DOWN)] * problems
