"""DeepSeek-V4's names: FP8 in blocks and FP4 experts, whose scales are powers of two."""

import pytest
import torch

from lowbitcli.api import Request, dequantize, inspect, quantize
from lowbitcli.errors import CheckpointError, RecipeError, UnsupportedError
from tests import checkpoints
from tests.checkpoints import sharded, single, weight

A, E = "layers.0.attn.wq_a", "layers.0.ffn.experts.3.w1"
VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def powers(rows, cols, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(115, 130, (rows, cols), generator=generator).to(torch.uint8)


def fp8(rows, cols):
    return weight(rows, cols).float().clamp(-448, 448).to(torch.float8_e4m3fn)


def e8m0(codes):
    return codes.view(torch.float8_e8m0fnu)


def tensors(block=128):
    """A linear of 200 x 288 in blocks, an expert of 40 x 64 in FP4, a norm."""
    generator = torch.Generator().manual_seed(7)
    packed = torch.randint(-128, 128, (40, 32), generator=generator).to(torch.int8)
    return {
        f"{A}.weight": fp8(200, 288),
        f"{A}.scale": e8m0(powers(-(-200 // block), -(-288 // block))),
        f"{E}.weight": packed,
        f"{E}.scale": e8m0(powers(40, 2, seed=1)),
        "layers.0.attn_norm.weight": weight(1, 64)[0],
        "layers.0.hc_ffn.scale": torch.ones(3),
    }


def config(block=128, **more):
    said = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0"}
    said |= {"activation_scheme": "dynamic", "weight_block_size": [block, block]}
    found = {"model_type": "deepseek_v4", "torch_dtype": "bfloat16", "expert_dtype": "fp4"}
    return {**found, "quantization_config": said, **more}


def expected(held, block=128):
    scale = torch.exp2(held[f"{A}.scale"].view(torch.uint8).float() - 127)
    scale = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)[:200, :288]
    packed = held[f"{E}.weight"].int() & 255
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1)
    step = torch.exp2(held[f"{E}.scale"].view(torch.uint8).float() - 127)
    return {
        f"{A}.weight": held[f"{A}.weight"].float() * scale,
        f"{E}.weight": VALUES[codes] * step.repeat_interleave(32, 1),
    }


@pytest.mark.parametrize(("block", "scheme"), [(128, "fp8_block128"), (32, "mxfp8")])
def test_it_is_read_to_the_bit(tmp_path, block, scheme):
    held = tensors(block)
    source = single(tmp_path / "source", held, config(block))
    found = inspect(source)
    assert (found.container, found.findings) == ("deepseek-v4", ())
    schemes = {w.name: w.scheme.name for w in found.weights if w.scheme}
    assert schemes == {f"{A}.weight": scheme, f"{E}.weight": "mxfp4"}
    done = dequantize(source, tmp_path / "out", dtype="fp32", device="cpu")
    back = checkpoints.read(done.output)
    for name, value in expected(held, block).items():
        assert checkpoints.same(back[name], value), name
    assert torch.equal(back["layers.0.hc_ffn.scale"], torch.ones(3)), "no scale of a weight"
    assert not any(name.endswith(f"{A}.scale") for name in back)


def test_scales_in_fp32_and_in_another_shard(tmp_path):
    held = tensors()
    wide = held[f"{A}.scale"].view(torch.uint8).float().sub(127).exp2()
    one = {k: v for k, v in held.items() if k != f"{A}.scale"}
    source = sharded(tmp_path / "x", one, {f"{A}.scale": wide}, config=config())
    assert inspect(source).findings == ()
    done = dequantize(source, tmp_path / "out", dtype="fp32", device="cpu")
    back = checkpoints.read(done.output)
    assert checkpoints.same(back[f"{A}.weight"], expected(held)[f"{A}.weight"])


@pytest.mark.parametrize("block", [128, 32])
def test_codes_and_scales_go_into_other_containers_unchanged(tmp_path, block):
    held = tensors(block)
    source = single(tmp_path / "source", held, config(block))
    scheme = {128: "fp8_block128", 32: "mxfp8"}[block]
    recipe = tmp_path / "recipe.yaml"
    rules = (
        f"rules:\n  - match: '*experts*'\n    scheme: mxfp4\n  - match: '*'\n    scheme: {scheme}\n"
    )
    recipe.write_text(rules)
    request = Request(recipe=recipe, container="compressed-tensors")
    done = quantize(source, tmp_path / "q", request, device="cpu")
    assert done.errors == {}
    stored = checkpoints.read(done.output)
    assert torch.equal(stored[f"{E}.weight_packed"], held[f"{E}.weight"].view(torch.uint8))
    assert torch.equal(stored[f"{E}.weight_scale"], held[f"{E}.scale"].view(torch.uint8))
    assert checkpoints.same(stored[f"{A}.weight"], held[f"{A}.weight"])
    back = dequantize(done.output, tmp_path / "d", dtype="fp32", device="cpu")
    found = checkpoints.read(back.output)
    for name, value in expected(held, block).items():
        assert checkpoints.same(found[name], value), name


def edit(**changes):
    def apply(held):
        for name, value in changes.items():
            held[{"a": f"{A}.scale", "e": f"{E}.scale", "w": f"{E}.weight"}[name]] = value

    return apply


def alone(held):
    """An FP32 scale whose weight is not there, and no other scale."""
    wide = held.pop(f"{A}.scale").view(torch.uint8).float()
    held.pop(f"{A}.weight"), held.pop(f"{E}.weight"), held.pop(f"{E}.scale")
    held[f"{A}.scale"] = wide


FINDINGS = {
    "no weight, and its scale in fp32": (alone, {}, "orphan"),
    "a weight in bf16, and its scale in fp32": (
        edit(w=weight(40, 300), e=torch.ones(1, 3)),
        {},
        "mismatch",
    ),
    "no scale": (lambda held: held.pop(f"{A}.scale"), {}, "missing"),
    "no scale of an expert": (lambda held: held.pop(f"{E}.scale"), {}, "missing"),
    "no weight": (lambda held: held.pop(f"{A}.weight"), {}, "orphan"),
    "presharded": (edit(a=e8m0(powers(1, 3))), {}, "mismatch"),
    "an expert's blocks": (edit(e=e8m0(powers(40, 4))), {}, "mismatch"),
    "experts of another dtype": (edit(w=fp8(40, 64)), {}, "mismatch"),
    "a weight in bf16": (edit(w=weight(40, 64)), {}, "mismatch"),
    "said to be fp8": (lambda held: None, {"expert_dtype": "fp8"}, "mismatch"),
    "not converted": (lambda held: None, {"kept": [A]}, "mismatch"),
}


@pytest.mark.parametrize("name", FINDINGS)
def test_what_disagrees_is_found_before_any_work(tmp_path, name):
    change, more, kind = FINDINGS[name]
    held, said = tensors(), config()
    change(held)
    said["quantization_config"]["modules_to_not_convert"] = more.pop("kept", [])
    source = single(tmp_path / "x", held, {**said, **more})
    found = inspect(source)
    assert found.container == "deepseek-v4" and {one.kind for one in found.findings} == {kind}
    with pytest.raises(CheckpointError, match="disagrees with itself"):
        dequantize(source, tmp_path / "out", device="cpu")


def test_what_is_called_scale_and_is_none_is_kept(tmp_path):
    held = tensors()
    others = {
        "layers.0.norm2.scale": torch.ones(64),
        "layers.0.mix.weight": weight(64, 64),
        "layers.0.mix.scale": torch.full((4, 64), 3.0),
    }
    source = single(tmp_path / "x", held | others, config())
    assert inspect(source).findings == ()
    back = dequantize(source, tmp_path / "out", device="cpu")
    found = checkpoints.read(back.output)
    assert all(checkpoints.same(found[name], value) for name, value in others.items())


@pytest.mark.parametrize("size", [[64, 64], [128], 128, [1, 32], {}, [[32], [32]]])
def test_blocks_of_another_size_are_refused(tmp_path, size):
    said = config()
    said["quantization_config"]["weight_block_size"] = size
    with pytest.raises(UnsupportedError, match="weight_block_size"):
        inspect(single(tmp_path / "x", tensors(), said))


@pytest.mark.parametrize(("key", "value"), [("fmt", "e4m2"), ("fmt", 3), ("expert_dtype", "fp5")])
def test_codes_that_are_not_known_are_refused(tmp_path, key, value):
    said = config()
    (said if key in said else said["quantization_config"])[key] = value
    with pytest.raises(UnsupportedError, match=key):
        inspect(single(tmp_path / "x", tensors(), said))


def test_it_is_not_written(tmp_path):
    source = single(tmp_path / "x", {f"{A}.weight": weight(64, 64)})
    with pytest.raises(RecipeError, match="deepseek-v4 has no mxfp4"):
        quantize(source, tmp_path / "q", Request(scheme="mxfp4", container="deepseek-v4"))
