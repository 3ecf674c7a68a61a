"""One file for ComfyUI: marks in the header and in tensors, high nibble first, swizzled scales,
padding, and the file of a diffusion model recognised by its tensors."""

import json
from pathlib import Path

import pytest
import torch

from lowbitcli import api
from lowbitcli.api import Request, dequantize, inspect, quantize
from lowbitcli.containers.families import FAMILIES, PREFIXES, family_of
from lowbitcli.errors import CheckpointError, RecipeError
from tests import checkpoints
from tests.checkpoints import header_of, metadata_of, weight

GOLDEN = Path(__file__).parents[1] / "golden" / "comfyui"
FORMATS = {
    "float8_e4m3fn": "fp8_tensor",
    "float8_e5m2": "fp8_tensor_e5m2",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
}
READ = {**FORMATS, "int8_tensorwise": "int8_channel"}
P = "model.diffusion_model.double_blocks.0."
WIDE, ODD = P + "img_attn.proj", P + "img_mlp.0"


def test_every_golden_has_its_origin():
    files = {path.name.partition(".")[0] for path in GOLDEN.glob("*.safetensors")}
    assert (
        files == set(READ) == set(json.loads((GOLDEN / "origin.json").read_text())["checkpoints"])
    )


@pytest.mark.parametrize("name", READ)
def test_what_comfy_kitchen_wrote_is_read_to_the_bit(tmp_path, name):
    """Rows come from the bias; columns that pad a block stay, as nothing tells of them."""
    source = GOLDEN / f"{name}.safetensors"
    found = inspect(source)
    assert (found.container, found.findings) == ("comfyui", ())
    assert {w.scheme.name for w in found.weights if w.scheme} == {READ[name]}
    assert len([w for w in found.weights if w.scheme]) == 2
    out = dequantize(source, tmp_path / "out.safetensors", dtype="fp32", device="cpu").output
    ours = checkpoints.read(out)
    theirs = checkpoints.read(GOLDEN / f"{name}.dequantized.safetensors")
    assert ours.keys() == theirs.keys()
    for tensor, value in theirs.items():
        mine = ours[tensor]
        if value.dim() == 2:
            padding = mine[:, value.shape[1] :]
            assert not bool(padding.any())
            mine = mine[:, : value.shape[1]].contiguous()
        assert mine.dtype == value.dtype and torch.equal(mine, value), tensor
    assert metadata_of(out).keys().isdisjoint({"_quantization_metadata"})


def tensors():
    return {
        WIDE + ".weight": weight(130, 96),
        WIDE + ".bias": weight(1, 130)[0],
        ODD + ".weight": weight(37, 64).float(),
        P + "img_attn.norm.key_norm.scale": weight(1, 64)[0],
        "first_stage_model.decoder.mid.attn_1.q.weight": weight(32, 32),
    }


@pytest.fixture
def source(tmp_path):
    metadata = {"format": "pt", "modelspec.title": "x"}
    return checkpoints.write(tmp_path / "flux.safetensors", tensors(), metadata)


SHAPES = {
    "float8_e4m3fn": {".weight": ("F8_E4M3", [37, 64]), ".weight_scale": ("F32", [])},
    "float8_e5m2": {".weight": ("F8_E5M2", [37, 64]), ".weight_scale": ("F32", [])},
    "mxfp8": {".weight": ("F8_E4M3", [64, 64]), ".weight_scale": ("U8", [128, 4])},
    "nvfp4": {
        ".weight": ("U8", [48, 32]),
        ".weight_scale": ("F8_E4M3", [128, 4]),
        ".weight_scale_2": ("F32", []),
    },
}


@pytest.mark.parametrize("name", FORMATS)
def test_case_18_exactly_the_quantized_layers_are_marked(tmp_path, source, name):
    request = Request(scheme=FORMATS[name])
    done = quantize(source, tmp_path / "out.safetensors", request, device="cpu")
    assert done.plan.container == "comfyui", "recognised by its tensors"
    metadata = metadata_of(done.output)
    assert metadata["format"] == "pt" and metadata["modelspec.title"] == "x"
    said = json.loads(metadata["_quantization_metadata"])
    mark = {"format": name}
    assert said == {"format_version": "1.0", "layers": {WIDE: mark, ODD: mark}}
    stored = checkpoints.read(done.output)
    marks = {k: v for k, v in stored.items() if k.endswith(".comfy_quant")}
    assert {k: json.loads(bytes(v.tolist())) for k, v in marks.items()} == {
        WIDE + ".comfy_quant": {**mark, "orig_shape": [130, 96], "orig_dtype": "torch.bfloat16"},
        ODD + ".comfy_quant": {**mark, "orig_shape": [37, 64], "orig_dtype": "torch.float32"},
    }
    header = header_of(done.output)
    found = {
        k.removeprefix(ODD): (v["dtype"], v["shape"])
        for k, v in header.items()
        if k.startswith(ODD) and not k.endswith(".comfy_quant")
    }
    assert found == SHAPES[name]
    assert api.verify(done.output, against=source, device="cpu").problems == ()


