"""Fake quantization, which rounds values and gives them back in their dtype: the arithmetic.

    integer   q = clamp(rne(fl(x * S)), least, most), y = fl(q / S)      S = fl(most / amax)
    E4M3      y = fl(e4m3(clamp(fl(x * S), +-448)) * fl(1 / S))          S = fl(fl(1 / amax) * 448)
    E2M1      y = e2m1(x)
    static    y = fl(e2m1(fl(|x| / s)) * s), with the sign of x          s: `static_fp4_scales`

most = 2^(bits - 1) - 1, or 2^bits - 1 unsigned; least = -most, -most - 1 where the range is not
narrow, 0 where unsigned. All in fp32 with true divisions and one rounding to the dtype at the end,
on every device; a Python scalar divides nothing, so CPU and CUDA give the same bits. An amax of
2^-24 or less makes zeros of integers, and is taken as 1 for E4M3.

All of it may run in the kernel of `fake_kernels`, but where an amax broadcasts along other axes
than the last ones. The functions here take no part in autograd; `fake_quant` holds those that
do. Each is an operator of torch (`torch.ops.lowbit`), which `torch.compile` calls and does not look
into: bits stay.
Source: ModelOpt 0.47 `torch.quantization.tensor_quant`, whose bits these are. Blocks with scales of
their own are in `fake_blocks`.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowbit_kernels import fake_checks as checks
from lowbit_kernels import fake_kernels, rounding
from lowbit_kernels.formats import E2M1_VALUES
from lowbit_kernels.typed import typed_with_meta

EPSILON = 2.0**-24  # no amax: the least that fp16 holds


def _over(x: Tensor, y: float) -> Tensor:
    """Return the true quotient fl(x / y): torch on CUDA multiplies by 1 / y."""
    return x / torch.full_like(x, y)


@torch.library.custom_op("lowbit::fake_integer", mutates_args=())
def _integer(
    x: Tensor, amax: Tensor, least: float, most: float, block_size: int | None, axis: int | None
) -> Tensor:
    amax = amax.to(x.device)  # CUDA multiplies by the reciprocal of a number that lies on the CPU
    last = block_size is not None and amax.numel() > 1 and axis in (None, -1, x.dim() - 1)
    wide = amax if last else checks.spread(amax, x, block_size, axis)
    share = block_size if last else fake_kernels.share_of(x, wide)
    y = fake_kernels.launch(x, wide, share, "INTEGER", bounds=(least, most))
    if y is not None:
        return y
    amax = checks.spread(amax.float(), x, block_size, axis)
    scale = torch.full_like(amax, most) / amax
    none = amax <= EPSILON
    q = (x.float() * torch.where(none, 0.0, scale)).round().clamp(least, most)
    return (q / torch.where(none, 1.0, scale)).to(x.dtype)


@torch.library.custom_op("lowbit::fake_e4m3", mutates_args=())
def _e4m3(x: Tensor, amax: Tensor | None) -> Tensor:
    amax = None if amax is None else amax.to(x.device)
    share = None if amax is None else fake_kernels.share_of(x, amax)
    y = fake_kernels.launch(x, amax, share, "E4M3")
    if y is not None:
        return y
    if amax is None:
        return rounding.to_e4m3(x.float()).float().to(x.dtype)
    top = amax.float()
    one = torch.ones_like(top)
    scale = one / torch.where(top <= EPSILON, one, top) * 448.0
    return (rounding.to_e4m3(x.float() * scale).float() * (one / scale)).to(x.dtype)


def _e2m1_values(a: Tensor) -> Tensor:
    """Return fp32 magnitudes `a` rounded to E2M1; NaN is 6."""
    values = torch.tensor(E2M1_VALUES[:8], dtype=torch.float32, device=a.device)
    return values[rounding.e2m1_magnitude(a).int()]


@torch.library.custom_op("lowbit::fake_e2m1", mutates_args=())
def _e2m1(x: Tensor, dtype: torch.dtype) -> Tensor:
    y = fake_kernels.launch(x, None, None, "E2M1", dtype)
    if y is not None:
        return y
    y = _e2m1_values(x.float().abs())
    return torch.where(x >= 0, y, -y).to(dtype)


@torch.library.custom_op("lowbit::fake_int_cast", mutates_args=())
def _int_cast(x: Tensor, least: float, most: float) -> Tensor:
    y = fake_kernels.launch(x, None, None, "INTEGER", bounds=(least, most))
    return x.round().clamp(least, most) if y is None else y


@torch.library.custom_op("lowbit::fake_blocks_of_e2m1", mutates_args=())
def _static(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    share = x.numel() // max(scale.numel(), 1)
    y = fake_kernels.launch(x, scale, share, "E2M1", dtype)
    if y is not None:
        return y
    blocks, s = x.float().reshape(scale.numel(), -1), scale.reshape(-1, 1)
    # A scale that is no number divides nothing; a zero leaves nothing.
    safe = torch.where((s == 0) | ~torch.isfinite(s), 1.0, s)
    y = _e2m1_values(blocks.abs() / safe) * safe
    y = torch.where(s == 0, 0.0, torch.where(blocks >= 0, y, -y))
    return y.to(dtype).reshape(x.shape)


_SAME_DTYPE: tuple[Any, ...] = (_integer, _e4m3, _int_cast)
_OWN_DTYPE: tuple[Any, ...] = (_e2m1, _static)


def same_shape(x: Tensor, *rest: Any) -> Tensor:
    """Return what has the shape and dtype of a result, for tracing."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _shape_of_dtype(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x, dtype=rest[-1], memory_format=torch.contiguous_format)


