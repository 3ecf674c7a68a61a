"""Dequantizers by scaling mode on a CUDA device: the bits of the CPU, into a file and back, and
what lies on another device is refused.
"""

import pytest
import torch

from lowbit_kernels import dequantizers, fake_quant, hadamard
from lowbit_kernels.dequantizers import QuantizedTensor, ScalingMode
from tests import test_fresh_reader
from tests.kernels import samples
from tests.kernels.samples import DTYPES, difference

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ScalingMode)
def test_the_bits_of_the_cpu(mode, dtype, tmp_path):
    scale = torch.tensor(0.01) if mode is ScalingMode.DELAYED_TENSOR else None
    signs = [None, hadamard.SIGNS] if mode.name.startswith("NVFP4") else [None]
    for name, w in samples.finite(dtype, 32, 96).items():
        for turned in signs:
            want = dequantizers.quantize(w, mode, scale, turned)
            q = dequantizers.quantize(
                w.cuda(), mode, None if scale is None else scale.cuda(), turned
            )
            for part in ("data", "scale", "global_scale"):
                got, other = getattr(q, part), getattr(want, part)
                assert other is None or difference(got, other) == "", (name, part)
            for asked in DTYPES:
                assert difference(q.dequantize(asked), want.dequantize(asked)) == "", name
            assert q.dequantize().device == w.cuda().device
    q.save(tmp_path / "q")
    assert difference(QuantizedTensor.load(tmp_path / "q").dequantize(), q.dequantize()) == ""


def test_parts_on_two_devices_are_refused():
    q = dequantizers.quantize(torch.ones(2, 32, device="cuda"), ScalingMode.NVFP4_1D)
    with pytest.raises(ValueError, match="on cpu"):
        dequantizers.dequantize(
            q.data, q.scale.cpu(), torch.float32, ScalingMode.NVFP4_1D, q.global_scale
        )
    with pytest.raises(ValueError, match="amax lies on cpu"):
        fake_quant.scaled_e4m3(torch.ones(2, 32, device="cuda"), torch.ones(2, 1))


def test_a_layer_from_the_page():
    layer = test_fresh_reader.trained(torch.bfloat16)[0].cuda()
    stored, x = test_fresh_reader.Stored(layer), torch.randn(7, 128, device="cuda").bfloat16()
    with torch.no_grad():
        assert torch.equal(stored(x), layer(x))
    layer(x).sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.isfinite().all()