@pytest.mark.parametrize("name", FORMATS)
def test_it_comes_back_in_its_own_shapes(tmp_path, source, name):
    done = quantize(source, tmp_path / "q.safetensors", Request(scheme=FORMATS[name]), device="cpu")
    back = dequantize(done.output, tmp_path / "d.safetensors", dtype="fp32", device="cpu")
    found = checkpoints.read(back.output)
    assert {k: v.shape for k, v in found.items()} == {k: v.shape for k, v in tensors().items()}
    assert back.plan.notes == ()
    again = quantize(
        done.output, tmp_path / "r.safetensors", Request(scheme=FORMATS[name]), device="cpu"
    )
    a, b = checkpoints.read(done.output), checkpoints.read(again.output)
    assert a.keys() == b.keys() and all(checkpoints.same(a[k], b[k]) for k in a)
    assert again.errors == {}


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_to_lowbit_and_back_is_byte_identical(tmp_path, source, name):
    first = quantize(source, tmp_path / "a.safetensors", Request(scheme=name), device="cpu")
    request = Request(scheme=name, container="lowbit")
    second = quantize(first.output, tmp_path / "b.safetensors", request, device="cpu")
    request = Request(scheme=name, container="comfyui")
    third = quantize(second.output, tmp_path / "c.safetensors", request, device="cpu")
    a, c = checkpoints.read(first.output), checkpoints.read(third.output)
    assert a.keys() == c.keys() and all(checkpoints.same(a[k], c[k]) for k in a)
    assert second.errors == third.errors == {} and second.moved == third.moved == 0


def test_each_layer_stands_alone(tmp_path):
    """ComfyUI multiplies by each matrix on its own: scales are not shared."""
    names = [P + f"{x}_proj.weight" for x in "qkv"]
    made = {n: weight(64, 64, 10.0**i, seed=i) for i, n in enumerate(names)}
    source = checkpoints.write(tmp_path / "x.safetensors", made)
    request = Request(scheme="nvfp4", container="comfyui")
    done = quantize(source, tmp_path / "out.safetensors", request, device="cpu")
    stored = checkpoints.read(done.output)
    assert len({float(stored[n + "_scale_2"]) for n in names}) == 3
    found = api.verify(done.output, against=source, device="cpu")
    assert found.problems == ()


def test_what_comfyui_has_no_format_for_is_refused(tmp_path, source):
    with pytest.raises(RecipeError, match="comfyui has no mxfp4"):
        quantize(source, tmp_path / "x", Request(scheme="mxfp4", container="comfyui"))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_the_older_form(tmp_path, dtype):
    w = weight(32, 64).float().clamp(-448, 448).to(dtype)
    old = {
        "scaled_fp8": torch.zeros(2).to(torch.float8_e4m3fn),
        WIDE + ".weight": w,
        WIDE + ".scale_weight": torch.tensor([0.5]),
        WIDE + ".scale_input": torch.tensor([1.0]),
        ODD + ".weight": weight(8, 8),
    }
    source = checkpoints.write(tmp_path / "old.safetensors", old)
    found = inspect(source)
    assert (found.container, found.findings) == ("comfyui", ())
    done = dequantize(source, tmp_path / "out.safetensors", dtype="fp32", device="cpu")
    back = checkpoints.read(done.output)
    assert back.keys() == {WIDE + ".weight", ODD + ".weight"}
    assert torch.equal(back[WIDE + ".weight"], w.float() * 0.5)


def marked(said: object, **more):
    text = said if isinstance(said, bytes) else json.dumps(said).encode()
    return {WIDE + ".comfy_quant": torch.tensor(list(text), dtype=torch.uint8), **more}


def quantized(tmp_path, source, edit):
    done = quantize(source, tmp_path / "q.safetensors", Request(scheme="nvfp4"), device="cpu")
    stored, metadata = checkpoints.read(done.output), metadata_of(done.output)
    metadata = {k: v for k, v in metadata.items() if not k.startswith("lowbit.")}
    edit(stored, metadata)
    return checkpoints.write(tmp_path / "edited.safetensors", stored, metadata)


