"""Fake quantization with gradients: values are rounded, gradients go straight through.

    forward   y = rounded(x - bias) + bias                 `fake_plain` has the roundings
    backward  dx = dy where |x - bias| <= amax, else 0     dy everywhere if pass_through_bwd

| function | rounds to | gradient is clipped | without autograd |
|---|---|---|---|
| `fake_tensor_quant` | integers of a scale | at amax | `fake_quant_impl` |
| `scaled_e4m3` | E4M3 of a scale | at amax | `scaled_e4m3_impl`, `fp8_eager` |
| `fp4_cast` | E2M1 without scale | at 6 | `fp4_cast_impl` |
| `int_cast` | integers without scale | at the range | `int_cast_impl` |
| `dynamic_block_quant` | NVFP4, MX | not, by default | `dynamic_block_quant_impl` |
| `static_block_fp4` | E2M1, blocks of given amax | at the block's amax | `static_block_fp4_impl` |

Inputs are fp32, bf16 or fp16 of any shape, results have their shape and dtype unless another is
asked for. What is kept for the backward pass is one byte an element, and nothing where no gradient
is asked for. amax and bias get no gradient. `torch.compile` takes all of it in one graph.
Source: ModelOpt 0.47 `torch.quantization.tensor_quant`; parameters and defaults are theirs.
"""

from typing import Any

import torch
from torch import Tensor

from lowbit_kernels import fake_checks, fake_plain
from lowbit_kernels.fake_blocks import dynamic_block_quant_impl
from lowbit_kernels.fake_plain import (
    fake_quant_impl,
    fp4_cast_impl,
    fp8_eager,
    int_cast_impl,
    scaled_e4m3_impl,
    static_block_fp4_impl,
    static_fp4_scales,
)
from lowbit_kernels.typed import typed_with_meta


