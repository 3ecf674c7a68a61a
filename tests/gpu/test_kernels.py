"""On a CUDA device: kernels against references there, and references there against the CPU's."""

import pytest
import torch

from lowbit_kernels import fp8, integer, nvfp4, rounding
from lowbit_kernels.formats import E4M3, E5M2
from lowbit_kernels.jit import references
from tests.kernels.agreement import CASES, run
from tests.kernels.samples import difference

pytestmark = pytest.mark.gpu


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("exponent", [0, -12, -70, 90])
def test_division_by_a_reciprocal_rounds_as_true_division(dtype, exponent):
    """E5M2 has numbers down to 2^-16 and INT4 no scale for the whole: random weights and ties."""
    torch.manual_seed(2)
    if dtype == torch.float16 and abs(exponent) > 12:
        pytest.skip("beyond fp16")
    w = torch.randn(1024, 1024, device="cuda")
    w *= torch.exp2(torch.randint(-18, 1, w.shape, device="cuda").float())
    codes = torch.arange(0x7C, dtype=torch.uint8, device="cuda")
    values = codes.view(torch.float8_e5m2).float()
    ties = (values + values.roll(-1)) / 2 / 57344
    scale = torch.rand(1024, 1, device="cuda") + 0.5
    tied = ties.repeat(9)[:1024] * scale
    whole = (torch.arange(-13, 14, 2, device="cuda") / 14).repeat(74)[:1024] * scale
    for source in (w, tied, whole):
        x = (source * 2.0**exponent).to(dtype)
        x[:, ::128] = 2.0**exponent * scale  # the largest of each row and group
        for call in (
            lambda x=x: fp8.quantize_tensor(x, None, E5M2),
            lambda x=x: fp8.quantize_channel(x, E5M2),
            lambda x=x: fp8.quantize_channel(x),
            lambda x=x: integer.quantize_channel(x),
            lambda x=x: integer.quantize_int4(x, 128),
            lambda x=x: integer.quantize_int4(x, 32),
            lambda x=x: integer.quantize_int4(x, 128, torch.bfloat16),
            lambda x=x: integer.quantize_int4(x, 128, torch.float16),
        ):
            got = call()
            with references():
                want = call()
            for g, r in zip(got, want, strict=True):
                assert difference(g, r) == ""


@pytest.mark.parametrize("element", [E4M3, E5M2], ids=lambda element: element.name)
def test_the_instruction_rounds_to_fp8_as_the_reference(element):
    """All leading bits of fp32, each with endings below, on and above what decides, Inf and NaN."""
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32, device="cuda") << 16
    endings = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x3FFF, 0x4000]
    x = (upper[:, None] | torch.tensor(endings, dtype=torch.int32, device="cuda")).flatten()
    x = x.view(torch.float32).reshape(512, -1)
    one = torch.tensor(1.0, device="cuda")
    got, _ = fp8.quantize_tensor(x, one, element)
    assert difference(got, rounding.to_fp8(x, element)) == ""
    with references():
        want, _ = fp8.quantize_tensor(x.cpu(), one.cpu(), element)
    assert difference(got, want) == ""


def test_every_code_decodes_as_the_reference():
    codes = torch.arange(256, dtype=torch.uint8, device="cuda").repeat(4).reshape(4, 256)
    scale = torch.tensor([[1.0], [0.3], [1e-40], [3e38]], device="cuda")
    for data in (codes.view(torch.float8_e4m3fn), codes.view(torch.float8_e5m2)):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            got = fp8.dequantize_channel(data, scale, dtype)
            assert difference(got, (data.float() * scale).to(dtype)) == ""
    for data in (codes, codes.view(torch.int8)):
        got = integer.dequantize(data, scale.repeat(1, 4), torch.float32)
        with references():
            assert (
                difference(got, integer.dequantize(data, scale.repeat(1, 4), torch.float32)) == ""
            )


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
