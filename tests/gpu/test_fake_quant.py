"""Fake quantization on a CUDA device: the bits and gradients of the CPU."""

import pytest
import torch

from lowbit_kernels import fake_kernels, fake_quant, mx, nvfp4
from tests.kernels import agreement_fake, samples, test_fake_gradients
from tests.kernels.samples import DTYPES, difference

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, params=["kernel", "torch"])
def _chosen(request, monkeypatch):
    """Whatever `fake_kernels.DEVICES` says, each test runs by the kernel and by torch."""
    devices = {"cuda"} if request.param == "kernel" else ()
    monkeypatch.setattr(fake_kernels, "DEVICES", frozenset(devices))


PLAIN = {
    "integer": lambda x: fake_quant.fake_quant_impl(x, x.abs().amax(-1, keepdim=True)),
    "int4": lambda x: fake_quant.fake_quant_impl(x, x.abs().amax(), 4, narrow_range=False),
    "e4m3": lambda x: fake_quant.scaled_e4m3_impl(x, x.abs().amax(-1, keepdim=True)),
    "e4m3 unscaled": lambda x: fake_quant.fp8_eager(x, None),
    "fp4": lambda x: fake_quant.fp4_cast_impl(x, torch.float32),
    "int": lambda x: fake_quant.int_cast_impl(x, 8),
    "static": lambda x: fake_quant.static_block_fp4_impl(x, x.abs().reshape(-1, 16).amax(-1)),
    "nvfp4": lambda x: fake_quant.dynamic_block_quant_impl(x, 16, None, (2, 1), (4, 3)),
    "nvfp4 of 8": lambda x: fake_quant.dynamic_block_quant_impl(x, 8, None, (2, 1), (4, 3)),
    **{
        f"mx {element} of {size}": lambda x, element=element, size=size: (
            fake_quant.dynamic_block_quant_impl(x, size, None, element, (8, 0))
        )
        for element in ((4, 3), (5, 2), (2, 1), (2, 3), (3, 2))
        for size in (16, 32)
    },
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PLAIN)
def test_the_bits_of_the_cpu(name, dtype):
    for case, x in samples.weights(dtype, 64, 192).items():
        got, want = PLAIN[name](x.cuda()), PLAIN[name](x)
        assert got.is_cuda
        assert difference(got, want) == "", case


def test_the_kernel_equals_torch():
    assert agreement_fake.run("cuda") == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [False, True])
def test_the_gradients_of_the_cpu(p, dtype):
    x = test_fake_gradients.example(dtype)
    upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(5)).to(dtype)
    for top in (torch.tensor(1.25), torch.linspace(0.5, 2, 6).view(6, 1)):
        grads = []
        for device in ("cpu", "cuda"):
            leaf = x.detach().to(device).requires_grad_()
            amax = top.to(device)
            y = fake_quant.fake_tensor_quant(leaf, amax, pass_through_bwd=p)
            y = y + fake_quant.scaled_e4m3(leaf, amax, pass_through_bwd=p)
            y = y + fake_quant.fp4_cast(leaf) + fake_quant.int_cast(leaf, 2)
            (grad,) = torch.autograd.grad(y, leaf, upstream.to(device))
            grads += [grad, y]
        assert difference(grads[2], grads[0]) == "" and difference(grads[3], grads[1]) == ""


def test_one_graph_for_torch_compile_and_the_same_bits():
    x = torch.randn(128, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def both(x):
        y = fake_quant.dynamic_block_quant(x, 16, None, None, (2, 1), (4, 3))
        return y + fake_quant.scaled_e4m3(x, torch.tensor(1.0, device="cuda"))

    compiled = torch.compile(both, fullgraph=True)
    assert difference(compiled(x), both(x)) == ""
    got = torch.autograd.grad(compiled(x).sum(), x)[0]
    assert difference(got, torch.autograd.grad(both(x).sum(), x)[0]) == ""


def test_amax_may_lie_on_the_cpu():
    x, amax = torch.randn(32, 64), torch.tensor(2.0)
    for function in (
        lambda x: fake_quant.dynamic_block_quant(x, 16, amax, None, (2, 1), (4, 3)),
        lambda x: fake_quant.fake_tensor_quant(x, amax),
        lambda x: fake_quant.scaled_e4m3(x, amax),
    ):
        assert difference(function(x.cuda()), function(x)) == ""


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bias_that_is_a_number_of_the_cpu(dtype):
    x, bias = samples.weights(dtype)["gauss"], torch.tensor(0.3)
    one = torch.tensor(1.25)
    for function in (fake_quant.fake_tensor_quant, fake_quant.scaled_e4m3):
        for where in (bias, bias.cuda()):
            assert difference(function(x.cuda(), one, where), function(x, one, bias)) == ""
    with pytest.raises(ValueError, match="bias lies on cpu"):
        fake_quant.scaled_e4m3(x.cuda(), None, torch.ones(96))


def test_torch_func_gives_the_values_of_the_cpu():
    x = torch.stack([test_fake_gradients.example(seed=seed).detach() for seed in range(3)])

    def loss(x):
        y = fake_quant.dynamic_block_quant(x, 16, None, None, (2, 1), (4, 3))
        y = y + fake_quant.scaled_e4m3(x, torch.tensor(1.25))
        return (y * fake_quant.fp4_cast(x)).sum()

    grads = torch.func.vmap(torch.func.grad(loss))
    assert difference(grads(x.cuda()), grads(x)) == ""


def test_importance_of_another_device_is_refused():
    w = torch.ones(16, 64, device="cuda")
    for quantize in (nvfp4.quantize, mx.quantize_mxfp4):
        with pytest.raises(ValueError, match="importance lies on cpu"):
            quantize(w, rule="mse", importance=torch.ones(64))
