"""What a run does to numbers: quantize, dequantize, requantize and fake are one arithmetic."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch

from lowbitcli.api import Request, dequantize, inspect, quantize
from lowbitcli.errors import (
    DeviceError,
    NonFiniteError,
    UnsupportedError,
    UsageError,
)
from tests import checkpoints
from tests.checkpoints import LAYER, sharded, single, weight

SCHEMES = ("fp8", "fp8-dynamic", "mxfp8", "nvfp4")
CONTAINERS = ("lowbit", "compressed-tensors")
ATTENTION = [f"{LAYER}self_attn.{x}_proj.weight" for x in "qkv"]
DOWN = LAYER + "mlp.down_proj.weight"
NORM = "model.norm.weight"
NAMES = {
    "fp8": "fp8_tensor",
    "fp8-dynamic": "fp8_channel",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
}


def model():
    return {
        **{name: weight(64, 64, 10**n, seed=n) for n, name in enumerate(ATTENTION)},
        DOWN: weight(32, 96).float(),
        LAYER + "mlp.up_proj.weight": weight(96, 32, 0.02).half(),
        NORM: weight(1, 64)[0],
    }


@pytest.fixture
def source(tmp_path):
    tensors = model()
    first = {name: tensors.pop(name) for name in ATTENTION[:2]}
    return sharded(tmp_path / "source", first, tensors)


def equal(one, other):
    found, wanted = checkpoints.read(one), checkpoints.read(other)
    assert found.keys() == wanted.keys()
    different = [name for name in wanted if not checkpoints.same(found[name], wanted[name])]
    assert different == []


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_shape_dtype_and_size_of_the_error(tmp_path, source, scheme, container):
    done = quantize(
        source, tmp_path / "out", Request(scheme=scheme, container=container), device="cpu"
    )
    back = dequantize(done.output, tmp_path / "back", dtype="fp32", device="cpu")
    restored, tensors = checkpoints.read(back.output), model()
    assert restored.keys() == tensors.keys()
    assert checkpoints.same(restored["model.norm.weight"], tensors["model.norm.weight"])
    least = 20 if scheme == "nvfp4" else 30
    assert done.errors.keys() == tensors.keys() - {"model.norm.weight"}
    for name, sums in done.errors.items():
        lost = (restored[name] - tensors[name].float()).double()
        noise = float(lost.square().sum() / tensors[name].double().square().sum())
        assert sums.sqnr_db == pytest.approx(-10 * math.log10(noise), abs=1e-3)
        if name not in ATTENTION[:2]:  # of smaller magnitude than the partner that decides
            assert sums.sqnr_db > least, name
    assert done.plan.counts.keys() == {NAMES[scheme], "kept"}
    assert done.output == tmp_path / "out"


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_requantizing_equals_dequantizing_and_quantizing(tmp_path, source, scheme, container):
    for first in SCHEMES:
        if first == scheme:
            continue
        start = quantize(
            source, tmp_path / first, Request(scheme=first, container=container), device="cpu"
        )
        request = Request(scheme=scheme, container=container)
        direct = quantize(start.output, tmp_path / f"{first}-direct", request, device="cpu")
        floats = dequantize(start.output, tmp_path / f"{first}-32", dtype="fp32", device="cpu")
        twice = quantize(floats.output, tmp_path / f"{first}-twice", request, device="cpu")
        equal(direct.output, twice.output)
        assert direct.errors.keys() == twice.errors.keys() == model().keys() - {"model.norm.weight"}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_fake_equals_quantize_and_dequantize_in_the_dtype_of_the_source(tmp_path, source, scheme):
    fake = quantize(source, tmp_path / "fake", Request(scheme=scheme, fake=True), device="cpu")
    real = quantize(
        source, tmp_path / "real", Request(scheme=scheme, container="lowbit"), device="cpu"
    )
    restored = {}
    for dtype in ("bf16", "fp16", "fp32"):
        back = dequantize(real.output, tmp_path / dtype, dtype=dtype, device="cpu")
        restored[dtype] = checkpoints.read(back.output)
    found = checkpoints.read(fake.output)
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    for name, tensor in model().items():
        assert found[name].dtype == tensor.dtype
        assert checkpoints.same(found[name], restored[names[tensor.dtype]][name]), name
    assert fake.plan.container == "plain"
    assert checkpoints.config_of(fake.output) == checkpoints.config_of(source)
    assert inspect(fake.output).container == "plain"
    assert fake.errors.keys() == real.errors.keys()
    assert not checkpoints.same(found[DOWN], model()[DOWN]), "something was rounded"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_fake_of_what_is_quantized_so_already_dequantizes_it(tmp_path, source, scheme):
    real = quantize(source, tmp_path / "real", Request(scheme=scheme), device="cpu")
    fake = quantize(real.output, tmp_path / "fake", Request(scheme=scheme, fake=True), device="cpu")
    back = dequantize(real.output, tmp_path / "back", device="cpu")
    equal(fake.output, back.output)
    assert "quantization_config" not in checkpoints.config_of(fake.output)


def test_a_recipe_that_keeps_leaves_the_codes_alone(tmp_path, source):
    """What is quantized already stays so; the rest of the model changes."""
    start = quantize(source, tmp_path / "start", Request(container="lowbit"), device="cpu")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text('keep: ["*self_attn*"]\nrules: [{match: "*", scheme: fp8}]\n')
    request = Request(recipe=recipe, container="lowbit")
    done = quantize(start.output, tmp_path / "out", request, device="cpu")
    before, after = checkpoints.read(start.output), checkpoints.read(done.output)
    for name in before:
        if "self_attn" in name:
            assert checkpoints.same(before[name], after[name]), name
    assert after[DOWN].dtype == torch.float8_e4m3fn
    assert {w.name: w.kept for w in done.plan.weights if w.kept} == {
        **dict.fromkeys(ATTENTION, "recipe keep '*self_attn*'; it stays nvfp4"),
        "model.norm.weight": "norm",
    }


@pytest.mark.parametrize("scheme", SCHEMES)
def test_values_beyond_fp16_are_refused_and_not_made_inf(tmp_path, scheme):
    w = weight(64, 64)
    w[0, 0] = 1e6
    source = single(tmp_path / "source", {DOWN: w})
    done = quantize(source, tmp_path / "out", Request(scheme=scheme), device="cpu")
    with pytest.raises(UnsupportedError) as caught:
        dequantize(done.output, tmp_path / "half", dtype="fp16", device="cpu")
    assert DOWN in caught.value.message
    assert "F16" in caught.value.message
    assert "bf16 or fp32" in caught.value.hint
    assert not (tmp_path / "half").exists()
    back = dequantize(done.output, tmp_path / "back", device="cpu")
    assert bool(torch.isfinite(checkpoints.read(back.output)[DOWN]).all())


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("run", (dequantize, quantize))
def test_a_scale_that_is_nan_is_found(tmp_path, container, run):
    """Both FP8 formats have a NaN that a broken file can hold as a scale."""
    source = single(tmp_path / "source", {DOWN: weight(32, 96)})
    done = quantize(source, tmp_path / "out", Request(container=container), device="cpu")
    file = done.output / "model.safetensors"
    tensors, metadata = checkpoints.read(file), checkpoints.metadata_of(file)
    tensors[DOWN + "_scale"].view(torch.uint8)[0, 0] = 0x7F
    checkpoints.write(file, tensors, metadata)
    (done.output / "lowbit.json").unlink()  # or its hashes would tell first
    options = {} if run is dequantize else {"request": Request(scheme="fp8", container=container)}
    with pytest.raises(NonFiniteError) as caught:
        run(done.output, tmp_path / "back", device="cpu", **options)
    assert DOWN in caught.value.message
    assert not (tmp_path / "back").exists()
    if run is dequantize:
        return
    request = Request(scheme="fp8", container=container, nonfinite="keep")
    kept = quantize(done.output, tmp_path / "kept", request, device="cpu")
    assert kept.plan.weights[0].kept == "it holds NaN or Inf; it stays nvfp4"
    assert list(kept.non_finite) == [DOWN]
    found = checkpoints.read(kept.output)
    assert all(checkpoints.same(found[name], tensors[name]) for name in tensors)


ODD = {
    "scalar": torch.tensor(1.5),
    "scalar.weight": torch.tensor(2.5, dtype=torch.bfloat16),
    "empty": torch.zeros(0, dtype=torch.int64),
    "none.weight": torch.zeros(0, 64, dtype=torch.bfloat16),
    "narrow.weight": torch.zeros(64, 0, dtype=torch.float16),
    "flag": torch.tensor([True, False]),
    "e8m0": torch.tensor([0, 127, 255], dtype=torch.uint8).view(torch.float8_e8m0fnu),
    "double.weight": torch.eye(64, dtype=torch.float64),
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", ("directory", "file"))
def test_empty_and_scalar_tensors_are_copied(tmp_path, scheme, kind):
    source = single(tmp_path / "source", {**ODD, DOWN: weight(32, 96)})
    output, back = tmp_path / "out", tmp_path / "back"
    if kind == "file":
        source, output, back = (
            source / "model.safetensors",
            tmp_path / "out.safetensors",
            tmp_path / "back.safetensors",
        )
    done = quantize(source, output, Request(scheme=scheme), device="cpu")
    assert [weight.name for weight in done.plan.quantized] == [DOWN]
    dequantize(done.output, back, device="cpu")
    for path in (output, back):
        found = checkpoints.read(path)
        for name, tensor in ODD.items():
            assert checkpoints.same(found[name], tensor), name


def test_a_checkpoint_without_tensors(tmp_path):
    source = checkpoints.write(tmp_path / "nothing.safetensors", {}, {"a": "b"})
    done = quantize(source, tmp_path / "out.safetensors", device="cpu")
    assert checkpoints.read(done.output) == {}
    assert checkpoints.metadata_of(done.output)["a"] == "b"


RUN = """
import json, sys
from lowbitcli.api import Request, dequantize, quantize
source, out = sys.argv[1:]
for scheme in ("fp8", "fp8-dynamic", "mxfp8", "nvfp4"):
    done = quantize(source, f"{out}/{scheme}", Request(scheme=scheme), device="cpu")
    dequantize(done.output, f"{out}/{scheme}-back", device="cpu")
