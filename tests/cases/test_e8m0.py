"""Case 17: the power-of-two scale of MXFP8 rounds up, so that no block's maximum is cut off.

ml-explore/mlx PR#4353, pytorch/ao#2035, ROCm/aiter PR#3212: rounding the exponent to nearest lost
25 % of the largest element.
"""

import pytest
import torch

from lowbitcli.api import Request, dequantize, quantize
from tests import checkpoints
from tests.checkpoints import LAYER, single

DOWN = LAYER + "mlp.down_proj"


def through(tmp_path, w, container):
    source = single(tmp_path / "source", {DOWN + ".weight": w})
    request = Request(scheme="mxfp8", container=container)
    done = quantize(source, tmp_path / "out", request, device="cpu")
    back = dequantize(done.output, tmp_path / "back", dtype="fp32", device="cpu")
    exponent = checkpoints.read(done.output)[DOWN + ".weight_scale"].int() - 127
    return torch.exp2(exponent.float()), checkpoints.read(back.output)[DOWN + ".weight"]


@pytest.mark.parametrize("container", ("compressed-tensors", "lowbit"))
def test_600_becomes_576_and_not_448(tmp_path, container):
    w = torch.zeros(32, 32, dtype=torch.bfloat16)
    w[0, 0], w[0, 1] = 600, 1
    scale, restored = through(tmp_path, w, container)
    assert float(scale[0, 0]) == 2
    assert float(restored[0, 0]) == 576
    assert float(restored[0, 1]) == 1


@pytest.mark.parametrize("container", ("compressed-tensors", "lowbit"))
def test_512_random_blocks(tmp_path, container):
    generator = torch.Generator().manual_seed(17)
    spread = torch.exp2(torch.randint(-20, 20, (512, 1), generator=generator).float())
    blocks = (torch.randn(512, 32, generator=generator) * spread).bfloat16()
    scale, restored = through(tmp_path, blocks, container)
    amax, where = blocks.float().abs().max(1, keepdim=True)
    assert scale.shape == (512, 1)
    assert bool((amax / scale <= 448).all())
    assert bool((amax / scale > 224).all()), "the scale is no larger than it has to be"
    lost = (restored.abs().gather(1, where) - amax).abs() / amax
    assert float(lost.max()) <= 0.0625


def test_the_command(tmp_path, lowbit):
    w = torch.zeros(32, 32, dtype=torch.bfloat16)
    w[0, 0] = 600
    source = single(tmp_path / "source", {DOWN + ".weight": w})
    said = lowbit(
        "quantize", source, "--scheme", "mxfp8", "-o", tmp_path / "out", "--device", "cpu"
    )
    assert said.code == 0
    assert int(checkpoints.read(tmp_path / "out")[DOWN + ".weight_scale"][0, 0]) == 128
