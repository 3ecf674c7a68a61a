"""On a CUDA device: kernels against references there, and references there against the CPU's."""

import pytest
import torch

from lowbit_kernels import nvfp4
from lowbit_kernels.jit import references
from tests.kernels.agreement import CASES, run
from tests.kernels.samples import difference

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def new_kernels(monkeypatch):
    """These tests are what a kernel has to pass before it is used on a device."""
    monkeypatch.setenv("LOWBIT_NEW_KERNELS", "1")


@pytest.mark.parametrize("name", CASES)
def test_kernel_equals_reference(name):
    assert run(name, "cuda") == []


@pytest.mark.parametrize("name", CASES)
def test_reference_is_the_same_on_both_devices(name):
    family, dtype = CASES[name]
    with references():
        on_cuda = dict(family("cuda", dtype))
        for case, on_cpu in family("cpu", dtype):
            want, got = on_cpu(), on_cuda[case]()
            want, got = ((r,) if isinstance(r, torch.Tensor) else r for r in (want, got))
            for w, g in zip(want, got, strict=True):
                assert difference(g, w) == "", case


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("step", [1.0, 0.7, 1.1e-3, 3.3e-20])
def test_fast_division_rounds_as_true_division(dtype, step):
    """Compare 4 million random elements and 4 million ties with the true division."""
    torch.manual_seed(1)
    w = torch.randn(2048, 2048, device="cuda") * step
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0], device="cuda")
    scales = torch.rand(2048, 128, 1, device="cuda") + 0.5
    tied = (ties.repeat(2048, 128, 2) * scales * step).reshape(2048, 2048)
    for x in (w.to(dtype), tied.to(dtype)):
        got = nvfp4.quantize(x)
        with references():
            want = nvfp4.quantize(x)
        for g, r in zip(got, want, strict=True):
            assert difference(g, r) == ""


def test_a_scheme_starts_without_a_host_sync():
    w = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    nvfp4.quantize(w)
    torch.cuda.set_sync_debug_mode("error")
    try:
        packed, scale, g = nvfp4.quantize(w)
        nvfp4.dequantize(packed, scale, g)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert packed.shape == (64, 128)
