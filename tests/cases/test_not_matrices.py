"""Case 16: convolutions and other weights that are no matrices are copied, with their dtype.

NVIDIA/Model-Optimizer PR#1690, vllm-project/vllm PR#44571: writers that aborted at five dimensions
or cast a float32 weight because of its name.
"""

import pytest
import torch

from lowbitcli.api import Request, dequantize, quantize
from tests import checkpoints
from tests.checkpoints import LAYER, single, weight


def tensors():
    generator = torch.Generator().manual_seed(16)

    def drawn(*shape):
        return torch.randn(shape, generator=generator).bfloat16()

    return {
        "visual.patch_embed.proj.weight": drawn(32, 3, 2, 14, 14),
        "conv1.weight": drawn(8, 3, 3, 3),
        "conv1d.weight": drawn(64, 1, 4),
        "blocks.0.mix.weight": drawn(4, 16, 32),
        "norm.weight": drawn(64),
        "alpha": drawn(),
        "time_norm_proj.weight": torch.randn(64, 64, generator=generator),
    }


LINEAR = LAYER + "mlp.down_proj.weight"


@pytest.mark.parametrize("scheme", ("fp8", "fp8-dynamic", "mxfp8", "nvfp4"))
def test_they_are_copied_to_the_bit_and_listed(tmp_path, scheme):
    source = single(tmp_path / "source", {**tensors(), LINEAR: weight(64, 64)})
    done = quantize(source, tmp_path / "out", Request(scheme=scheme), device="cpu")
    written = checkpoints.read(done.output)
    kept = {weight.name: weight.kept for weight in done.plan.weights if weight.target is None}
    assert kept.keys() == tensors().keys()
    assert all(kept.values()), "each with a reason"
    assert kept["blocks.0.mix.weight"] == "3-dimensional"
    for name, tensor in tensors().items():
        assert checkpoints.same(written[name], tensor), name
    back = dequantize(done.output, tmp_path / "back", device="cpu")
    restored = checkpoints.read(back.output)
    for name, tensor in tensors().items():
        assert checkpoints.same(restored[name], tensor), name


def test_the_command(tmp_path, lowbit):
    source = single(tmp_path / "source", {**tensors(), LINEAR: weight(64, 64)})
    said = lowbit("plan", source, "-v")
    assert said.code == 0
    assert "visual.patch_embed.proj.weight" in said.out
    assert "3-dimensional" in said.out
    assert lowbit("quantize", source, "-o", tmp_path / "out", "--device", "cpu").code == 0
