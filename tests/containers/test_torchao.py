"""torchao's flattened tensors: classes and attributes are in the header, and what is not understood
there is named before any work."""

import json
from pathlib import Path

import pytest
import torch

from lowbitcli.api import Request, dequantize, inspect, quantize
from lowbitcli.errors import CheckpointError, RecipeError, UnsupportedError, UsageError
from tests import checkpoints
from tests.checkpoints import metadata_of, sharded, single, weight

GOLDEN = Path(__file__).parents[1] / "golden" / "torchao"
K, UP = "model.layers.0.self_attn.k_proj", "model.layers.0.mlp.up_proj"


def golden(name):
    tensors = checkpoints.read(GOLDEN / name)
    return tensors, metadata_of(GOLDEN / name / "model.safetensors")


def edited(tmp_path, name, edit):
    """Write a golden checkpoint again after `edit(tensors, said)`, said being what the header
    says of each tensor."""
    tensors, metadata = golden(name)
    said = {key: json.loads(metadata[key]) for key in json.loads(metadata["tensor_names"])}
    edit(tensors, said)
    metadata = {key: json.dumps(value) for key, value in said.items()}
    metadata["tensor_names"] = json.dumps(list(said))
    config = checkpoints.config_of(GOLDEN / name)
    return single(tmp_path / "edited", tensors, config, metadata)


@pytest.mark.parametrize("name", ["float8", "mx", "mx-swizzled", "nvfp4", "nvfp4-swizzled"])
@pytest.mark.parametrize("container", ["compressed-tensors", "lowbit"])
def test_into_another_container_nothing_is_rounded_and_no_word_of_torchao_is_left(
    tmp_path, name, container
):
    held = inspect(GOLDEN / name).weights
    rules = "".join(
        f"  - match: {w.name.removesuffix('.weight')}\n    scheme: {w.scheme.name}\n"
        for w in held
        if w.scheme
    )
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"rules:\n{rules}")
    request = Request(recipe=recipe, container=container)
    done = quantize(GOLDEN / name, tmp_path / "q", request, device="cpu")
    assert done.errors == {} and done.plan.source_container == "torchao"
    metadata = metadata_of(done.output / "model.safetensors")
    assert metadata["format"] == "pt" or container == "lowbit"
    assert not [key for key in metadata if key.startswith(("tensor_names", "model."))]
    assert inspect(done.output).container == container
    back = dequantize(done.output, tmp_path / "d", dtype="fp32", device="cpu")
    found = checkpoints.read(back.output)
    wanted = checkpoints.read(GOLDEN / f"{name}.dequantized.safetensors")
    assert found.keys() == wanted.keys()
    for tensor, value in wanted.items():
        if done.moved and value.dim() == 2:  # the reciprocal of a global scale, an ulp away
            assert torch.allclose(found[tensor], value, rtol=2**-22, atol=0)
        else:
            assert checkpoints.same(found[tensor], value)


def test_shards_are_described_each_in_its_own_header(tmp_path):
    tensors, metadata = golden("mx")
    parts = [{k: v for k, v in tensors.items() if k.startswith(stem)} for stem in (K, UP)]
    root = sharded(tmp_path / "shards", *parts, config=checkpoints.config_of(GOLDEN / "mx"))
    for number, (part, name) in enumerate(zip(parts, (K, UP), strict=True), 1):
        said = {"tensor_names": json.dumps([f"{name}.weight"])}
        said[f"{name}.weight"] = metadata[f"{name}.weight"]
        checkpoints.write(root / f"model-0000{number}-of-00002.safetensors", part, said)
    found = inspect(root)
    assert (found.container, found.findings) == ("torchao", ())
    assert {w.name: w.scheme.name for w in found.weights if w.scheme} == {
        f"{K}.weight": "mxfp8",
        f"{UP}.weight": "mxfp4",
    }


def test_the_header_is_enough_without_a_config(tmp_path):
    tensors, metadata = golden("nvfp4")
    path = checkpoints.write(tmp_path / "x.safetensors", tensors, metadata)
    found = inspect(path)
    assert (found.container, found.findings) == ("torchao", ())
    assert {w.dtype for w in found.weights} == {"BF16"}


def change(name, **attributes):
    return lambda tensors, said: said[f"{name}.weight"]["_data"].update(attributes)


def become(name, kind):
    return lambda tensors, said: said[f"{name}.weight"].update(_type=kind)


def without(tensor):
    return lambda tensors, said: tensors.pop(tensor)


