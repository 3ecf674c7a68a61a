"""Fake quantization in blocks that have a scale of their own: NVFP4 and the MX formats.

    y = what dequantizing gives after quantizing, by `nvfp4` and by `mx`

| | elements | scales | blocks that run in kernels on CUDA |
|---|---|---|---|
| NVFP4 | E2M1 | E4M3 and one fp32 for all | 16 |
| MXFP8, MXFP6, MXFP4 | E4M3, E5M2; E2M3, E3M2; E2M1 | E8M0 | 32, not of MXFP6 |

The values are those of a checkpoint written here. Source: ModelOpt 0.47
`torch.kernels.quantization` for names and parameters; its kernel for NVFP4 replaces a block scale
below 1e-5 by 1, here it is that of `nvfp4`.
"""

import math

import torch
from torch import Tensor

from lowbit_kernels import amax as amax_of
from lowbit_kernels import fake_checks, fake_plain, mx, mx_scales, nvfp4, rounding
from lowbit_kernels.formats import E2M1, E2M1_VALUES, E4M3, E5M2, Format
from lowbit_kernels.typed import typed_with_meta

# MX elements by (bits of exponent, bits of mantissa); those of six bits are in no checkpoint here.
E2M3 = Format("E2M3", 6, 7.5, 1.0, 0.125, "U8")
E3M2 = Format("E3M2", 6, 28.0, 0.25, 0.0625, "U8")
MX_ELEMENTS = {(4, 3): E4M3, (5, 2): E5M2, (2, 1): E2M1, (2, 3): E2M3, (3, 2): E3M2}
BLOCK_SIZES = (8, 16, 32)


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


fake_plain.traced(_dynamic, fake_plain.same_shape)


@typed_with_meta
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
    fake_checks.check_values(inputs)
    if inputs.dim() < 1:
        raise ValueError("blocks are of [*, C], a number has none")
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"blocks are 8, 16 or 32 columns, not {block_size}")
    element, scale = tuple(num_bits), tuple(scale_bits)
    if (element, scale) != ((2, 1), (4, 3)) and (scale != (8, 0) or element not in MX_ELEMENTS):
        known = ", ".join(map(str, MX_ELEMENTS))
        raise ValueError(
            f"no elements {num_bits} with scales {scale_bits}: "
            f"there is (2, 1) with (4, 3), and {known} with (8, 0)"
        )
    if amax is not None:
        fake_checks.check_beside(amax, inputs, "amax")
        if not amax.numel():
            raise ValueError(f"amax holds no number: {amax.dtype} {list(amax.shape)}")
    x, top = inputs.detach(), None if amax is None else amax.detach()
    return _dynamic(x, block_size, top, element[0], element[1], scale == (8, 0))
