"""Checkpoints that the ecosystem's own tools wrote are read to the bit of what those tools make of
them.

golden/CONTAINER/origin.json says what wrote them, and how they were cut.
"""

import json
from pathlib import Path

import pytest
import torch

from lowbitcli.api import Request, dequantize, inspect, quantize
from tests import checkpoints

GOLDEN = Path(__file__).parents[1] / "golden"
SCHEMES = {
    "compressed-tensors": {
        "fp8_dynamic": "fp8_channel",
        "fp8_block": "fp8_block128",
        "mxfp8": "mxfp8",
        "mxfp4": "mxfp4",
        "nvfp4a16": "nvfp4",
        "oneshot-nvfp4": "nvfp4",
        "nvfp4a16-moe": "nvfp4",
        "pack-int4": "int4_g128",
        "pack-int4-g32": "int4_g32",
        "pack-int4-channel": "int4_channel",
        "pack-int8": "int8_channel",
        "pack-int8-g64": "int8_g64",
        "int8-g64": "int8_g64",
    },
    "deepseek": {"fp8-block": "fp8_block128", "fp8-block-ue8m0": "fp8_block128"},
    "native-mxfp8": {"mxfp8": "mxfp8"},
    "gpt-oss": {"mxfp4": "mxfp4"},
    "modelopt": {
        "fp8": "fp8_tensor",
        "fp8-kv": "fp8_tensor",
        "fp8_per_channel": "fp8_channel",
        "fp8_pb_wo": "fp8_block128",
        "nvfp4": "nvfp4",
        "w4a16_nvfp4": "nvfp4",
        "nvfp4-moe": "nvfp4",
        "mixed": "fp8_tensor nvfp4",
        "mxfp8": "mxfp8",
        "mxfp4": "mxfp4",
    },
    "torchao": {
        "float8": "fp8_channel fp8_tensor fp8_block128",
        "mx": "mxfp8 mxfp4",
        "mx-swizzled": "mxfp8 mxfp4",
        "nvfp4": "nvfp4",
        "nvfp4-swizzled": "nvfp4",
    },
}
ONLY_READ = ("pack-int4-g32", "pack-int4-channel", "pack-int8", "pack-int8-g64", "int8-g64")
PAIRS = [(container, name) for container, names in SCHEMES.items() for name in names]
CT = GOLDEN / "compressed-tensors"
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def origin(container: str) -> dict:
    return json.loads((GOLDEN / container / "origin.json").read_text())


def modules(container: str, name: str) -> list[str]:
    return origin(container)["checkpoints"][name]["modules"]


@pytest.mark.parametrize("container", SCHEMES)
def test_every_golden_has_its_origin(container):
    folders = {path.name for path in (GOLDEN / container).iterdir() if path.is_dir()}
    assert folders == set(SCHEMES[container]) == set(origin(container)["checkpoints"])


@pytest.mark.parametrize(("container", "name"), PAIRS)
def test_they_are_recognised(container, name):
    found = inspect(GOLDEN / container / name)
    assert found.container == container
    assert found.findings == ()
    quantized = {weight.name for weight in found.weights if weight.scheme is not None}
    ending = "" if container == "gpt-oss" else ".weight"
    assert quantized == {f"{module}{ending}" for module in modules(container, name)}
    assert {w.scheme.name for w in found.weights if w.scheme} == set(
        SCHEMES[container][name].split()
    )
    assert {w.dtype for w in found.weights} == {"BF16"}


@pytest.mark.parametrize(("container", "name"), PAIRS)
def test_they_dequantize_to_the_bit(tmp_path, container, name):
    wanted = checkpoints.read(GOLDEN / container / f"{name}.dequantized.safetensors")
    for dtype, theirs in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        if any(tensor.dtype == theirs for tensor in wanted.values()):
            source = GOLDEN / container / name
            done = dequantize(source, tmp_path / dtype, dtype=dtype, device="cpu")
            found = checkpoints.read(done.output)
            assert found.keys() == wanted.keys()
            for tensor, value in wanted.items():
                if value.dtype != theirs:
                    continue
                if container == "modelopt":  # whose reader makes 0.0 of the code of -0.0
                    assert found[tensor].dtype == theirs and torch.equal(found[tensor], value)
                else:
                    assert checkpoints.same(found[tensor], value), tensor
            assert "quantization_config" not in checkpoints.config_of(done.output)
            assert not (done.output / "hf_quant_config.json").exists()


