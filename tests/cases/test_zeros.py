"""Cases 3 and 4: matrices of zeros, and a block of zeros in a matrix of small numbers.

vllm-project/compressed-tensors PR#595, flashinfer-ai/flashinfer PR#3448: zero scales, then NaN.
NVIDIA/Model-Optimizer PR#1397: a zero block whose scale was 1 in units of the tensor's scale,
beyond what E4M3 holds, and so NaN.
"""

import pytest
import torch

from lowbitcli.api import Request, dequantize, quantize
from tests import checkpoints
from tests.checkpoints import LAYER, single, weight

DOWN = LAYER + "mlp.down_proj"
SCHEMES = ("fp8", "fp8-dynamic", "fp8-block", "mxfp8", "mxfp4", "nvfp4", "int8")
CODES = (".weight", ".weight_packed")


@pytest.mark.parametrize("container", ("compressed-tensors", "lowbit"))
@pytest.mark.parametrize("zero", (0.0, -0.0), ids=("0", "-0"))
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.filterwarnings("error")
def test_a_matrix_of_zeros(tmp_path, scheme, zero, container):
    w = torch.full((64, 64), zero, dtype=torch.bfloat16)
    source = single(tmp_path / "source", {DOWN + ".weight": w})
    request = Request(scheme=scheme, container=container)
    done = quantize(source, tmp_path / "out", request, device="cpu")
    written = checkpoints.read(done.output)
    scales = {name: tensor for name, tensor in written.items() if "scale" in name}
    assert scales
    for name, tensor in scales.items():
        numbers = tensor.float()  # of E8M0 the byte, where 255 is NaN
        assert bool(torch.isfinite(numbers).all()), name
        if tensor.dtype != torch.uint8:
            assert bool((numbers > 0).all()), name
        else:
            assert bool((tensor < 255).all()), name
    codes = next(written[DOWN + suffix] for suffix in CODES if DOWN + suffix in written)
    magnitude = codes.view(torch.uint8) & (0x77 if scheme == "nvfp4" else 0x7F)
    assert not magnitude.any()
    back = dequantize(done.output, tmp_path / "back", device="cpu")
    restored = checkpoints.read(back.output)[DOWN + ".weight"]
    assert restored.shape == (64, 64)
    assert bool((restored == 0).all())
    assert done.errors[DOWN + ".weight"].relative == 0


def nvfp4(tmp_path, name, w, container):
    source = single(tmp_path / f"source-{name}", {DOWN + ".weight": w})
    request = Request(scheme="nvfp4", container=container)
    done = quantize(source, tmp_path / name, request, device="cpu")
    back = dequantize(done.output, tmp_path / f"{name}-back", device="cpu", dtype="fp32")
    return checkpoints.read(done.output), checkpoints.read(back.output)[DOWN + ".weight"]


@pytest.mark.parametrize("container", ("compressed-tensors", "lowbit"))
@pytest.mark.parametrize("scale", (0.01, 1e-6, 1e-30))
def test_a_zero_block_in_a_small_matrix(tmp_path, scale, container):
    w = weight(64, 64, scale)
    where = w.abs().argmax()
    if where % 64 < 16:  # the largest must not be in the block that becomes zero
        w = w.roll(32, 1)
    without = w.clone()
    w[:, :16] = 0
    written, restored = nvfp4(tmp_path, "zero", w, container)
    reference, _ = nvfp4(tmp_path, "full", without, container)
    block_scales = written[DOWN + ".weight_scale"].view(torch.uint8)
    assert not bool(((block_scales & 0x7F) == 0x7F).any()), "a NaN among the block scales"
    assert bool((restored[:, :16] == 0).all())
    data = DOWN + (".weight_packed" if container == "compressed-tensors" else ".weight")
    assert torch.equal(written[data][:, 8:], reference[data][:, 8:])
    others = reference[DOWN + ".weight_scale"].view(torch.uint8)[:, 1:]
    assert torch.equal(block_scales[:, 1:], others)
    shared = DOWN + ".weight_global_scale"
    assert checkpoints.same(written[shared], reference[shared])


def test_the_command(tmp_path, lowbit):
    source = single(tmp_path / "source", {DOWN + ".weight": torch.zeros(64, 64).bfloat16()})
    said = lowbit("quantize", source, "-o", tmp_path / "out", "--device", "cpu")
    assert said.code == 0
    assert "warning" not in said.err.lower()