FINDINGS = {
    "missing scale": (lambda t, m: t.pop(WIDE + ".weight_scale"), "missing"),
    "missing global scale": (lambda t, m: t.pop(WIDE + ".weight_scale_2"), "missing"),
    "missing weight": (lambda t, m: t.pop(WIDE + ".weight"), "missing"),
    "another format": (lambda t, m: t.update(marked({"format": "mxfp8"})), "mismatch"),
    "another shape": (
        lambda t, m: t.update(marked({"format": "nvfp4", "orig_shape": [64, 64]})),
        "mismatch",
    ),
    "no shape": (
        lambda t, m: t.update(marked({"format": "nvfp4", "orig_shape": ["x", None]})),
        "mismatch",
    ),
    "a mark of another dtype": (
        lambda t, m: t.update({WIDE + ".comfy_quant": torch.zeros(4)}),
        "mismatch",
    ),
    "an unmarked layer": (
        lambda t, m: (m.pop("_quantization_metadata"), t.pop(ODD + ".comfy_quant")),
        "orphan",
    ),
}


@pytest.mark.parametrize("name", FINDINGS)
def test_marks_and_tensors_that_disagree_are_found(tmp_path, source, name):
    edit, kind = FINDINGS[name]
    path = quantized(tmp_path, source, edit)
    assert kind in {one.kind for one in inspect(path).findings}
    with pytest.raises(CheckpointError, match="disagrees with itself"):
        dequantize(path, tmp_path / "x.safetensors", device="cpu")


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_columns_that_pad_a_last_block_are_cropped_where_a_mark_says_so(tmp_path, name):
    stored = checkpoints.read(GOLDEN / f"{name}.safetensors")
    wanted = checkpoints.read(GOLDEN / f"{name}.dequantized.safetensors")
    for key in [key for key in stored if key.endswith(".comfy_quant")]:
        shape = list(wanted[key.replace(".comfy_quant", ".weight")].shape)
        text = json.dumps({"format": name, "orig_shape": shape}).encode()
        stored[key] = torch.tensor(list(text), dtype=torch.uint8)
    source = checkpoints.write(tmp_path / "x.safetensors", stored)
    assert inspect(source).findings == ()
    done = dequantize(source, tmp_path / "out.safetensors", dtype="fp32", device="cpu")
    found = checkpoints.read(done.output)
    assert done.plan.notes == ()
    assert found.keys() == wanted.keys()
    assert all(checkpoints.same(found[key], value) for key, value in wanted.items())


@pytest.mark.parametrize("said", [{"convrot": True, "convrot_groupsize": 256}, {"convrot": 1}])
def test_rotated_int8_is_refused_by_name(tmp_path, said):
    stored = checkpoints.read(GOLDEN / "int8_tensorwise.safetensors")
    key = next(key for key in stored if key.endswith(".comfy_quant"))
    text = json.dumps({"format": "int8_tensorwise", **said}).encode()
    stored[key] = torch.tensor(list(text), dtype=torch.uint8)
    (found,) = inspect(checkpoints.write(tmp_path / "x.safetensors", stored)).findings
    assert found.kind == "unknown" and "ConvRot" in found.message
    assert found.tensor == key.replace(".comfy_quant", ".weight")


def test_int8_is_not_written(tmp_path, source):
    with pytest.raises(RecipeError, match="comfyui has no int8_channel"):
        quantize(source, tmp_path / "x", Request(scheme="int8_channel", container="comfyui"))


@pytest.mark.parametrize("format", ["convrot_w4a4", "x" * 500, None, 4])
def test_a_format_that_is_not_read_is_named(tmp_path, source, format):
    def edit(stored, metadata):
        metadata.pop("_quantization_metadata")
        stored.update(marked({"format": format}))

    (found,) = inspect(quantized(tmp_path, source, edit)).findings
    assert found.kind == "unknown" and len(found.message) < 100


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff", b"[" * 5000])
def test_a_mark_that_is_no_json_is_one_clear_error(tmp_path, source, text):
    path = quantized(tmp_path, source, lambda t, m: t.update(marked(text)))
    with pytest.raises(CheckpointError, match="JSON"):
        inspect(path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"layers": []}', '{"layers": {"a": 1}}'])
def test_metadata_that_lists_nothing_is_one_clear_error(tmp_path, source, text):
    path = quantized(tmp_path, source, lambda t, m: m.update({"_quantization_metadata": text}))
    with pytest.raises(CheckpointError, match="_quantization_metadata"):
        inspect(path)


def test_packed_weights_without_marks_are_not_guessed(tmp_path, source):
    def edit(stored, metadata):
        metadata.pop("_quantization_metadata")
        for name in [n for n in stored if n.endswith(".comfy_quant")]:
            del stored[name]

    path = quantized(tmp_path, source, edit)
    assert not api.verify(path, device="cpu").passed
    with pytest.raises(CheckpointError, match="nothing says of which kind"):
        dequantize(path, tmp_path / "x.safetensors", device="cpu")


def test_families_are_known_by_tensors_that_only_they_have():
    for family, marks in FAMILIES.items():
        for prefix in PREFIXES:
            names = {prefix + mark for mark in marks} | {"other.weight"}
            assert family_of(names) == family
        assert family_of(list(marks)[1:]) == ""
    assert family_of(["model.layers.0.self_attn.q_proj.weight"]) == ""