def traced(operator: Any, shape: Callable[..., Tensor]) -> None:
    """Say what tracing needs to know of an operator, and what `torch.func.vmap` does with it: one
    sample after another, as scales may be of all of a sample."""

    def one_by_one(info: Any, dims: tuple[int | None, ...], *given: Any) -> tuple[Tensor, int]:
        if not info.batch_size:
            x, d = given[0], dims[0]
            none = x.unsqueeze(0)[:0] if d is None else x.movedim(d, 0)
            return shape(none, *given[1:]), 0
        pairs = list(zip(given, dims, strict=True))
        each = [
            operator(*(x if d is None else x.select(d, i) for x, d in pairs))
            for i in range(info.batch_size)
        ]
        return torch.stack(each), 0

    operator.register_fake(shape)
    operator.register_vmap(one_by_one)


for _operator in _SAME_DTYPE:
    traced(_operator, same_shape)
for _operator in _OWN_DTYPE:
    traced(_operator, _shape_of_dtype)


def integers(
    x: Tensor,
    amax: Tensor,
    num_bits: int,
    unsigned: bool,
    narrow_range: bool,
    block_size: int | None = None,
    axis: int | None = None,
) -> Tensor:
    """Return `x` rounded to integers of a scale; `amax` as `spread` takes it.

    Raises ValueError as `fake_quant_impl`, and for an amax of another shape.
    """
    checks.check_values(x)
    least, most = checks.integer_range(num_bits, unsigned, narrow_range)
    checks.check_spread(amax, x, block_size, axis)
    checks.check_signs(x, amax, unsigned)
    return _integer(x.detach(), amax.detach(), least, most, block_size, axis)


@typed_with_meta
def fake_quant_impl(
    inputs: Tensor,
    amax: Tensor,
    num_bits: int = 8,
    unsigned: bool = False,
    narrow_range: bool = True,
) -> Tensor:
    """Return `inputs` rounded to integers of a scale; `amax` broadcasts over them.

    Raises ValueError for another dtype than fp32, bf16, fp16 and for bits that are not 2 to 16; on
    the CPU, for what `check_signs` finds (elsewhere an amax below 0 makes zeros, and unsigned
    integers begin at 0).
    """
    return integers(inputs, amax, num_bits, unsigned, narrow_range)


