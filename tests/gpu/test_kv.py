"""Keys and values in NVFP4 on a CUDA device: the bytes of the CPU, there and back."""

import pytest
import torch

from lowbit_kernels import kv_nvfp4
from tests.kernels import agreement_kv, samples
from tests.kernels.samples import difference

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(64, 3, 80), (192, 80), (16, 960)])
def test_the_bytes_of_the_cpu(shape, dtype):
    for name, x in samples.weights(dtype, 192, 80).items():
        x = x.reshape(shape)
        on_cuda, on_cpu = kv_nvfp4.quantize(x.cuda(), "K"), kv_nvfp4.quantize(x, "K")
        for got, want in zip(on_cuda, on_cpu, strict=True):
            assert got.is_cuda
            assert difference(got, want) == "", name
        for shared in (None, on_cuda.global_scale):
            got = kv_nvfp4.dequantize(on_cuda.packed, on_cuda.scale, shared)
            want = kv_nvfp4.dequantize(
                on_cpu.packed, on_cpu.scale, None if shared is None else on_cpu.global_scale
            )
            assert difference(got, want) == "", name


def test_kernel_equals_reference():
    assert agreement_kv.run("cuda") == []


def test_more_than_an_int32_counts():
    """Offsets beyond 2^31 elements: the last rows are those of a small tensor of equal amax."""
    rows = 2**31 // 128 + 128
    x = torch.empty(rows, 128, dtype=torch.bfloat16, device="cuda").normal_()
    x[0, 0] = 1000.0
    few = torch.cat((x[:16], x[-128:]))
    q, want = kv_nvfp4.quantize(x), kv_nvfp4.quantize(few)
    assert difference(q.global_scale, want.global_scale) == ""
    assert difference(q.packed[-128:], want.packed[16:]) == ""
    last = kv_nvfp4.unswizzle(q.scale[-128:], 128, 128)
    assert difference(last, kv_nvfp4.unswizzle(want.scale, 144, 128)[16:]) == ""


def test_dequantizing_never_waits_for_the_device():
    x = torch.randn(256, 2, 64, device="cuda", dtype=torch.bfloat16)
    packed, scale, shared = kv_nvfp4.quantize(x)
    kv_nvfp4.dequantize(packed, scale, shared)
    torch.cuda.set_sync_debug_mode("error")
    try:
        back = kv_nvfp4.dequantize(packed, scale, shared)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert back.shape == x.shape
