"""Gradients of fake quantization by a written-out formula, and one graph for torch.compile."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lowbit_kernels import fake_plain, fake_quant
from tests.kernels.samples import DTYPES, difference


def example(dtype=torch.float32, shape=(6, 64), seed=0):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    x.view(-1)[:3] = torch.tensor([0.0, -0.0, 2.5], dtype=dtype)
    return x.requires_grad_()


def gradient(function, x, upstream):
    """Return what the backward pass of `function` makes of `upstream` at `x`, and the value."""
    x = x.detach().clone().requires_grad_()
    y = function(x)
    (grad,) = torch.autograd.grad(y, x, upstream.to(y.dtype))
    return grad, y.detach()


def clipped(x, amax, upstream):
    """dx = dy where |x| <= amax, else 0, element by element."""
    amax = torch.broadcast_to(amax, x.shape).flatten().tolist()
    pairs = zip(x.flatten().tolist(), amax, upstream.flatten().tolist(), strict=True)
    values = [dy if abs(a) <= top else 0.0 for a, top, dy in pairs]
    return torch.tensor(values, dtype=x.dtype).reshape(x.shape)


AMAX = torch.tensor(1.25)
SIDES = {  # function of x and pass_through_bwd; amax that clips; the same without autograd
    "integer": (
        lambda x, p: fake_quant.fake_tensor_quant(x, AMAX, pass_through_bwd=p),
        AMAX,
        lambda x: fake_quant.fake_quant_impl(x, AMAX),
    ),
    "integer by rows": (
        lambda x, p: fake_quant.fake_tensor_quant(
            x, torch.arange(1.0, 7.0) / 4, None, 4, pass_through_bwd=p, axis=0
        ),
        (torch.arange(1.0, 7.0) / 4)[:, None],
        lambda x: fake_quant.fake_quant_impl(x, (torch.arange(1.0, 7.0) / 4)[:, None], 4),
    ),
    "integer by blocks": (
        lambda x, p: fake_quant.fake_tensor_quant(
            x,
            torch.arange(1.0, 25.0).view(6, 4) / 12,
            num_bits=4,
            pass_through_bwd=p,
            block_size=16,
        ),
        (torch.arange(1.0, 25.0).view(6, 4) / 12).repeat_interleave(16, 1),
        lambda x: fake_quant.fake_quant_impl(
            x.reshape(24, 16), (torch.arange(1.0, 25.0) / 12)[:, None], 4
        ).reshape(6, 64),
    ),
    "e4m3": (
        lambda x, p: fake_quant.scaled_e4m3(x, AMAX, pass_through_bwd=p),
        AMAX,
        lambda x: fake_quant.scaled_e4m3_impl(x, AMAX),
    ),
    "dynamic nvfp4": (
        lambda x, p: fake_quant.dynamic_block_quant(x, 16, AMAX, None, (2, 1), (4, 3), p),
        AMAX,
        lambda x: fake_quant.dynamic_block_quant_impl(x, 16, AMAX, (2, 1), (4, 3)),
    ),
    "static": (
        lambda x, p: fake_quant.static_block_fp4(
            x, torch.arange(1.0, 25.0) / 12, pass_through_bwd=p
        ),
        (torch.arange(1.0, 25.0).view(6, 4) / 12).repeat_interleave(16, 1),
        lambda x: fake_quant.static_block_fp4_impl(x, torch.arange(1.0, 25.0) / 12),
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SIDES)
def test_the_gradient_goes_straight_through_within_amax(name, dtype):
    function, amax, plain = SIDES[name]
    x = example(dtype)
    upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    grad, y = gradient(lambda x: function(x, False), x, upstream)
    want = clipped(x.detach(), amax, upstream)
    assert difference(grad, want) == ""
    assert 0 < int((want == 0).sum()) < want.numel()
    assert difference(y, plain(x.detach())) == ""
    through, same = gradient(lambda x: function(x, True), x, upstream)
    assert difference(through, upstream) == "" and difference(same, y) == ""
    assert not plain(x).requires_grad


@pytest.mark.parametrize("unsigned", [False, True])
@pytest.mark.parametrize("narrow", [False, True])
def test_casts_clip_at_their_range(unsigned, narrow):
    x = torch.arange(-20, 21).float() * 0.45
    x[:4] = torch.tensor([-8.0, -7.0, 6.0, -6.0])
    upstream = torch.arange(1.0, 42.0)
    least, most = (0, 15) if unsigned else (-7 if narrow else -8, 7)
    grad, y = gradient(lambda x: fake_quant.int_cast(x, 4, unsigned, narrow), x, upstream)
    pairs = list(zip(x.tolist(), upstream.tolist(), strict=True))
    assert grad.tolist() == [dy if least <= a <= most else 0.0 for a, dy in pairs]
    assert y.tolist() == [min(max(round(a), least), most) for a, _ in pairs]
    grad, y = gradient(fake_quant.fp4_cast, x, upstream)
    assert grad.tolist() == [dy if abs(a) <= 6 else 0.0 for a, dy in pairs]


def test_a_gradient_takes_the_dtype_of_its_input():
    x = example(torch.bfloat16)
    fake_quant.fp4_cast(x, torch.float32).sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.bfloat16
    assert fake_quant.static_block_fp4(x, torch.ones(24), out_dtype=torch.float16).dtype == (
        torch.float16
    )


BIASED = {
    "integer": lambda x, b: fake_quant.fake_tensor_quant(x, AMAX, b),
    "e4m3": lambda x, b: fake_quant.scaled_e4m3(x, AMAX, b),
    "dynamic": lambda x, b: fake_quant.dynamic_block_quant(
        x, 16, AMAX, b, (2, 1), (4, 3), pass_through_bwd=False
    ),
}


@pytest.mark.parametrize("name", BIASED)
def test_a_bias_is_taken_away_and_given_back(name):
    x, function = example(torch.bfloat16).detach(), BIASED[name]
    bias = torch.linspace(-2, 2, 64).to(torch.bfloat16).requires_grad_()
    upstream = torch.ones_like(x)
    grad, y = gradient(lambda x: function(x, bias), x, upstream)
    shifted = x - bias.detach()
    assert difference(y, function(shifted, None) + bias.detach()) == ""
    assert difference(grad, clipped(shifted, AMAX, upstream)) == ""
    assert bias.grad is None


@pytest.mark.parametrize("name", BIASED)
def test_a_bias_of_more_bits_is_not_rounded_before(name):
    """Nor a number without dimensions, which torch gives the dtype of a tensor beside it."""
    x = example(torch.bfloat16).detach()
    for bias in (torch.linspace(-2, 2, 64), torch.tensor(0.3)):
        want = (BIASED[name](x.float() - bias, None) + bias).to(torch.bfloat16)
        for given in (bias, bias.double()):  # fp64 counts as fp32
            assert difference(BIASED[name](x, given), want) == ""


class Devices(TorchDispatchMode):
    """Notes calls that compute with tensors of two devices."""

    def __init__(self):
        super().__init__()
        self.mixed = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = {x.device for x in args if isinstance(x, torch.Tensor)}
        if len(found) > 1 and function.namespace != "lowbit":
            self.mixed.append(str(function))
        return function(*args, **(kwargs or {}))


def test_numbers_of_the_cpu_are_moved_before_they_are_computed_with():
    """On a device where nothing has values: CUDA would multiply by their reciprocals."""
    x, one = torch.empty(6, 64, device="meta"), torch.tensor(1.25)
    raw = [op._init_fn for op in (fake_plain._integer, fake_plain._e4m3)]
    calls = [lambda x, b=b: b(x, one) for b in BIASED.values()]
    calls += [lambda x: raw[0](x, one, -127.0, 127.0, None, None), lambda x: raw[1](x, one)]
    calls += [lambda x: fake_quant.static_block_fp4(x, one, one)]
    for call in calls:
        with Devices() as seen:
            assert call(x).device.type == "meta"
        assert seen.mixed == []
    with Devices() as seen:
        _ = x * one
    assert seen.mixed == ["aten.mul.Tensor"]


@pytest.mark.parametrize("name", SIDES)
def test_one_graph_for_torch_compile(name):
    """fullgraph: a break is an error. The bits are those without it."""
    function = SIDES[name][0]
    compiled = torch.compile(lambda x: function(x, False) * 2, fullgraph=True, backend="aot_eager")
    x, upstream = example(), torch.ones(6, 64)
    got = gradient(compiled, x, upstream)
    want = gradient(lambda x: function(x, False) * 2, x, upstream)
    for g, w in zip(got, want, strict=True):
        assert difference(g, w) == ""


def test_casts_are_one_graph_too():
    def both(x):
        return fake_quant.fp4_cast(x) + fake_quant.int_cast(x, 4)

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    x, upstream = example() * 4, torch.ones(6, 64)
    for g, w in zip(gradient(compiled, x, upstream), gradient(both, x, upstream), strict=True):
        assert difference(g, w) == ""


@pytest.mark.parametrize("p", [False, True])
@pytest.mark.parametrize("name", SIDES)
def test_torch_func_gives_the_gradients_of_autograd(name, p):
    """grad, vmap, grad of each sample: the same numbers, clipped where autograd clips."""
    function = SIDES[name][0]
    x = torch.stack([example(seed=seed).detach() for seed in range(3)])
    upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(9))
    pairs = [gradient(lambda x: function(x, p), a, u) for a, u in zip(x, upstream, strict=True)]
    grads, values = map(torch.stack, zip(*pairs, strict=True))

    def loss(x, upstream):
        return (function(x, p) * upstream).sum()

    assert difference(torch.func.grad(loss)(x[0], upstream[0]), grads[0]) == ""
    assert difference(torch.func.vmap(lambda x: function(x, p))(x), values) == ""
    assert difference(torch.func.vmap(torch.func.grad(loss))(x, upstream), grads) == ""
    turned = torch.func.vmap(lambda x: function(x, p), in_dims=2, out_dims=2)(x.movedim(0, 2))
    assert difference(turned.movedim(2, 0).contiguous(), values) == ""
    rows = torch.func.jacrev(lambda x: function(x, p)[0, :4])(x[0])
    for i in range(4):
        one = torch.zeros(6, 64)
        one[0, i] = 1.0
        assert torch.equal(rows[i], gradient(lambda x: function(x, p), x[0], one)[0])


def test_torch_func_of_casts_and_of_an_amax_of_each_sample():
    x = torch.stack([example(seed=seed).detach() * 3 for seed in range(3)])
    for cast, top in ((fake_quant.fp4_cast, 6.0), (lambda x: fake_quant.int_cast(x, 4), 7.0)):
        grads = torch.func.vmap(torch.func.grad(lambda x, cast=cast: cast(x).sum()))(x)
        assert torch.equal(grads, (x.abs() <= top).float()) and 0 < grads.mean() < 1

    def own(x):
        return fake_quant.fake_tensor_quant(x, x.detach().abs().max(), num_bits=4)

    assert torch.equal(torch.func.vmap(own)(x), torch.stack([own(one) for one in x]))
    none = x[:0]
    assert torch.func.vmap(own)(none).shape == none.shape
    assert torch.func.vmap(fake_quant.fp4_cast, in_dims=2)(none.movedim(0, 2)).shape == none.shape


def test_forward_mode_is_refused():
    x = example().detach()
    for call in (
        lambda: torch.func.jvp(fake_quant.fp4_cast, (x,), (x,)),
        lambda: torch.func.jacfwd(fake_quant.fp4_cast)(x[0]),
    ):
        with pytest.raises(RuntimeError, match="jvp"):
            call()
