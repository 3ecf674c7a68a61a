"""Checkpoints of llm-compressor are read to the bit of what compressed-tensors makes of them.

golden/compressed-tensors/origin.json says what wrote them, and how they were cut.
"""

import json
from pathlib import Path

import pytest
import torch

from lowbitcli.api import Request, dequantize, inspect, quantize
from tests import checkpoints

GOLDEN = Path(__file__).parents[1] / "golden" / "compressed-tensors"
ORIGIN = json.loads((GOLDEN / "origin.json").read_text())
SCHEMES = {
    "fp8_dynamic": "fp8_channel",
    "mxfp8": "mxfp8",
    "nvfp4a16": "nvfp4",
    "oneshot-nvfp4": "nvfp4",
    "nvfp4a16-moe": "nvfp4",
}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def test_every_golden_has_its_origin():
    assert {path.name for path in GOLDEN.iterdir() if path.is_dir()} == set(SCHEMES)
    assert set(ORIGIN["checkpoints"]) == set(SCHEMES)


@pytest.mark.parametrize("name", SCHEMES)
def test_they_are_recognised(name):
    found = inspect(GOLDEN / name)
    assert found.container == "compressed-tensors"
    assert found.findings == ()
    quantized = {weight.name for weight in found.weights if weight.scheme is not None}
    assert quantized == {f"{module}.weight" for module in ORIGIN["checkpoints"][name]["modules"]}
    assert {w.scheme.name for w in found.weights if w.scheme} == {SCHEMES[name]}
    assert {w.dtype for w in found.weights} == {"BF16"}


@pytest.mark.parametrize("name", SCHEMES)
def test_they_dequantize_to_the_bit(tmp_path, name):
    done = dequantize(GOLDEN / name, tmp_path / "out", device="cpu")
    wanted = checkpoints.read(GOLDEN / f"{name}.dequantized.safetensors")
    found = checkpoints.read(done.output)
    assert found.keys() == wanted.keys()
    for tensor in wanted:
        assert checkpoints.same(found[tensor], wanted[tensor]), tensor
    assert "quantization_config" not in checkpoints.config_of(done.output)


def test_in_fp32_nvfp4_differs_only_where_the_scale_does(tmp_path):
    """compressed-tensors divides, fl(s / G), we multiply, fl(s * fl(1 / G)): two ulps at most."""
    agreed = blocks = 0
    for name in [name for name, scheme in SCHEMES.items() if scheme == "nvfp4"]:
        done = dequantize(GOLDEN / name, tmp_path / name, dtype="fp32", device="cpu")
        found, stored = checkpoints.read(done.output), checkpoints.read(GOLDEN / name)
        for module in ORIGIN["checkpoints"][name]["modules"]:
            packed = stored[f"{module}.weight_packed"].int()
            codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1)
            scale = stored[f"{module}.weight_scale"].float()
            shared = stored[f"{module}.weight_global_scale"]
            theirs = scale / shared
            ours = scale * (torch.ones(1) / shared)
            elements = E2M1[codes].reshape(*scale.shape, 16)
            value = found[f"{module}.weight"].reshape(*scale.shape, 16)
            assert torch.equal(value, elements * ours[..., None])
            same = theirs == ours
            assert torch.equal(value[same], (elements * theirs[..., None])[same])
            assert float(((theirs - ours).abs() / ours).max()) < 2**-22
            agreed, blocks = agreed + int(same.sum()), blocks + same.numel()
    assert 0 < agreed < blocks


def test_scales_of_activations_are_dropped_and_said(tmp_path):
    done = dequantize(GOLDEN / "oneshot-nvfp4", tmp_path / "out", device="cpu")
    assert any("2 scales of activations" in note for note in done.plan.notes)
    assert not any("input" in name for name in checkpoints.read(done.output))
    again = quantize(GOLDEN / "oneshot-nvfp4", tmp_path / "again", Request(), device="cpu")
    group = checkpoints.quantization_of(again.output)["config_groups"]["group_0"]
    assert group["input_activations"] is None, "W4A4 is not declared without its tensors"


@pytest.mark.parametrize("dtype", ("bf16", "fp32"))
def test_scales_in_bf16_go_by_value(tmp_path, dtype):
    """llm-compressor stores FP8 scales in the model's dtype; FP32 scales of the same value give
    the same weights."""
    stored = checkpoints.read(GOLDEN / "fp8_dynamic")
    wide = {k: v.float() if k.endswith("_scale") else v for k, v in stored.items()}
    config = checkpoints.config_of(GOLDEN / "fp8_dynamic")
    source = checkpoints.single(tmp_path / "wide", wide, config)
    one = dequantize(source, tmp_path / "one", dtype=dtype, device="cpu")
    other = dequantize(GOLDEN / "fp8_dynamic", tmp_path / "other", dtype=dtype, device="cpu")
    a, b = checkpoints.read(one.output), checkpoints.read(other.output)
    assert all(checkpoints.same(a[name], b[name]) for name in b)


def test_e8m0_scales_go_by_byte(tmp_path):
    """torchao and others store E8M0 scales as F8_E8M0: the byte counts, not its value."""
    stored = checkpoints.read(GOLDEN / "mxfp8")
    named = {
        k: v.view(torch.float8_e8m0fnu) if k.endswith("_scale") else v for k, v in stored.items()
    }
    config = checkpoints.config_of(GOLDEN / "mxfp8")
    source = checkpoints.single(tmp_path / "e8m0", named, config)
    done = dequantize(source, tmp_path / "out", device="cpu")
    wanted = checkpoints.read(GOLDEN / "mxfp8.dequantized.safetensors")
    found = checkpoints.read(done.output)
    assert all(checkpoints.same(found[name], wanted[name]) for name in wanted)
    again = quantize(source, tmp_path / "again", Request(scheme="mxfp8"), device="cpu")
    written = checkpoints.read(again.output)
    assert all(checkpoints.same(written[name], stored[name]) for name in stored)
