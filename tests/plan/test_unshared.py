"""Recoding changes no bytes: where the source's scales of a fused group differ, that is said when
the plan is made, and refused by --strict, as `verify` would fail what comes out."""

import pytest
import torch

from lowbitcli.api import Request, plan_quantize, quantize, verify
from lowbitcli.errors import UnsupportedError
from tests import checkpoints
from tests.checkpoints import LAYER, single, weight

SCALES = {"nvfp4": ".weight_global_scale", "fp8": ".weight_scale"}
ATTENTION = [f"{LAYER}self_attn.{x}_proj" for x in "qkv"]
EXPERT = [f"{LAYER}mlp.experts.0.{x}" for x in ("w1", "w3")]


def made(tmp_path, scheme, modules=ATTENTION, container="compressed-tensors", dtype=None):
    """A quantized checkpoint in which the last of the modules has twice the scale of the others."""
    tensors = {f"{name}.weight": weight(32, 64, seed=n) for n, name in enumerate(modules)}
    request = Request(scheme=scheme, container=container)
    done = quantize(single(tmp_path / "m", tensors), tmp_path / "q", request, device="cpu")
    stored = checkpoints.read(done.output)
    if dtype is not None:
        stored = {k: v.to(dtype) if k.endswith(SCALES[scheme]) else v for k, v in stored.items()}
    shared = modules[-1] + SCALES[scheme]
    stored[shared] = stored[shared] * 2
    return single(tmp_path / "source", stored, checkpoints.config_of(done.output))


def planned(source, **request):
    return plan_quantize(source, None, Request(**request))


@pytest.mark.parametrize("modules", [ATTENTION, EXPERT])
def test_differing_global_scales_are_said_and_stay(tmp_path, modules):
    source = made(tmp_path, "nvfp4", modules)
    (note,) = [x for x in planned(source, scheme="nvfp4").notes if "recoded" in x]
    first, *named = note.split("\n")
    assert first.startswith("1 group of recoded weights that are served as one matrix")
    assert "lowbit verify OUT --fix -o NEW" in first
    names = ", ".join(f"{name}.weight" for name in sorted(modules))
    assert named == [f"{names}: by a factor of 2"]
    done = quantize(source, tmp_path / "out", Request(scheme="nvfp4"), device="cpu")
    before, after = checkpoints.read(source), checkpoints.read(done.output)
    assert before.keys() == after.keys()
    assert all(checkpoints.same(before[name], after[name]) for name in before)
    assert [x.kind for x in verify(done.output, device="cpu").failures] == ["shared"]
    verify(done.output, fix=tmp_path / "fixed", device="cpu")
    assert not any("recoded" in x for x in planned(tmp_path / "fixed", scheme="nvfp4").notes)


@pytest.mark.parametrize("scheme", SCALES)
def test_strict_refuses_them(tmp_path, scheme):
    source = made(tmp_path, scheme)
    with pytest.raises(UnsupportedError, match="served as one matrix have different") as caught:
        planned(source, scheme=scheme, strict=True)
    assert caught.value.exit_code == 4
    assert "without --strict" in caught.value.hint
    assert f"{ATTENTION[0]}.weight, {ATTENTION[2]}.weight" in caught.value.message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_scale_of_fp8_of_any_dtype(tmp_path, dtype):
    source = made(tmp_path, "fp8", dtype=dtype)
    stored = checkpoints.read(source)
    sizes = [float(stored[name + SCALES["fp8"]]) for name in ATTENTION]
    (note,) = planned(source, scheme="fp8").notes
    assert "readers round the others to the largest once more" in note
    assert note.endswith(f"by a factor of {max(sizes) / min(sizes):.3g}")


def test_weights_that_are_kept_are_looked_at_too(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text('rules:\n  - {match: "*", scheme: nvfp4}\nkeep: ["*_proj"]\n')
    notes = planned(made(tmp_path, "nvfp4"), recipe=recipe).notes
    assert any("different global scales" in note for note in notes)


def test_other_containers_and_nothing_to_share(tmp_path):
    source = made(tmp_path, "nvfp4")
    (note,) = planned(source, scheme="nvfp4", container="lowbit").notes
    assert "--fix" not in note
    assert "dequantize and quantize again" in note
    assert "recoded" not in " ".join(
        planned(source, scheme="nvfp4", container="comfyui").notes
    )  # whose readers take each weight alone
    assert not any("recoded" in note for note in planned(source, scheme="mxfp8").notes)


def test_stacks_of_experts_have_a_scale_each(tmp_path):
    names = [f"{LAYER}mlp.experts.{x}_proj" for x in ("gate", "up")]
    tensors = {
        name: torch.stack([weight(32, 64, seed=n), weight(32, 64, seed=n + 2)])
        for n, name in enumerate(names)
    }
    config = {**checkpoints.CONFIG, "model_type": "qwen3_moe"}
    request = Request(scheme="nvfp4", container="lowbit")
    done = quantize(single(tmp_path / "m", tensors, config), tmp_path / "q", request, device="cpu")
    stored = checkpoints.read(done.output)
    metadata = checkpoints.metadata_of(done.output / "model.safetensors")
    assert not any("recoded" in x for x in planned(done.output, scheme="nvfp4").notes)
    stored[names[1] + ".weight_global_scale"] *= torch.tensor([1.0, 4.0])
    source = single(tmp_path / "source", stored, config, metadata)
    (note,) = [
        x for x in planned(source, scheme="nvfp4", container="lowbit").notes if "recoded" in x
    ]
    assert note.endswith("by a factor of 4")
    (note,) = [x for x in planned(source, scheme="nvfp4").notes if "1 group " in x]
    assert note.split("\n")[1].startswith(f"{LAYER}mlp.experts.1.gate_proj.weight")
