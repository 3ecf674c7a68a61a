"""Modules whose names look like a class or a pattern to `quantization_config`: what is written
for them is read back, here and by compressed-tensors' rules."""

import re

import pytest

from lowbitcli.api import Request, dequantize, inspect, quantize, verify
from lowbitcli.containers import ct_config
from tests import checkpoints
from tests.checkpoints import single, weight

RECIPE = """\
quantize: [heads]
rules:
  - match: {nvfp4}
    scheme: nvfp4
  - match: "*"
    scheme: fp8_channel
"""
LONG = ("A" * 300, "re:" + "(" * 300)  # too long for a pattern
PAIRS = [("A", "B"), ("Linear", "b.c"), ("re:.*", "b"), ("B\n", "B"), ("re:" + "(" * 240, "B")]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_what_is_written_is_read(tmp_path, one, other):
    tensors = {f"{name}.weight": weight(64, 64, seed=len(name)) for name in (one, other)}
    source = single(tmp_path / "source", tensors)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(nvfp4=other))
    output = quantize(source, tmp_path / "out", Request(recipe=recipe), device="cpu").output
    schemes = {w.name: w.scheme.name for w in inspect(output).weights if w.scheme}
    assert schemes == {f"{one}.weight": "fp8_channel", f"{other}.weight": "nvfp4"}
    assert verify(output, against=source, device="cpu").passed
    assert dequantize(output, tmp_path / "back", device="cpu").output.exists()


@pytest.mark.parametrize("kept", ["Linear", "A", "re:.*", *LONG])
def test_what_is_ignored_is_one_module(tmp_path, kept):
    tensors = {f"{name}.weight": weight(64, 64) for name in (kept, "x.y")}
    source = single(tmp_path / "source", tensors, {"model_type": "any"})
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("rules:\n  - match: x.y\n    scheme: nvfp4\n")
    output = quantize(source, tmp_path / "out", Request(recipe=recipe), device="cpu").output
    said = checkpoints.quantization_of(output)
    assert said["config_groups"]["group_0"]["targets"] == ["Linear"]
    assert said["ignore"] == [kept if kept in LONG else f"re:{re.escape(kept)}\\Z"]
    assert verify(output, against=source, device="cpu").passed


def test_a_class_is_no_module():
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    config = {"config_groups": {"g": {"weights": weights, "targets": ["Expert", "Linear"]}}}
    found = ct_config.read(config, {"Expert"})
    assert list(found.exact) == ["Expert"]
    assert [scheme.name for scheme in found.classes] == ["fp8_channel"]
    assert ct_config.read(config).exact == {}
