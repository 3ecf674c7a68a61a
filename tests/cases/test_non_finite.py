"""Cases 1 and 2: a NaN or an Inf in a weight is found before anything is published.

NVIDIA/Model-Optimizer#1633 and PR#1465, vllm-project/vllm PR#52501, jax-ml/ml_dtypes#400: writers
that went on stored NaN scales, whole rows of NaN or an infinite scale.
"""

import math

import pytest
import torch

from lowbitcli.api import Request, quantize
from lowbitcli.errors import NonFiniteError
from tests import checkpoints
from tests.checkpoints import LAYER, single, weight

SCHEMES = ("fp8", "fp8-dynamic", "fp8-block", "mxfp8", "mxfp4", "nvfp4", "int8")
DOWN, OUT = LAYER + "mlp.down_proj", LAYER + "self_attn.o_proj"
BAD = {
    "nan": (math.nan, (3, 5), "1 NaN and 0 Inf"),
    "inf": (math.inf, (1, 1), "0 NaN and 1 Inf"),
    "-inf": (-math.inf, (1, 1), "0 NaN and 1 Inf"),
}


def built(tmp_path, kind):
    value, place, _ = BAD[kind]
    w = weight(64, 64)
    w[place] = value
    tensors = {DOWN + ".weight": w, OUT + ".weight": weight(64, 64, seed=1)}
    return single(tmp_path / "source", tensors), tensors


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_it_is_named_counted_and_placed_and_nothing_is_published(tmp_path, scheme, kind):
    source, _ = built(tmp_path, kind)
    with pytest.raises(NonFiniteError) as caught:
        quantize(source, tmp_path / "out", Request(scheme=scheme), device="cpu")
    _, place, count = BAD[kind]
    assert caught.value.exit_code == 4
    assert DOWN + ".weight" in caught.value.message
    assert count in caught.value.message
    assert str(place) in caught.value.message
    left = [
        name for name in checkpoints.everything_below(tmp_path) if not name.startswith("source")
    ]
    assert left == [], "the failed run left something behind"


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_keep_copies_it_to_the_bit_ignores_it_and_quantizes_the_rest(tmp_path, scheme, kind):
    source, tensors = built(tmp_path, kind)
    request = Request(scheme=scheme, nonfinite="keep")
    done = quantize(source, tmp_path / "out", request, device="cpu")
    written = checkpoints.read(done.output)
    assert checkpoints.same(written[DOWN + ".weight"], tensors[DOWN + ".weight"])
    assert DOWN in checkpoints.quantization_of(done.output)["ignore"]
    assert list(done.non_finite) == [DOWN + ".weight"]
    assert BAD[kind][2] in done.non_finite[DOWN + ".weight"]
    kept = {weight.name: weight.kept for weight in done.plan.weights}
    assert kept == {DOWN + ".weight": "it holds NaN or Inf", OUT + ".weight": ""}
    assert OUT + ".weight_scale" in written
    for name, tensor in written.items():
        if "scale" in name:
            assert bool(torch.isfinite(tensor.float()).all()), name


@pytest.mark.parametrize("scheme", ("fp8", "nvfp4"))
def test_keep_keeps_the_whole_fused_group(tmp_path, scheme):
    tensors = {f"{LAYER}self_attn.{x}_proj.weight": weight(64, 64, seed=ord(x)) for x in "qkvo"}
    tensors[LAYER + "self_attn.k_proj.weight"][0, 0] = math.nan
    source = single(tmp_path / "source", tensors)
    request = Request(scheme=scheme, nonfinite="keep")
    done = quantize(source, tmp_path / "out", request, device="cpu")
    written = checkpoints.read(done.output)
    ignored = checkpoints.quantization_of(done.output)["ignore"]
    for x in "qkv":
        module = f"{LAYER}self_attn.{x}_proj"
        assert checkpoints.same(written[module + ".weight"], tensors[module + ".weight"])
        assert module in ignored
    assert LAYER + "self_attn.o_proj.weight_scale" in written
    assert LAYER + "self_attn.o_proj" not in ignored
    assert list(done.non_finite) == [LAYER + "self_attn.k_proj.weight"]


def test_a_kept_weight_elsewhere_in_the_model_may_hold_nan(tmp_path):
    norm = torch.ones(64, dtype=torch.bfloat16)
    norm[0] = math.nan
    source = single(
        tmp_path / "source", {"model.norm.weight": norm, DOWN + ".weight": weight(64, 64)}
    )
    done = quantize(source, tmp_path / "out", device="cpu")
    assert checkpoints.same(checkpoints.read(done.output)["model.norm.weight"], norm)


@pytest.mark.parametrize("kind", BAD)
def test_a_single_file_keeps_it_too(tmp_path, kind):
    source, tensors = built(tmp_path, kind)
    request = Request(nonfinite="keep")
    done = quantize(
        source / "model.safetensors", tmp_path / "out.safetensors", request, device="cpu"
    )
    assert checkpoints.same(
        checkpoints.read(done.output)[DOWN + ".weight"], tensors[DOWN + ".weight"]
    )
    assert done.plan.container == "lowbit"


def test_the_command(tmp_path, lowbit):
    source, _ = built(tmp_path, "nan")
    said = lowbit("quantize", source, "-o", tmp_path / "out", "--device", "cpu")
    assert said.code == 4
    assert f"error: {DOWN}.weight holds 1 NaN and 0 Inf, the first at (3, 5)" in said.err
    assert "hint: --nonfinite keep" in said.err
    said = lowbit(
        "quantize", source, "-o", tmp_path / "out", "--nonfinite", "keep", "--device", "cpu"
    )
    assert said.code == 0
    assert DOWN + ".weight" in said.out
