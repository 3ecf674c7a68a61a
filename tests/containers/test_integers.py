"""Packed integers of compressed-tensors: what is written is what its own compressor makes, and what
is not codes times a scale is refused by name."""

import json
from pathlib import Path

import pytest
import torch

from lowbitcli.api import Request, dequantize, inspect, quantize, verify
from lowbitcli.errors import CheckpointError, UnsupportedError
from tests import checkpoints
from tests.checkpoints import LAYER, header_of, single, weight

GOLDEN = Path(__file__).parents[1] / "golden" / "compressed-tensors"
DOWN, K = LAYER + "mlp.down_proj", LAYER + "self_attn.k_proj"


DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def made(tmp_path, dtype, model=None):
    w = (weight(40, 256).float() * 1.0009).to(DTYPES[dtype])
    tensors = {DOWN + ".weight": w, "model.norm.weight": weight(1, 64)[0]}
    config = {**checkpoints.CONFIG, "dtype": NAMES[model or dtype]}
    source = single(tmp_path / "source", tensors, config=config)
    return quantize(source, tmp_path / "q", Request(scheme="int4_g128"), device="cpu")


@pytest.fixture
def done(tmp_path):
    return made(tmp_path, "BF16")


def test_names_dtypes_and_shapes(tmp_path, done):
    assert done.plan.container == "compressed-tensors"
    header = header_of(done.output / "model.safetensors")
    found = {
        name.removeprefix(DOWN): (entry["dtype"], entry["shape"])
        for name, entry in header.items()
        if name.startswith(DOWN)
    }
    assert found == {
        ".weight_packed": ("I32", [40, 32]),
        ".weight_scale": ("BF16", [40, 2]),
        ".weight_shape": ("I64", [2]),
    }
    stored = checkpoints.read(done.output)
    assert stored[DOWN + ".weight_shape"].tolist() == [40, 256]
    said = checkpoints.quantization_of(done.output)
    assert said["format"] == "pack-quantized"
    group = said["config_groups"]["group_0"]
    assert group["weights"] == {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "dynamic": False,
        "strategy": "group",
        "group_size": 128,
    }
    assert group["input_activations"] is None
    assert not any("SGLang" in note for note in done.plan.notes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_are_in_the_dtype_of_the_weight_and_codes_made_for_them(tmp_path, dtype):
    """Readers keep scales in the model's dtype: what they round, codes would not be made for."""
    done = made(tmp_path, dtype)
    stored = checkpoints.read(done.output)
    scale = stored[DOWN + ".weight_scale"]
    w = checkpoints.read(tmp_path / "source")[DOWN + ".weight"].float().unflatten(1, (2, 128))
    exact = w.abs().amax(-1) / 7
    assert scale.dtype == DTYPES[dtype] and torch.equal(scale, exact.to(scale.dtype))
    wanted = (w / scale.float().unsqueeze(-1)).round().clamp(-7, 7).flatten(1)
    assert torch.equal(codes_of(stored), wanted)
    for_exact = (w / exact.unsqueeze(-1)).round().flatten(1)
    assert dtype == "F32" or not torch.equal(wanted, for_exact)
    assert verify(done.output, against=tmp_path / "source", device="cpu").passed


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_a_fake_run_and_one_by_way_of_fp8_have_the_same_scales(tmp_path, dtype):
    done, source = made(tmp_path, dtype), tmp_path / "source"
    fake = quantize(source, tmp_path / "f", Request(scheme="int4_g128", fake=True), device="cpu")
    back = dequantize(done.output, tmp_path / "d", dtype=NAMES[dtype], device="cpu")
    a, b = checkpoints.read(fake.output), checkpoints.read(back.output)
    assert checkpoints.same(a[DOWN + ".weight"], b[DOWN + ".weight"])
    fp8 = quantize(source, tmp_path / "8", Request(scheme="fp8_channel"), device="cpu")
    again = quantize(fp8.output, tmp_path / "4", Request(scheme="int4_g128"), device="cpu")
    assert checkpoints.read(again.output)[DOWN + ".weight_scale"].dtype == DTYPES[dtype]
    assert verify(again.output, against=fp8.output, device="cpu").passed


def test_only_f32_scales_in_a_model_of_another_dtype_are_told_of(tmp_path):
    done = made(tmp_path, "F32", model="BF16")
    assert any("SGLang 0.5 refuses" in note for note in done.plan.notes)
    found = verify(done.output, consumers=("sglang", "vllm"), device="cpu")
    told = [one.message for one in found.problems if one.kind == "consumer"]
    assert len(told) == 2 and all(
        "1 scales of int4_g128 are F32, and the model is BF16" in one for one in told
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_consumer_is_said_to_round_scales_of_the_model_s_dtype(tmp_path, dtype):
    done = made(tmp_path, dtype)
    assert not any("int4_g128 are F32" in note for note in done.plan.notes)
    found = verify(done.output, consumers=("sglang", "vllm"), device="cpu")
    assert [one.message for one in found.problems if one.kind == "consumer"] == []


def codes_of(stored):
    words = stored[DOWN + ".weight_packed"].to(torch.int64) & 0xFFFFFFFF
    return torch.stack([(words >> (4 * n)) & 15 for n in range(8)], -1).flatten(1) - 8


def test_the_first_code_is_in_the_lowest_bits_plus_8(tmp_path, done):
    codes = codes_of(checkpoints.read(done.output))
    scale = checkpoints.read(done.output)[DOWN + ".weight_scale"].float().repeat_interleave(128, 1)
    back = dequantize(done.output, tmp_path / "d", dtype="fp32", device="cpu")
    assert torch.equal(checkpoints.read(back.output)[DOWN + ".weight"], codes * scale)
    assert set(codes.unique().tolist()) <= set(range(-7, 8))
    assert verify(done.output, against=tmp_path / "source", device="cpu").passed


@pytest.mark.parametrize("dtype", DTYPES)
def test_compressed_tensors_decompresses_it_to_our_numbers(tmp_path, dtype):
    done = made(tmp_path, dtype)
    kinds = pytest.importorskip("compressed_tensors.quantization")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    said = checkpoints.quantization_of(done.output)["config_groups"]["group_0"]
    scheme = kinds.QuantizationScheme(**said)
    compressor = compressors.BaseCompressor.get_value_from_registry("pack-quantized")
    stored = checkpoints.read(done.output)
    parts = {n.removeprefix(DOWN + "."): v for n, v in stored.items() if n.startswith(DOWN)}
    theirs = compressor.decompress(parts, scheme)["weight"]
    back = dequantize(done.output, tmp_path / "d", dtype=NAMES[dtype], device="cpu")
    assert checkpoints.same(theirs, checkpoints.read(back.output)[DOWN + ".weight"])


@pytest.mark.parametrize("dtype", [*DTYPES, "F32 in BF16"])
def test_to_lowbit_and_back_is_byte_identical(tmp_path, dtype):
    """Also where another writer had scales in F32 of a model that is not."""
    done = made(tmp_path, dtype[:4].strip(), model=dtype[-4:].strip())
    request = Request(scheme="int4_g128", container="lowbit")
    two = quantize(done.output, tmp_path / "two", request, device="cpu")
    request = Request(scheme="int4_g128", container="compressed-tensors")
    three = quantize(two.output, tmp_path / "three", request, device="cpu")
    a, c = checkpoints.read(done.output), checkpoints.read(three.output)
    assert a.keys() == c.keys() and all(checkpoints.same(a[name], c[name]) for name in a)
    assert two.errors == three.errors == {}


@pytest.mark.parametrize("name", ["pack-int4", "pack-int8", "int8-g64"])
def test_the_least_code_is_a_number_that_lowbit_does_not_write(name):
    """Symmetric integers of llm-compressor go from -8 to 7, and from -128 to 127."""
    found = verify(GOLDEN / name, device="cpu")
    told = [problem for problem in found.problems if problem.kind == "code"]
    assert found.passed and told and all("which lowbit never writes" in one.message for one in told)


def test_groups_that_no_container_writes_are_requantized_and_not_kept(tmp_path):
    source = GOLDEN / "pack-int4-g32"
    with pytest.raises(UnsupportedError, match="stays int4_g32"):
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text('rules: [{match: "*", keep: true}]\n')
        quantize(source, tmp_path / "x", Request(recipe=recipe), device="cpu")
    done = quantize(source, tmp_path / "q", Request(scheme="mxfp8"), device="cpu")
    assert {w.scheme.name for w in inspect(done.output).weights if w.scheme} == {"mxfp8"}
    assert not [name for name in checkpoints.read(done.output) if name.endswith("weight_shape")]


def edited(tmp_path, edit, weights=None, golden="pack-int4-channel"):
    tensors = checkpoints.read(GOLDEN / golden)
    config = checkpoints.config_of(GOLDEN / golden)
    edit(tensors)
    config["quantization_config"]["config_groups"]["group_0"]["weights"].update(weights or {})
    return single(tmp_path / "edited", tensors, config)


def shape(*numbers, dtype=torch.int64):
    return lambda t: t.update({K + ".weight_shape": torch.tensor(numbers, dtype=dtype)})


FINDINGS = {
    "no shape": (lambda t: t.pop(K + ".weight_shape"), "missing"),
    "no scale": (lambda t: t.pop(K + ".weight_scale"), "missing"),
    "no data": (lambda t: (t.pop(K + ".weight_packed"), t.pop(K + ".weight_scale")), "orphan"),
    "other rows": (shape(32, 72), "mismatch"),
    "other columns": (shape(33, 80), "mismatch"),
    "negative": (shape(33, -72), "mismatch"),
    "three dimensions": (shape(1, 33, 72), "mismatch"),
    "a shape of F32": (shape(33, 72, dtype=torch.float32), "mismatch"),
    "columns that fill no word": (shape(33, 70), "unknown"),
    "presharded": (
        lambda t: t.update({K + ".weight_scale": t[K + ".weight_scale"][:16].clone()}),
        "mismatch",
    ),
    "zero points": (
        lambda t: t.update({K + ".weight_zero_point": torch.zeros(5, 1, dtype=torch.int32)}),
        "unknown",
    ),
    "an order": (
        lambda t: t.update({K + ".weight_g_idx": torch.zeros(72, dtype=torch.int32)}),
        "unknown",
    ),
}


@pytest.mark.parametrize("name", FINDINGS)
def test_what_disagrees_is_found_before_any_work(tmp_path, name):
    edit, kind = FINDINGS[name]
    source = edited(tmp_path, edit)
    assert {one.kind for one in inspect(source).findings} == {kind}
    with pytest.raises(CheckpointError, match="disagrees with itself"):
        dequantize(source, tmp_path / "x", device="cpu")


def test_a_shape_of_i32_says_the_same(tmp_path):
    assert inspect(edited(tmp_path, shape(33, 72, dtype=torch.int32))).findings == ()


REFUSED = {
    "asymmetric": ({"symmetric": False}, "asymmetric"),
    "reordered": ({"actorder": "group"}, "activation order group"),
    "3 bits": ({"num_bits": 3}, "3 bits"),
    "a group of 12": ({"strategy": "group", "group_size": 12}, "group size 12"),
    "a group of none": ({"strategy": "group", "group_size": None}, "group size None"),
    "a tensor": ({"strategy": "tensor"}, "strategy tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_codes_times_a_scale_is_refused_by_name(tmp_path, name):
    weights, says = REFUSED[name]
    with pytest.raises(UnsupportedError) as caught:
        inspect(edited(tmp_path, lambda tensors: None, weights))
    assert says in caught.value.message


def test_a_group_that_does_not_divide_the_columns_is_a_mismatch(tmp_path):
    source = edited(tmp_path, lambda t: None, {"strategy": "group", "group_size": 128})
    assert {one.kind for one in inspect(source).findings} == {"mismatch"}
    assert json.dumps([one.message for one in inspect(source).findings])