@pytest.mark.parametrize(("container", "name"), PAIRS)
def test_they_go_through_another_container_and_back_unchanged(tmp_path, container, name):
    """Codes and scales are those of the ecosystem's tool; only where they are kept changes."""
    source = GOLDEN / container / name
    if container == "modelopt" and {"fp8_tensor", "mxfp4"} & set(SCHEMES[container][name].split()):
        pytest.skip("read, and not written")
    if container == "torchao" or name in ONLY_READ:
        pytest.skip("read, and not written")
    recipe = tmp_path / "recipe.yaml"
    scheme = SCHEMES[container][name]
    recipe.write_text(f'rules: [{{match: "*", scheme: {scheme}}}]\n')
    one = quantize(source, tmp_path / "one", Request(recipe=recipe, container="lowbit"))
    two = quantize(one.output, tmp_path / "two", Request(recipe=recipe, container=container))
    before, after = checkpoints.read(source), checkpoints.read(two.output)
    for tensor, stored in after.items():
        if tensor.endswith("weight_global_scale"):  # a reciprocal may not come back: see recode
            ulps = before[tensor].view(torch.int32) - stored.view(torch.int32)
            assert abs(int(ulps)) <= 1
        elif before[tensor].dtype == stored.dtype:
            assert checkpoints.same(before[tensor], stored), tensor
        else:
            assert stored.dtype == torch.float32 and tensor.endswith(("_scale", "_scale_inv"))
            assert torch.equal(before[tensor].float(), stored), tensor
    dropped = before.keys() - after.keys()
    assert all("input" in tensor for tensor in dropped)
    assert one.errors == two.errors == {}, "nothing was rounded"


def test_in_fp32_nvfp4_differs_only_where_the_scale_does(tmp_path):
    """compressed-tensors divides, fl(s / G), we multiply, fl(s * fl(1 / G)): two ulps at most."""
    agreed = blocks = 0
    names = SCHEMES["compressed-tensors"]
    for name in [name for name, scheme in names.items() if scheme == "nvfp4"]:
        done = dequantize(CT / name, tmp_path / name, dtype="fp32", device="cpu")
        found, stored = checkpoints.read(done.output), checkpoints.read(CT / name)
        for module in modules("compressed-tensors", name):
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


@pytest.mark.parametrize(
    ("container", "name", "number"),
    [
        ("compressed-tensors", "oneshot-nvfp4", 2),
        ("modelopt", "nvfp4", 2),
        ("modelopt", "fp8-kv", 2),
    ],
)
def test_scales_of_activations_are_dropped_and_said(tmp_path, container, name, number):
    source = GOLDEN / container / name
    done = dequantize(source, tmp_path / "out", device="cpu")
    assert any(f"{number} scales of activations" in note for note in done.plan.notes)
    assert not any("_scale" in name for name in checkpoints.read(done.output))
    again = quantize(source, tmp_path / "again", Request(), device="cpu")
    group = checkpoints.quantization_of(again.output)["config_groups"]["group_0"]
    assert group["input_activations"] is None, "W4A4 is not declared without its tensors"


@pytest.mark.parametrize("dtype", ("bf16", "fp32"))
@pytest.mark.parametrize("name", ("fp8_dynamic", "fp8_block"))
def test_scales_in_bf16_go_by_value(tmp_path, name, dtype):
    """llm-compressor stores FP8 scales in the model's dtype; FP32 scales of the same value give
    the same weights."""
    stored = checkpoints.read(CT / name)
    assert {v.dtype for k, v in stored.items() if k.endswith("_scale")} == {torch.bfloat16}
    wide = {k: v.float() if k.endswith("_scale") else v for k, v in stored.items()}
    config = checkpoints.config_of(CT / name)
    source = checkpoints.single(tmp_path / "wide", wide, config)
    one = dequantize(source, tmp_path / "one", dtype=dtype, device="cpu")
    other = dequantize(CT / name, tmp_path / "other", dtype=dtype, device="cpu")
    a, b = checkpoints.read(one.output), checkpoints.read(other.output)
    assert all(checkpoints.same(a[name], b[name]) for name in b)


@pytest.mark.parametrize(
    ("container", "name", "scheme"),
    [("compressed-tensors", "mxfp8", "mxfp8"), ("native-mxfp8", "mxfp8", "mxfp8")],
)
def test_e8m0_scales_go_by_byte(tmp_path, container, name, scheme):
    """torchao and others store E8M0 scales as F8_E8M0: the byte counts, not its value."""
    golden = GOLDEN / container / name
    stored = checkpoints.read(golden)
    named = {k: v.view(torch.float8_e8m0fnu) if "_scale" in k else v for k, v in stored.items()}
    source = checkpoints.single(tmp_path / "e8m0", named, checkpoints.config_of(golden))
    done = dequantize(source, tmp_path / "out", device="cpu")
    wanted = checkpoints.read(GOLDEN / container / f"{name}.dequantized.safetensors")
    found = checkpoints.read(done.output)
    assert all(checkpoints.same(found[name], wanted[name]) for name in wanted)
    request = Request(scheme=scheme, container=container)
    again = quantize(source, tmp_path / "again", request, device="cpu")
    written = checkpoints.read(again.output)
    assert all(checkpoints.same(written[name], stored[name]) for name in stored)