FINDINGS = {
    "another class": ("mx", become(K, "Int4Tensor"), "unknown", "Int4Tensor is not read"),
    "no class": ("mx", become(K, None), "unknown", "None is not read"),
    "another block": ("mx", change(K, block_size=16), "unknown", "in blocks of 16"),
    "blocks of FP8": ("float8", change(K, block_size=[1, 32]), "unknown", "in blocks of"),
    "no block": ("float8", change(K, block_size=None), "unknown", "in blocks of None"),
    "another element": (
        "mx",
        change(K, elem_dtype={"_type": "torch.dtype", "_data": "float6_e3m2"}),
        "unknown",
        "float6_e3m2",
    ),
    "swizzled, it says": ("mx", change(K, is_swizzled_scales=True), "mismatch", "shape"),
    "linear, it says": ("mx-swizzled", change(K, is_swizzled_scales=False), "mismatch", "shape"),
    "no global scale": (
        "nvfp4",
        lambda t, said: said[f"{UP}.weight"].update(_tensor_data_names=["qdata", "scale"]),
        "unknown",
        "without per_tensor_scale",
    ),
    "no scale": ("mx", without(f"{K}._weight_scale"), "missing", "_weight_scale"),
    "no data": ("mx", without(f"{K}._weight_qdata"), "missing", "_weight_qdata"),
    "not described": ("mx", lambda t, said: said.pop(f"{K}.weight"), "orphan", "not there"),
    "a plain one gone": ("mx", without("model.norm.weight"), "missing", "listed in the header"),
    "another dtype": (
        "float8",
        lambda t, said: t.update(
            {f"{UP}._weight_qdata": torch.zeros(33, 64, dtype=torch.float8_e4m3fn).view(torch.int8)}
        ),
        "mismatch",
        "I8 is stored",
    ),
}


@pytest.mark.parametrize("name", FINDINGS)
def test_what_is_not_understood_is_found_before_any_work(tmp_path, name):
    source, edit, kind, message = FINDINGS[name]
    path = edited(tmp_path, source, edit)
    found = [one for one in inspect(path).findings if one.kind == kind]
    assert any(message in one.message for one in found)
    with pytest.raises(CheckpointError, match="disagrees with itself"):
        dequantize(path, tmp_path / "out", device="cpu")
    assert not (tmp_path / "out").exists()


def test_scales_of_activations_are_left_out(tmp_path):
    def edit(tensors, said):
        tensors[f"{UP}._weight_act_per_tensor_scale"] = torch.ones(())

    path = edited(tmp_path, "nvfp4", edit)
    assert inspect(path).findings == ()
    done = dequantize(path, tmp_path / "out", device="cpu")
    assert checkpoints.read(done.output).keys() == {f"{UP}.weight", "model.norm.weight"}


def test_a_config_without_a_header_is_refused(tmp_path):
    tensors = {f"{K}.weight": weight(32, 32)}
    source = single(tmp_path / "x", tensors, {"quantization_config": {"quant_method": "torchao"}})
    with pytest.raises(UnsupportedError, match="no header describes"):
        inspect(source)


@pytest.mark.parametrize(
    "metadata",
    [
        {"tensor_names": "{"},
        {"tensor_names": "{}"},
        {"tensor_names": "[1]"},
        {"tensor_names": json.dumps([f"{K}.weight"]), f"{K}.weight": "["},
        {"tensor_names": json.dumps([f"{K}.weight"]), f"{K}.weight": "[]"},
        {"tensor_names": json.dumps([f"{K}.weight"]), f"{K}.weight": '{"_data": 1}'},
    ],
)
def test_a_malformed_header_is_one_clear_error(tmp_path, metadata):
    tensors, _ = golden("mx")
    path = checkpoints.write(tmp_path / "x.safetensors", tensors, metadata)
    with pytest.raises(CheckpointError, match="header metadata"):
        inspect(path)


def test_it_is_not_written(tmp_path):
    source = single(tmp_path / "x", {f"{K}.weight": weight(32, 32)})
    with pytest.raises(RecipeError, match="torchao has no mxfp8"):
        quantize(source, tmp_path / "q", Request(scheme="mxfp8", container="torchao"))
    only = single(tmp_path / "y", {"model.norm.weight": weight(1, 32)[0]})
    with pytest.raises(UsageError, match="not written"):
        quantize(only, tmp_path / "q", Request(scheme="mxfp8", container="torchao"))
