"""ComfyUI's files where the last block of columns is incomplete, and where nobody says which of the
two codes of a byte comes first."""

import json
from pathlib import Path

import pytest
import torch

from lowbitcli import api, tables_inspection
from lowbitcli.api import Request, dequantize, quantize
from lowbitcli.errors import UnsupportedError, UsageError
from tests import checkpoints
from tests.checkpoints import metadata_of, weight

GOLDEN = Path(__file__).parents[1] / "golden" / "comfyui"
P = "model.diffusion_model.double_blocks.0."
WIDE, ODD = P + "img_attn.proj", P + "img_mlp.0"
RAGGED = {WIDE + ".weight": weight(37, 72), ODD + ".weight": weight(130, 96)}


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_columns_are_padded_where_that_is_asked_for_and_cropped_again(tmp_path, name):
    source = checkpoints.write(tmp_path / "in.safetensors", RAGGED)
    request = Request(scheme=name, container="comfyui")
    kept = quantize(source, tmp_path / "kept.safetensors", request, device="cpu")
    assert [w.name for w in kept.plan.quantized] == [ODD + ".weight"]
    request = Request(scheme=name, container="comfyui", pad=True)
    done = quantize(source, tmp_path / "q.safetensors", request, device="cpu")
    assert len(done.plan.quantized) == 2
    stored = checkpoints.read(done.output)
    said = json.loads(bytes(stored[WIDE + ".comfy_quant"].tolist()))
    assert said["orig_shape"] == [37, 72]
    golden = checkpoints.read(GOLDEN / f"{name}.safetensors")
    theirs = golden["model.diffusion_model.blocks.1.attn.qkv.weight"]
    assert stored[WIDE + ".weight"].shape == theirs.shape
    assert api.verify(done.output, against=source, device="cpu").problems == ()
    back = dequantize(done.output, tmp_path / "d.safetensors", dtype="fp32", device="cpu")
    found = checkpoints.read(back.output)
    assert {k: v.shape for k, v in found.items()} == {k: v.shape for k, v in RAGGED.items()}
    wide = torch.zeros(37, 96).bfloat16()
    wide[:, :72] = RAGGED[WIDE + ".weight"]
    whole = checkpoints.write(tmp_path / "wide.safetensors", {WIDE + ".weight": wide})
    request = Request(scheme=name, container="lowbit")
    other = quantize(whole, tmp_path / "w.safetensors", request, device="cpu")
    values = checkpoints.read(
        dequantize(other.output, tmp_path / "v.safetensors", dtype="fp32").output
    )
    assert torch.equal(found[WIDE + ".weight"], values[WIDE + ".weight"][:, :72])
    told = api.verify(back.output, against=done.output, device="cpu").problems
    assert {problem.severity for problem in told} <= {"warn"}


def test_padded_columns_stay_in_this_container_and_go_nowhere_else(tmp_path):
    source = checkpoints.write(tmp_path / "in.safetensors", RAGGED)
    request = Request(scheme="nvfp4", container="comfyui", pad=True)
    done = quantize(source, tmp_path / "q.safetensors", request, device="cpu")
    again = quantize(done.output, tmp_path / "r.safetensors", request, device="cpu")
    a, b = checkpoints.read(done.output), checkpoints.read(again.output)
    assert a.keys() == b.keys() and all(checkpoints.same(a[k], b[k]) for k in a)
    with pytest.raises(UnsupportedError, match="no place for"):
        quantize(done.output, tmp_path / "x", Request(scheme="nvfp4", container="lowbit"))


@pytest.mark.parametrize("container", ["lowbit", "compressed-tensors"])
def test_containers_whose_readers_know_no_padding_are_not_padded(tmp_path, container):
    tensors = {"a.weight": weight(37, 72), "b.weight": weight(32, 64)}
    source = checkpoints.single(tmp_path / "in", tensors)
    request = Request(scheme="nvfp4", container=container, pad=True)
    done = quantize(source, tmp_path / "q", request, device="cpu")
    assert [w.name for w in done.plan.quantized] == ["b.weight"]


