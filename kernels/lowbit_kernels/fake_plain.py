"""Fake quantization, which rounds values and gives them back in their dtype: the arithmetic.

    integer   q = clamp(rne(fl(x * S)), least, most), y = fl(q / S)      S = fl(most / amax)
    E4M3      y = fl(e4m3(clamp(fl(x * S), +-448)) * fl(1 / S))          S = fl(fl(1 / amax) * 448)
    E2M1      y = e2m1(x)
    static    y = fl(e2m1(fl(|x| / s)) * s), with the sign of x          s: `static_fp4_scales`
    dynamic   y = what dequantizing gives after quantizing, by `nvfp4` and by `mx`

most = 2^(bits - 1) - 1, or 2^bits - 1 unsigned; least = -most, -most - 1 where the range is not
narrow, 0 where unsigned. All in fp32 with true divisions and one rounding to the dtype at the end,
on every device; a Python scalar divides nothing, so CPU and CUDA give the same bits. An amax of
2^-24 or less makes zeros of integers, and is taken as 1 for E4M3.

The functions here take no part in autograd; `fake_quant` holds those that do. Each is an operator
of torch (`torch.ops.lowbit`), which `torch.compile` calls and does not look into: bits stay.
Source: ModelOpt 0.47 `torch.quantization.tensor_quant` and `torch.kernels.quantization`. Theirs are
the bits of all but dynamic, which has the bits of our checkpoints: their kernel for NVFP4 replaces
a block scale below 1e-5 by 1, here it is that of `nvfp4`.
"""

import math
from typing import Any

import torch
from torch import Tensor

from lowbit_kernels import amax as amax_of
from lowbit_kernels import mx, mx_scales, nvfp4, rounding
from lowbit_kernels.formats import E2M1, E2M1_VALUES, E4M3, E5M2, Format

EPSILON = 2.0**-24  # no amax: the least that fp16 holds

# MX elements by (bits of exponent, bits of mantissa); those of six bits are in no checkpoint here.
E2M3 = Format("E2M3", 6, 7.5, 1.0, 0.125, "U8")
E3M2 = Format("E3M2", 6, 28.0, 0.25, 0.0625, "U8")
MX_ELEMENTS = {(4, 3): E4M3, (5, 2): E5M2, (2, 1): E2M1, (2, 3): E2M3, (3, 2): E3M2}
BLOCK_SIZES = (8, 16, 32)


def integer_range(num_bits: int, unsigned: bool, narrow_range: bool) -> tuple[float, float]:
    """Return the least and the largest integer of `num_bits`.

    Raises ValueError for bits that are not 2 to 16.
    """
    if not 2 <= num_bits <= 16:
        raise ValueError(f"an integer has 2 to 16 bits, not {num_bits}")
    most = 2.0 ** (num_bits - 1 + int(unsigned)) - 1.0
    return (0.0 if unsigned else -most - (0.0 if narrow_range else 1.0)), most


def _check(x: Tensor) -> None:
    if x.dtype not in amax_of.FLOATING:
        raise ValueError(f"values are float32, bfloat16 or float16, these are {x.dtype}")


def _over(x: Tensor, y: float) -> Tensor:
    """Return the true quotient fl(x / y): torch on CUDA multiplies by 1 / y."""
    return x / torch.full_like(x, y)


@torch.library.custom_op("lowbit::fake_integer", mutates_args=())
def _integer(x: Tensor, amax: Tensor, least: float, most: float) -> Tensor:
    amax = amax.float()
    scale = torch.full_like(amax, most) / amax
    none = amax <= EPSILON
    q = (x.float() * torch.where(none, 0.0, scale)).round().clamp(least, most)
    return (q / torch.where(none, 1.0, scale)).to(x.dtype)


@torch.library.custom_op("lowbit::fake_e4m3", mutates_args=())
def _e4m3(x: Tensor, amax: Tensor | None) -> Tensor:
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
    y = _e2m1_values(x.float().abs())
    return torch.where(x >= 0, y, -y).to(dtype)


