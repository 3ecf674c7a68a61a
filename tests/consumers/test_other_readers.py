"""The code of other readers makes our numbers of what we write: transformers (block FP8, MXFP8,
gpt-oss), compressed-tensors (block FP8), ModelOpt's tensor classes, comfy-kitchen's layouts.

Equality is of values in fp32; ModelOpt makes 0.0 of the code of -0.0.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lowbitcli import api
from tests import seeded
from tests.consumers.models import stored


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "model"
    seeded.write(folder)
    return folder


def written(source: Path, folder: Path, scheme: str, container: str, rule: str = "") -> Path:
    """Quantize `source` and dequantize the result beside it, to fp32."""
    recipe = folder / "recipe.yaml"
    scale = f", scale: {rule}" if rule else ""
    recipe.write_text(f'rules: [{{match: "*", scheme: {scheme}{scale}, activations: dynamic}}]\n')
    request = api.Request(scheme=scheme, container=container)
    if rule:
        request = api.Request(recipe=recipe, container=container)
    api.quantize(source, folder / "q", request)
    api.dequantize(folder / "q", folder / "d", dtype="fp32")
    return folder / "q"


def compared(folder: Path, theirs: dict[str, torch.Tensor], number: int) -> None:
    """Hold what a reader made of `folder` against what we make of it."""
    ours = stored(folder.with_name("d"))
    assert len(theirs) == number
    for name, value in theirs.items():
        assert ours[name].shape == value.shape, name
        assert torch.equal(ours[name], value.float()), name


@pytest.mark.parametrize("rule", ["amax", "ue8m0"])
def test_block_fp8_in_transformers_and_compressed_tensors(source, tmp_path, rule):
    integration = pytest.importorskip("transformers.integrations.finegrained_fp8")
    folder = written(source, tmp_path, "fp8_block128", "deepseek", rule)
    parts = stored(folder)
    op = integration.Fp8Dequantize(None)
    names = [name for name in parts if f"{name}_scale_inv" in parts]
    found = {
        name: op._dequantize_one(
            parts[name], parts[f"{name}_scale_inv"], output_dtype=torch.float32
        )
        for name in names
    }
    compared(folder, found, 21)
    converter = pytest.importorskip(
        "compressed_tensors.entrypoints.convert.converters.fp8block_dequantizer"
    ).FP8BlockDequantizer(weight_block_size=(128, 128), dtype=torch.float32)
    found = {
        name: converter._create_dequantized_weight(parts[name], parts[f"{name}_scale_inv"])
        for name in names
    }
    compared(folder, found, 21)


def test_native_mxfp8_in_transformers(source, tmp_path):
    integration = pytest.importorskip("transformers.integrations.finegrained_fp8")
    folder = written(source, tmp_path, "mxfp8", "native-mxfp8")
    parts = stored(folder)
    op = integration.Fp8Dequantize(None)
    found = {
        name: op._dequantize_one(
            parts[name], parts[f"{name}_scale_inv"], output_dtype=torch.float32
        )
        for name in parts
        if f"{name}_scale_inv" in parts
    }
    compared(folder, found, 21)


def test_gpt_oss_in_transformers(tmp_path):
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    experts = "model.layers.0.mlp.experts."
    generator = torch.Generator().manual_seed(0)
    model = tmp_path / "model"
    model.mkdir()
    stacks = {
        experts + "gate_up_proj": torch.randn(4, 96, 128, generator=generator).bfloat16(),
        experts + "down_proj": torch.randn(4, 64, 96, generator=generator).bfloat16(),
    }
    save_file(stacks, model / "model.safetensors", metadata={"format": "pt"})
    (model / "config.json").write_text(json.dumps({"model_type": "gpt_oss"}))
    folder = written(model, tmp_path, "mxfp4", "gpt-oss")
    parts = stored(folder)
    found = {
        name: mxfp4.convert_moe_packed_tensors(
            parts[f"{name}_blocks"], parts[f"{name}_scales"], dtype=torch.float32
        )
        for name in stacks
    }
    compared(folder, found, 2)


@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp8", "fp8_channel", "fp8_block128"])
def test_modelopt_s_tensor_classes(source, tmp_path, scheme):
    kinds = pytest.importorskip("modelopt.torch.quantization.qtensor")
    folder = written(source, tmp_path, scheme, "modelopt")
    parts, found = stored(folder), {}
    for name, data in parts.items():
        if f"{name}_scale" not in parts:
            continue
        scale = parts[f"{name}_scale"]
        if scheme == "nvfp4":
            shape = torch.Size((data.shape[0], data.shape[1] * 2))
            found[name] = kinds.NVFP4QTensor(shape, torch.float32, data).dequantize(
                dtype=torch.float32,
                scale=scale,
                double_scale=parts[f"{name}_scale_2"],
                block_sizes={-1: 16},
            )
        elif scheme == "mxfp8":
            made = kinds.MXFP8QTensor(data.shape, torch.float32, data)
            found[name] = made.dequantize(dtype=torch.float32, scale=scale)
        elif scheme == "fp8_channel":
            made = kinds.FP8QTensor(data.shape, torch.float32, data)
            found[name] = made.dequantize(dtype=torch.float32, scale=scale[:, None])
        else:
            made = kinds.FP8QTensor(data.shape, torch.float32, data)
            found[name] = made.dequantize(
                dtype=torch.float32, scale=scale[:, 0, :, 0], block_sizes={-1: 128, -2: 128}
            )
    compared(folder, found, 21)


LAYOUTS = {
    "fp8_tensor": "TensorCoreFP8Layout",
    "fp8_tensor_e5m2": "TensorCoreFP8Layout",
    "mxfp8": "TensorCoreMXFP8Layout",
    "nvfp4": "TensorCoreNVFP4Layout",
}


@pytest.mark.parametrize("scheme", LAYOUTS)
def test_comfy_kitchen_s_layouts(tmp_path, scheme):
    """Odd rows and columns: what is padded is cropped to the shape that the model says."""
    kitchen = pytest.importorskip("comfy_kitchen.tensor")
    generator = torch.Generator().manual_seed(1)
    weights = {
        f"model.diffusion_model.{n}.weight": torch.randn(rows, cols, generator=generator)
        for n, (rows, cols) in enumerate(((130, 96), (37, 64), (256, 512), (37, 72)))
    }
    save_file(weights, tmp_path / "in.safetensors")
    request = api.Request(scheme=scheme, container="comfyui", pad=True)
    made = api.quantize(tmp_path / "in.safetensors", tmp_path / "q.safetensors", request)
    api.dequantize(tmp_path / "q.safetensors", tmp_path / "d.safetensors", dtype="fp32")
    assert len(made.plan.quantized) == len(weights)
    parts, ours = load_file(tmp_path / "q.safetensors"), load_file(tmp_path / "d.safetensors")
    layout = kitchen.get_layout_class(LAYOUTS[scheme])
    for name, w in weights.items():
        scale = parts[f"{name}_scale"]
        common = {"orig_dtype": torch.float32, "orig_shape": tuple(w.shape)}
        if scheme == "nvfp4":
            told = {"scale": parts[f"{name}_scale_2"], "block_scale": scale}
        else:
            e8m0 = scheme == "mxfp8"
            told = {"scale": scale.view(torch.float8_e8m0fnu) if e8m0 else scale}
        value = layout.dequantize(parts[name], layout.Params(**told, **common))
        assert torch.equal(ours[name], value[: w.shape[0], : w.shape[1]]), name