"""


def test_bytes_do_not_depend_on_the_process(tmp_path, source):
    """Sets and dictionaries are in another order under another PYTHONHASHSEED."""
    for seed in ("1", "2"):
        (tmp_path / seed).mkdir()
        done = subprocess.run(
            [sys.executable, "-c", RUN, str(source), str(tmp_path / seed)],
            env={**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": seed},
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr) == (0, "")
    first = checkpoints.hashes(tmp_path / "1")
    assert len(first) == 40
    assert checkpoints.hashes(tmp_path / "2") == first


def test_the_place_of_source_and_output_is_not_in_the_bytes(tmp_path, source):
    elsewhere = tmp_path / "a" / "b"
    elsewhere.mkdir(parents=True)
    moved = elsewhere / "other-name"
    one = quantize(source, tmp_path / "one", device="cpu")
    source.rename(moved)
    two = quantize(moved, elsewhere / "two", device="cpu")
    assert checkpoints.hashes(one.output) == checkpoints.hashes(two.output)


@pytest.mark.parametrize("run", (quantize, dequantize))
def test_devices(tmp_path, source, run, monkeypatch):
    for wrong in ("tpu", "cuda:", "cuda:x", "cuda:-1", "CPU", "", "cpu:0"):
        with pytest.raises(UsageError, match="no device is called") as caught:
            run(source, tmp_path / "out", device=wrong)
        assert caught.value.exit_code == 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for absent in ("cuda", "cuda:0"):
        with pytest.raises(DeviceError, match="no CUDA device") as caught:
            run(source, tmp_path / "out", device=absent)
        assert caught.value.exit_code == 7
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(DeviceError, match=r"no cuda:7: this machine has 1"):
        run(source, tmp_path / "out", device="cuda:7")
    assert not (tmp_path / "out").exists()


def test_too_little_memory_on_the_device_is_no_bug(tmp_path, source, monkeypatch):
    def refuse(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    for module in ("compute", "alike"):
        monkeypatch.setattr(f"lowbitcli.pipeline.{module}.measure", refuse)
    with pytest.raises(DeviceError, match="too little memory") as caught:
        quantize(source, tmp_path / "out", device="cpu")
    assert "--device cpu" in caught.value.hint
    assert not (tmp_path / "out").exists()


def test_progress_counts_the_bytes_of_the_source(tmp_path, source):
    seen = []
    done = quantize(
        source, tmp_path / "out", device="cpu", progress=lambda *said: seen.append(said)
    )
    total = sum(tensor.numel() * tensor.element_size() for tensor in model().values())
    assert done.bytes_in == total
    assert {said[1] for said in seen} == {total}
    assert [said[0] for said in seen] == sorted(said[0] for said in seen)
    assert (seen[0][0], seen[-1][0]) == (0, total)


@pytest.mark.parametrize("container", CONTAINERS)
def test_the_manifest_of_a_directory_names_every_tensor(tmp_path, source, container):
    done = quantize(source, tmp_path / "out", Request(container=container), device="cpu")
    manifest = json.loads((done.output / "lowbit.json").read_text())
    text = json.dumps(manifest)
    for name in checkpoints.read(done.output):
        assert json.dumps(name) in text
    assert done.plan.digest in text
    assert str(tmp_path) not in text
