"""Static activations beside what ModelOpt and llm-compressor exported: the same tensors under the
same names, of the same kind, and the same words in their configs."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from lowbitcli.api import Request, dequantize, quantize
from tests.checkpoints import single, weight

GOLDEN = Path(__file__).parents[1] / "golden"
LARGEST = {"nvfp4": 2688, "fp8_tensor": 448}
SCALES = (".input_scale", ".input_global_scale", ".k_scale", ".v_scale")
CASES = [
    ("modelopt", "nvfp4", "nvfp4"),
    ("modelopt", "nvfp4-moe", "nvfp4"),
    ("modelopt", "fp8", "fp8_tensor"),
    ("compressed-tensors", "oneshot-nvfp4", "nvfp4"),
]


def scales_of(folder):
    """Return the stored scales of activations by name."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {x: file.get_tensor(x) for x in file.keys() if x.endswith(SCALES)}  # noqa: SIM118
    return found


def amaxes(scales, scheme):
    """Return the amaxes that a peer's scales were made of, to an ulp."""
    found = {}
    for name, scale in scales.items():
        module, _, kind = name.rpartition(".")
        number = float(scale)
        found[module] = LARGEST[scheme] * (1 / number if "global" in kind else number)
    return found


@pytest.mark.parametrize(("container", "case", "scheme"), CASES)
def test_what_peers_export(tmp_path, container, case, scheme):
    theirs = GOLDEN / container / case
    expected = scales_of(theirs)
    assert expected
    (tmp_path / "amax.json").write_text(json.dumps(amaxes(expected, scheme)))
    plain = dequantize(theirs, tmp_path / "plain", dtype="fp32", device="cpu")
    request = Request(scheme, None, container, activation_scales=tmp_path / "amax.json")
    done = quantize(plain.output, tmp_path / "out", request, device="cpu")
    found = scales_of(done.output)
    assert found.keys() == expected.keys()
    for name, scale in found.items():
        assert (scale.dtype, scale.shape) == (torch.float32, expected[name].shape), name
        torch.testing.assert_close(scale, expected[name].float(), rtol=2e-7, atol=0)


def declared(folder):
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    groups = [
        {key: said.get(key) for key in ("weights", "input_activations", "format")}
        for said in said["config_groups"].values()
    ]
    for group in groups:
        for key in ("weights", "input_activations"):
            group[key] = {k: v for k, v in group[key].items() if not k.startswith("observer")}
    return said.get("quant_algo"), said.get("kv_cache_scheme"), groups


@pytest.mark.parametrize(("container", "case", "scheme"), CASES)
def test_what_peers_declare(tmp_path, container, case, scheme):
    theirs = GOLDEN / container / case
    (tmp_path / "amax.json").write_text(json.dumps(amaxes(scales_of(theirs), scheme)))
    plain = dequantize(theirs, tmp_path / "plain", dtype="fp32", device="cpu")
    request = Request(scheme, None, container, activation_scales=tmp_path / "amax.json")
    done = quantize(plain.output, tmp_path / "out", request, device="cpu")
    assert declared(done.output) == declared(theirs)
    if container == "modelopt":
        ours, other = (
            json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
            for folder in (done.output, theirs)
        )
        for key in ("quant_algo", "kv_cache_quant_algo", "group_size"):
            assert ours.get(key) == other.get(key), key


def test_scales_of_a_cache_are_called_and_declared_as_modelopt_does(tmp_path):
    theirs = GOLDEN / "modelopt" / "fp8-kv"  # a few tensors of it
    cached = {name: scale for name, scale in scales_of(theirs).items() if "input" not in name}
    ((name, scale),) = cached.items()
    attention = name.removesuffix(".k_proj.k_scale")
    tensors = {f"{attention}.{one}_proj.weight": weight(64, 64) for one in "kv"}
    amax = {f"{attention}.{one}_amax": 448 * float(scale) for one in "kv"}
    amax |= {f"{attention}.{one}_proj": 3.0 for one in "kv"}
    (tmp_path / "amax.json").write_text(json.dumps(amax))
    request = Request("fp8", None, "modelopt", activation_scales=tmp_path / "amax.json")
    done = quantize(single(tmp_path / "m", tensors), tmp_path / "out", request, device="cpu")
    found = scales_of(done.output)
    assert (found[name].dtype, found[name].shape) == (scale.dtype, scale.shape)
    torch.testing.assert_close(found[name], scale, rtol=2e-7, atol=0)
    assert name.replace("k_", "v_") in found
    assert declared(done.output)[:2] == declared(theirs)[:2]
    for folder in (done.output, theirs):
        said = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
        assert said["kv_cache_quant_algo"] == "FP8"