def swapped(path, golden, out, config=None):
    """Write a golden file with the two codes of each byte exchanged."""
    tensors = checkpoints.read(golden)
    for name, tensor in tensors.items():
        if tensor.dtype == torch.uint8 and name.endswith(".weight"):
            tensors[name] = (tensor >> 4) | (tensor << 4)
    metadata = metadata_of(golden / "model.safetensors" if config else golden)
    if config:
        return checkpoints.single(path / out, tensors, config, metadata)
    return checkpoints.write(path / out, tensors, metadata)


@pytest.mark.parametrize("kind", ["comfyui", "modelopt"])
def test_a_user_can_say_where_the_even_column_is(tmp_path, kind):
    """BFL's and NVIDIA's files of one family differ in nothing else."""
    golden, config, other = GOLDEN / "nvfp4.safetensors", None, "low"
    if kind == "modelopt":
        golden, other = GOLDEN.parent / "modelopt" / "w4a16_nvfp4", "high"
        config = checkpoints.config_of(golden)
    source = swapped(tmp_path, golden, "in" if config else "in.safetensors", config)
    name = "out" if config else "out.safetensors"
    wrong = dequantize(source, tmp_path / f"wrong-{name}", device="cpu")
    done = dequantize(source, tmp_path / name, nibbles=other, device="cpu")
    right = dequantize(golden, tmp_path / f"right-{name}", device="cpu")
    a, b, c = (checkpoints.read(one.output) for one in (done, right, wrong))
    assert a.keys() == b.keys() and all(checkpoints.same(a[k], b[k]) for k in a)
    assert not all(checkpoints.same(a[k], c[k]) for k in a)
    told = api.verify(done.output, against=source, device="cpu").problems
    assert {problem.severity for problem in told} <= {"warn"}, "the manifest says how it was read"
    request = Request(scheme="nvfp4", container=kind, nibbles=other)
    again = quantize(source, tmp_path / f"again-{name}", request, device="cpu")
    found, wanted = checkpoints.read(again.output), checkpoints.read(golden)
    data = [k for k, v in wanted.items() if v.dtype == torch.uint8 and k.endswith(".weight")]
    assert data and all(checkpoints.same(found[k], wanted[k]) for k in data)
    assert again.errors == {} and api.verify(again.output, against=source, device="cpu").passed


@pytest.mark.parametrize("kind", ["comfyui", "modelopt"])
def test_inspect_says_where_it_finds_the_even_column(kind):
    golden, own, other = GOLDEN / "nvfp4.safetensors", "high", "low"
    if kind == "modelopt":
        golden, own, other = GOLDEN.parent / "modelopt" / "w4a16_nvfp4", "low", "high"
    for asked, wanted in (("", own), (own, own), (other, other)):
        found = api.inspect(golden, nibbles=asked)
        said = tables_inspection.inspection_document(found)
        seen = {one["nibbles"] for one in said["tensors"] if one["scheme"] == "nvfp4"}
        assert seen == {wanted} and found.findings == () and said["notes"] == []
        assert not any("nibbles" in one for one in said["tensors"] if one["scheme"] is None)


def test_inspect_says_where_a_nibble_changes_nothing(tmp_path):
    (note,) = api.inspect(GOLDEN / "mxfp8.safetensors", nibbles="low").notes
    assert note == "--nibbles low changes nothing: there is no NVFP4"
    golden = GOLDEN.parent / "compressed-tensors"
    (note,) = api.inspect(golden / "nvfp4a16", nibbles="high").notes
    assert note == "--nibbles high changes nothing: its NVFP4 is always read in one way"
    with pytest.raises(UsageError, match="no nibble"):
        api.inspect(GOLDEN / "nvfp4.safetensors", nibbles="middle")


def test_runs_say_where_a_nibble_changes_nothing(tmp_path):
    source = checkpoints.write(tmp_path / "in.safetensors", RAGGED)
    told = "--nibbles high changes nothing: there is no NVFP4"
    request = Request(scheme="mxfp8", nibbles="high")
    assert told in quantize(source, tmp_path / "a.safetensors", request, device="cpu").plan.notes
    back = dequantize(source, tmp_path / "b.safetensors", nibbles="high", device="cpu")
    assert told in back.plan.notes


def test_another_nibble_is_a_usage_error(tmp_path):
    source = checkpoints.write(tmp_path / "in.safetensors", RAGGED)
    with pytest.raises(UsageError, match="no nibble"):
        dequantize(source, tmp_path / "x", nibbles="middle")