@typed_with_meta
def scaled_e4m3_impl(inputs: Tensor, amax: Tensor | None = None) -> Tensor:
    """Return `inputs` rounded to E4M3 with the scale of `amax`, which broadcasts over them; without
    amax unscaled.

    Raises ValueError for another dtype than fp32, bf16, fp16.
    """
    checks.check_values(inputs)
    if amax is not None:
        checks.check_broadcast(amax, inputs, "amax")
    return _e4m3(inputs.detach(), None if amax is None else amax.detach())


@typed_with_meta
def fp8_eager(x: Tensor, amax: Tensor | None) -> Tensor:
    """Return what `scaled_e4m3_impl` does, which is the same on every device.

    Raises ValueError as that does.
    """
    return scaled_e4m3_impl(x, amax)


@typed_with_meta
def fp4_cast_impl(x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """Return `x`, of any shape, rounded to the values of E2M1 without a scale, in `out_dtype` or
    its own dtype.

    -0.0 becomes 0.0, NaN -6, what lies beyond 6 becomes 6 with its sign.
    Raises ValueError for another dtype than fp32, bf16, fp16.
    """
    checks.check_values(x)
    checks.check_out_dtype(out_dtype)
    return _e2m1(x.detach(), out_dtype or x.dtype)


@typed_with_meta
def int_cast_impl(
    x: Tensor, num_bits: int, unsigned: bool = False, narrow_range: bool = True
) -> Tensor:
    """Return `x` rounded to integers of `num_bits` without a scale, in its own dtype.

    Raises ValueError for another dtype than fp32, bf16, fp16 and for bits that are not 2 to 16.
    """
    checks.check_values(x)
    least, most = checks.integer_range(num_bits, unsigned, narrow_range)
    return _int_cast(x.detach(), least, most)


@typed_with_meta
def static_fp4_scales(
    amax: Tensor,
    global_amax: Tensor | None = None,
    quantize_block_scales: bool = True,
    fp8_max_for_normalization: float = 448.0,
) -> Tensor:
    """Return fp32 s = fl(amax / 6) in the shape of `amax`, rounded to E4M3 with the scale of
    fl(fl(global_amax * (448 / fp8_max_for_normalization)) / 6) if `quantize_block_scales`.

    `global_amax` is the largest `amax` where it is not given.
    Raises ValueError for an amax that is none, a global amax that is not one number, and a number
    for normalization that is not positive.
    """
    checks.check_beside(amax, amax, "amax")
    checks.check_global(global_amax, amax)
    if not amax.numel() or not 0 < fp8_max_for_normalization < math.inf:
        raise ValueError(
            f"no scales of {amax.numel()} amax and a maximum of {fp8_max_for_normalization}"
        )
    scale = _over(amax.detach().float(), 6.0)
    if not quantize_block_scales:
        return scale
    top = amax.float().max() if global_amax is None else global_amax.float()
    return scaled_e4m3_impl(scale, _over(top * (448.0 / fp8_max_for_normalization), 6.0))


@typed_with_meta
def static_block_fp4_impl(
    x: Tensor,
    amax: Tensor,
    global_amax: Tensor | None = None,
    quantize_block_scales: bool = True,
    fp8_max_for_normalization: float = 448.0,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return `x` rounded to E2M1 in blocks, in `out_dtype` or its own dtype; the block of `amax`
    number i is the i-th of equal shares of `x` in its order of elements.

    Use 256 for `fp8_max_for_normalization` with four over six. -0.0 becomes 0.0; a scale that is no
    number is taken as 1, a NaN becomes -6 steps.
    Raises ValueError for another dtype than fp32, bf16, fp16, and for shares that are not whole.
    """
    checks.check_blocks(x, amax, global_amax)
    checks.check_out_dtype(out_dtype)
    scale = static_fp4_scales(amax, global_amax, quantize_block_scales, fp8_max_for_normalization)
    return _static(x.detach(), scale.to(x.device), out_dtype or x.dtype)