class StraightThrough(torch.autograd.Function):
    """Take `y` for a function of `x` whose derivative is 1 where `inside`, 0 elsewhere.

    In this form `torch.func` takes it too. There is no `jvp`, as `torch.compile` takes no function
    that has one: forward mode is refused by torch.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, y: Tensor, inside: Tensor | None) -> Tensor:
        """Return `y`; `inside` is None where the derivative is 1 everywhere."""
        return y.view_as(y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what the derivative needs."""
        x, _, inside = inputs
        ctx.everywhere = inside is None
        ctx.dtype = x.dtype
        if inside is not None:
            ctx.save_for_backward(inside)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of `x`."""
        grad = grads[0].to(ctx.dtype)
        if not ctx.everywhere:
            (inside,) = ctx.saved_tensors
            grad = torch.where(inside, grad, torch.zeros_like(grad))
        return grad, None, None


def _through(x: Tensor, y: Tensor, inside: Tensor | None) -> Tensor:
    return StraightThrough.apply(x, y, inside)  # pyright: ignore[reportReturnType]


def _asked(x: Tensor, pass_through: bool) -> bool:
    """Say whether a clipped gradient of `x` will be asked for."""
    return not pass_through and x.requires_grad and torch.is_grad_enabled()


def _within(x: Tensor, amax: Tensor | None, pass_through: bool) -> Tensor | None:
    """Return where |x| <= amax, None where nothing is clipped or nobody asks."""
    if amax is None or not _asked(x, pass_through):
        return None
    return x.detach().abs() <= amax.detach()


def _unbiased(inputs: Tensor, bias: Tensor | None) -> Tensor:
    """Return what is rounded: with a bias in the wider of both dtypes, fp32 at most."""
    fake_checks.check_bias(bias, inputs)
    if bias is None:
        return inputs
    wide = torch.promote_types(inputs.dtype, bias.dtype)
    wide = torch.float32 if wide == torch.float64 else wide
    # A number on the CPU would count with other bits on another device, and with fewer than it has.
    return inputs.to(wide) - bias.detach().to(inputs.device, wide)


def _biased(y: Tensor, bias: Tensor | None, inputs: Tensor) -> Tensor:
    """Return rounded values with their bias, in the dtype of the inputs."""
    return y if bias is None else (y + bias.detach().to(y.device, y.dtype)).to(inputs.dtype)


@typed_with_meta
def fake_tensor_quant(
    inputs: Tensor,
    amax: Tensor,
    bias: Tensor | None = None,
    num_bits: int = 8,
    unsigned: bool = False,
    narrow_range: bool = True,
    pass_through_bwd: bool = False,
    block_size: int | None = None,
    axis: int | None = None,
) -> Tensor:
    """Return `inputs` rounded to integers of a scale, see `fake_quant_impl`; the gradient is
    clipped at amax.

    `amax` broadcasts over `inputs`, or is a vector along `axis`, or has a number for each
    `block_size` elements along `axis` (the last, if there is none).
    Raises ValueError as `fake_quant_impl`, and for an amax of another shape.
    """
    x = _unbiased(inputs, bias)
    y = fake_plain.integers(x, amax, num_bits, unsigned, narrow_range, block_size, axis)
    top = fake_checks.spread(amax.detach(), x, block_size, axis)
    y = _through(x, y, _within(x, top, pass_through_bwd))
    return _biased(y, bias, inputs)


@typed_with_meta
def scaled_e4m3(
    inputs: Tensor,
    amax: Tensor | None = None,
    bias: Tensor | None = None,
    E: int = 4,
    M: int = 3,
    pass_through_bwd: bool = False,
) -> Tensor:
    """Return `inputs` rounded to E4M3 with the scale of `amax`, see `scaled_e4m3_impl`; the
    gradient is clipped at amax.

    Raises ValueError as `scaled_e4m3_impl`, and for an E and M that are not 4 and 3.
    """
    if (E, M) != (4, 3):
        raise ValueError(f"there is E=4, M=3, not E={E}, M={M}")
    x = _unbiased(inputs, bias)
    y = scaled_e4m3_impl(x, amax)
    y = _through(x, y, _within(x, amax, pass_through_bwd))
    return _biased(y, bias, inputs)


@typed_with_meta
def fp4_cast(x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """Return `x` rounded to the values of E2M1 without a scale, see `fp4_cast_impl`; the gradient
    is clipped at 6.

    Raises ValueError as `fp4_cast_impl`.
    """
    y = fp4_cast_impl(x, out_dtype)
    return _through(x, y, x.detach().abs() <= 6.0 if _asked(x, False) else None)


@typed_with_meta
def int_cast(x: Tensor, num_bits: int, unsigned: bool = False, narrow_range: bool = True) -> Tensor:
    """Return `x` rounded to integers without a scale, see `int_cast_impl`; the gradient is clipped
    at the range.

    Raises ValueError as `int_cast_impl`.
    """
    y = int_cast_impl(x, num_bits, unsigned, narrow_range)
    if not _asked(x, False):
        return _through(x, y, None)
    least, most = fake_checks.integer_range(num_bits, unsigned, narrow_range)
    fixed = x.detach()
    return _through(x, y, (fixed >= least) & (fixed <= most))


@typed_with_meta
def dynamic_block_quant(
    inputs: Tensor,
    block_size: int,
    amax: Tensor | None,
    bias: Tensor | None,
    num_bits: tuple[int, int],
    scale_bits: tuple[int, int],
    pass_through_bwd: bool = True,
) -> Tensor:
    """Return `inputs [*, C]` rounded to NVFP4 or an MX format, see `dynamic_block_quant_impl`; the
    gradient is clipped at `amax` only if it is given and `pass_through_bwd` is not set.

    Raises ValueError as `dynamic_block_quant_impl`.
    """
    x = _unbiased(inputs, bias)
    if amax is not None and not pass_through_bwd:
        fake_checks.check_broadcast(amax, x, "amax")
    y = dynamic_block_quant_impl(x, block_size, amax, num_bits, scale_bits)
    y = _through(x, y, _within(x, amax, pass_through_bwd))
    return _biased(y, bias, inputs)


@typed_with_meta
def static_block_fp4(
    x: Tensor,
    amax: Tensor,
    global_amax: Tensor | None = None,
    quantize_block_scales: bool = True,
    fp8_max_for_normalization: float = 448.0,
    out_dtype: torch.dtype | None = None,
    pass_through_bwd: bool = False,
) -> Tensor:
    """Return `x` rounded to E2M1 in blocks whose amax is given, see `static_block_fp4_impl`; the
    gradient is clipped at each block's amax.

    Raises ValueError as `static_block_fp4_impl`.
    """
    y = static_block_fp4_impl(
        x, amax, global_amax, quantize_block_scales, fp8_max_for_normalization, out_dtype
    )
    if not _asked(x, pass_through_bwd):
        return _through(x, y, None)
    blocks = x.detach().abs().reshape(amax.numel(), -1)
    return _through(x, y, (blocks <= amax.detach().reshape(-1, 1)).reshape(x.shape))


__all__ = [
    "StraightThrough",
    "dynamic_block_quant",
    "dynamic_block_quant_impl",
    "fake_quant_impl",
    "fake_tensor_quant",
    "fp4_cast",
    "fp4_cast_impl",
    "fp8_eager",
    "int_cast",
    "int_cast_impl",
    "scaled_e4m3",
    "scaled_e4m3_impl",
    "static_block_fp4",
    "static_block_fp4_impl",
    "static_fp4_scales",
]