@torch.library.custom_op("lowbit::fake_blocks_of_e2m1", mutates_args=())
def _static(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    blocks, s = x.float().reshape(scale.numel(), -1), scale.reshape(-1, 1)
    # A scale that is no number divides nothing; a zero leaves nothing.
    safe = torch.where((s == 0) | ~torch.isfinite(s), 1.0, s)
    y = _e2m1_values(blocks.abs() / safe) * safe
    y = torch.where(s == 0, 0.0, torch.where(blocks >= 0, y, -y))
    return y.to(dtype).reshape(x.shape)


def round_to(y: Tensor, element: Format, negative: Tensor) -> Tensor:
    """Return fp32 `y` rounded to a format of at most eight bits, with a sign where `negative`:
    nearest, ties to even, saturating; NaN stays.
    """
    mantissa = round(math.log2(element.min_normal / element.smallest))
    bits = y.abs().clamp(max=element.max).view(torch.int32)
    least = torch.tensor(element.min_normal).view(torch.int32).item()
    # Adding 2^(e + 23 - mantissa) leaves the bits that a number of exponent e keeps.
    magic = ((bits & 0x7F800000).clamp(min=int(least)) + ((23 - mantissa) << 23)).view(y.dtype)
    rounded = (bits.view(y.dtype) + magic) - magic
    return torch.where(torch.isnan(y), y, torch.where(negative, -rounded, rounded))


def _mx(x: Tensor, element: Format, block_size: int) -> Tensor:
    """Return `x [R, C]` after rounding to blocks of an MX format."""
    if block_size == mx.BLOCK and element.name in mx.TORCH:
        return mx.dequantize(*mx.quantize(x, element), x.dtype)
    code = mx_scales.scale_of(amax_of.blocks(x, block_size), element, "amax").unsqueeze(-1)
    blocks = x.contiguous().float().unflatten(-1, (x.shape[-1] // block_size, block_size))
    negative = blocks < 0 if element is E2M1 else torch.signbit(blocks)
    rounded = round_to(blocks * rounding.e8m0_reciprocal(code), element, negative)
    return (rounded * rounding.e8m0_value(code)).to(x.dtype).flatten(-2)


def _nvfp4(x: Tensor, amax: Tensor | None, block_size: int) -> Tensor:
    """Return `x [R, C]` after rounding to NVFP4 in blocks of `block_size`."""
    shared = None if amax is None else nvfp4.global_scale_of(amax.to(x.device).float().amax())
    if block_size == nvfp4.BLOCK:
        return nvfp4.dequantize(*nvfp4.quantize(x, shared), x.dtype)
    g = nvfp4.global_scale_of(amax_of.matrix(x)) if shared is None else shared
    step = nvfp4.scales_of(amax_of.blocks(x, block_size), g).float() * g
    blocks = x.contiguous().float().unflatten(-1, (x.shape[-1] // block_size, block_size))
    codes = rounding.unpack(nvfp4.encode(blocks, step)).int()
    values = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=x.device)[codes]
    return (values * step.unsqueeze(-1)).to(x.dtype).flatten(-2)


@torch.library.custom_op("lowbit::fake_dynamic_blocks", mutates_args=())
def _dynamic(
    x: Tensor, block_size: int, amax: Tensor | None, exponent: int, mantissa: int, e8m0: bool
) -> Tensor:
    if not x.numel():
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    cols = x.shape[-1]
    rows = torch.nn.functional.pad(x.reshape(-1, cols), (0, -cols % block_size))
    if e8m0:
        y = _mx(rows, MX_ELEMENTS[exponent, mantissa], block_size)
    else:
        y = _nvfp4(rows, amax, block_size)
    return y[:, :cols].reshape(x.shape).contiguous()


_SAME_DTYPE: tuple[Any, ...] = (_integer, _e4m3, _dynamic)
_OWN_DTYPE: tuple[Any, ...] = (_e2m1, _static)


def _shape(x: Tensor, *rest: Any) -> Tensor:
    """Return what has the shape and dtype of a result, for tracing."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _shape_of_dtype(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x, dtype=rest[-1], memory_format=torch.contiguous_format)


for _operator in _SAME_DTYPE:
    _operator.register_fake(_shape)
for _operator in _OWN_DTYPE:
    _operator.register_fake(_shape_of_dtype)


def check_signs(x: Tensor, amax: Tensor, unsigned: bool) -> None:
    """Raise ValueError for a negative amax, or negative values for unsigned integers, where they
    lie on the CPU: nothing waits for another device.
    """
    if torch.compiler.is_compiling() or amax.device.type != "cpu" or x.device.type != "cpu":
        return
    if (amax < 0).any():
        raise ValueError("amax is a magnitude, here some are negative")
    if unsigned and (x < 0).any():
        raise ValueError("unsigned integers hold no negative values, here are some")


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
    _check(inputs)
    least, most = integer_range(num_bits, unsigned, narrow_range)
    check_signs(inputs, amax, unsigned)
    return _integer(inputs.detach(), amax.detach(), least, most)


def scaled_e4m3_impl(inputs: Tensor, amax: Tensor | None = None) -> Tensor:
    """Return `inputs` rounded to E4M3 with the scale of `amax`, which broadcasts over them; without
    amax unscaled.

    Raises ValueError for another dtype than fp32, bf16, fp16.
    """
    _check(inputs)
    return _e4m3(inputs.detach(), None if amax is None else amax.detach())


def fp8_eager(x: Tensor, amax: Tensor | None) -> Tensor:
    """Return what `scaled_e4m3_impl` does, which is the same on every device."""
    return scaled_e4m3_impl(x, amax)


def fp4_cast_impl(x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """Return `x`, of any shape, rounded to the values of E2M1 without a scale, in `out_dtype` or
    its own dtype.

    -0.0 becomes 0.0, NaN -6, what lies beyond 6 becomes 6 with its sign.
    Raises ValueError for another dtype than fp32, bf16, fp16.
    """
    _check(x)
    return _e2m1(x.detach(), out_dtype or x.dtype)


def int_cast_impl(
    x: Tensor, num_bits: int, unsigned: bool = False, narrow_range: bool = True
) -> Tensor:
    """Return `x` rounded to integers of `num_bits` without a scale, in its own dtype.

    Raises ValueError for another dtype than fp32, bf16, fp16 and for bits that are not 2 to 16.
    """
    _check(x)
    least, most = integer_range(num_bits, unsigned, narrow_range)
    return x.detach().round().clamp(least, most)


def dynamic_block_quant_impl(
    inputs: Tensor,
    block_size: int,
    amax: Tensor | None,
    num_bits: tuple[int, int],
    scale_bits: tuple[int, int],
) -> Tensor:
    """Return `inputs [*, C]` rounded in blocks of `block_size` columns, each with the scale of its
    own amax.

    `num_bits` and `scale_bits` are (bits of exponent, of mantissa): (2, 1) with (4, 3) is NVFP4,
    whose global scale is that of the largest `amax`, or of the inputs without it; (4, 3), (5, 2),
    (2, 3), (3, 2) and (2, 1) with (8, 0) are MX, which look at no amax. A last block that is not
    whole is filled with zeros. NaN and Inf are those of `nvfp4` and `mx`.
    Raises ValueError for another dtype than fp32, bf16, fp16, no dimensions, a block that is not 8,
    16 or 32 columns, and formats that there are not.
    """
    _check(inputs)
    if inputs.dim() < 1 or block_size not in BLOCK_SIZES:
        raise ValueError(f"blocks are 8, 16 or 32 columns of [*, C], not {block_size}")
    element, scale = tuple(num_bits), tuple(scale_bits)
    if (element, scale) != ((2, 1), (4, 3)) and (scale != (8, 0) or element not in MX_ELEMENTS):
        known = ", ".join(map(str, MX_ELEMENTS))
        raise ValueError(
            f"no elements {num_bits} with scales {scale_bits}: "
            f"there is (2, 1) with (4, 3), and {known} with (8, 0)"
        )
    if amax is not None and not amax.numel():
        raise ValueError("amax holds no number")
    x, top = inputs.detach(), None if amax is None else amax.detach()
    return _dynamic(x, block_size, top, element[0], element[1], scale == (8, 0))


def static_fp4_scales(
    amax: Tensor,
    global_amax: Tensor | None = None,
    quantize_block_scales: bool = True,
    fp8_max_for_normalization: float = 448.0,
) -> Tensor:
    """Return fp32 s = fl(amax / 6) in the shape of `amax`, rounded to E4M3 with the scale of
    fl(fl(global_amax * (448 / fp8_max_for_normalization)) / 6) if `quantize_block_scales`.

    `global_amax` is the largest `amax` where it is not given.
    """
    scale = _over(amax.detach().float(), 6.0)
    if not quantize_block_scales:
        return scale
    top = amax.float().amax() if global_amax is None else global_amax.float()
    return scaled_e4m3_impl(scale, _over(top * (448.0 / fp8_max_for_normalization), 6.0))


def check_blocks(x: Tensor, amax: Tensor) -> None:
    """Raise ValueError unless `x` has a whole number of elements for each of `amax`."""
    _check(x)
    if not amax.numel() or x.numel() % amax.numel():
        raise ValueError(f"{x.numel()} values are no whole blocks for {amax.numel()} amax")


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
    check_blocks(x, amax)
    scale = static_fp4_scales(amax, global_amax, quantize_block_scales, fp8_max_for_normalization)
    return _static(x.detach(), scale, out_dtype or x.dtype)
