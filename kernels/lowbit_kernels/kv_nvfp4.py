"""Keys and values of attention in NVFP4, with scales in the tiles that tensor cores read.

    encode = min(fl(2688 / A), FLT_MAX)                                 A: amax of all; A = 0: 1
    scale = e4m3(min(fl(a * fl(encode * fl(1 / 6))), 448))              a: amax of 16 elements
    code = e2m1(fl(x * min(fl(1 / fl(scale * fl(1 / encode))), FLT_MAX)))
    x ~= fl(fl(value * scale) * global_scale)                           global_scale = fl(A / 2688)

| | of `x [tokens, heads, dim]` or `[rows, dim]`, bf16 or fp16 |
|---|---|
| packed | uint8, `x`'s shape with dim / 2, low nibble first |
| scale | E4M3 `[ceil(rows / 128) * 128, ceil(dim / 64) * 4]`, rows = tokens * heads, in tiles |
| global_scale | fp32, one number; 0 where all of `x` is zero |

Keys and values have nothing in common: each has its own global scale. Places in the tiles that
belong to no row or block hold zero. A block that is zero or underflows has scale 0. NaN and Inf are
those of `nvfp4_te`. Source: TransformerEngine 2.20 `pytorch/custom_recipes/reference_nvfp4.py` for
the arithmetic, cuBLAS' layout of block scaling factors for the tiles (`layout`).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lowbit_kernels import amax as amax_of
from lowbit_kernels import layout, nvfp4_te, rounding
from lowbit_kernels.checks import check_scale, check_tensor
from lowbit_kernels.jit import OPTIONS, jit, loadable, tl, use_kernel
from lowbit_kernels.layout import store_scales
from lowbit_kernels.nvfp4_te import _inverse, _signed_codes
from lowbit_kernels.rounding import encode_e4m3, magnitude_bits, pack_nibbles, widen
from lowbit_kernels.typed import typed

BLOCK = 16
LARGEST = 6.0 * 448.0


class Quantized(NamedTuple):
    """Keys or values in NVFP4."""

    packed: Tensor
    scale: Tensor
    global_scale: Tensor


def _check(x: Tensor, name: str) -> None:
    """Raise ValueError unless `x` can be quantized."""
    check_tensor(x, name)
    if x.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"{name} is bfloat16 or float16, this is {x.dtype}")
    if x.dim() not in (2, 3):
        raise ValueError(f"{name} is [tokens, heads, dim] or [rows, dim], this is {list(x.shape)}")
    if not x.numel():
        raise ValueError(f"{name} has no elements: {list(x.shape)}")
    rows = x.shape[:-1].numel()
    if x.shape[-1] % BLOCK:
        raise ValueError(f"the last dimension of {name}, {x.shape[-1]}, is no multiple of 16")
    if rows % BLOCK:
        raise ValueError(f"the {rows} rows of {name} {list(x.shape)} are no multiple of 16")


def _quantize_reference(rows: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Return packed codes and scales in tiles of `rows [R, C]`; `amax` is that of all."""
    blocks = rows.contiguous().float().unflatten(-1, (-1, BLOCK))
    packed, scale = nvfp4_te.quantize_blocks(blocks, amax, tall=False)
    return packed, layout.swizzle(scale)


@jit
def _kv_kernel(
    x_ptr,  # [blocks, 16] fp16, or bf16 as int16
    packed_ptr,  # [blocks] int64
    scale_ptr,  # tiles of E4M3 as uint8
    amax_ptr,  # fp32, one number
    blocks,
    rows,
    across,  # blocks of a row
    BF16: tl.constexpr,
    TILE: tl.constexpr,
):
    """Quantize TILE blocks and store their scales where they belong in the tiles."""
    first = tl.program_id(0).to(tl.int64) * TILE
    index = tl.arange(0, TILE)
    mask = index < blocks - first
    column = tl.arange(0, 8)[None, :]
    offset = first * 16 + index[:, None] * 16 + column
    low = widen(tl.load(x_ptr + offset, mask=mask[:, None], other=0), BF16)
    high = widen(tl.load(x_ptr + offset + 8, mask=mask[:, None], other=0), BF16)
    top = tl.max(tl.maximum(magnitude_bits(low), magnitude_bits(high)), axis=1)

    amax = tl.load(amax_ptr)
    encode = tl.math.div_rn(2688.0, amax)
    encode = tl.where(encode > 3.4028234663852886e38, 3.4028234663852886e38, encode)
    encode = tl.where((amax == 0) | (encode == 0), 1.0, encode)
    sixth = encode * tl.math.div_rn(1.0, 6.0)
    code = encode_e4m3(tl.cast(top, tl.float32, bitcast=True) * sixth)
    store_scales(scale_ptr, code, first, index, mask, rows, across, True)

    inverse = _inverse(code, tl.math.div_rn(1.0, encode))[:, None]
    low_word = pack_nibbles(_signed_codes(low, inverse), column, 1)
    high_word = pack_nibbles(_signed_codes(high, inverse), column, 1)
    word = (low_word.to(tl.int64) & 0xFFFFFFFF) | (high_word.to(tl.int64) << 32)
    tl.store(packed_ptr + first + index, word, mask=mask)


def _launch(rows: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    across, tile = rows.shape[1] // BLOCK, 128
    packed = torch.empty((rows.shape[0], across * 8), dtype=torch.uint8, device=rows.device)
    shape = (rows.shape[0], across)
    scale = layout.room(shape, torch.float8_e4m3fn, rows.device, True)
    blocks = rows.shape[0] * across
    with torch.cuda.device_of(rows):
        _kv_kernel[(-(-blocks // tile),)](
            loadable(rows),
            packed.view(torch.int64),
            scale.view(torch.uint8),
            amax,
            blocks,
            rows.shape[0],
            across,
            BF16=rows.dtype == torch.bfloat16,
            TILE=tile,
            **OPTIONS,
        )
    return packed, scale


@typed
def quantize(x: Tensor, name: str = "x") -> Quantized:
    """Quantize `x [tokens, heads, dim]` or `[rows, dim]`, bf16 or fp16; `name` is what it is called
    in errors.

    Raises ValueError for another dtype or rank, no elements, a dim or a number of rows (tokens *
    heads) that is no multiple of 16.
    """
    _check(x, name)
    rows = x.reshape(-1, x.shape[-1])
    amax = amax_of.matrix(rows)
    run = _launch if use_kernel(rows) else _quantize_reference
    packed, scale = run(rows, amax)
    global_scale = amax / torch.full_like(amax, LARGEST)
    return Quantized(packed.reshape(*x.shape[:-1], x.shape[-1] // 2), scale, global_scale)


@typed
def quantize_kv(k: Tensor, v: Tensor) -> tuple[Quantized, Quantized]:
    """Quantize keys and values, each by itself; they may differ in shape, dtype and device.

    Raises ValueError as `quantize` does, before either is quantized.
    """
    _check(k, "K")
    _check(v, "V")
    return quantize(k, "K"), quantize(v, "V")


@typed
def scale_offset(row: int, block: int, dim: int) -> int:
    """Return at which byte of the tiles the scale of 16 elements lies: those from `16 * block` on
    in `row` (token * heads + head) of rows with `dim` elements.

    Raises ValueError for a row or a block that there is not, and a dim that is no multiple of 16.
    """
    if dim % BLOCK:
        raise ValueError(f"dim is a multiple of 16, not {dim}")
    blocks = dim // BLOCK
    if row < 0 or not 0 <= block < blocks:
        raise ValueError(f"there is no block {block} of row {row} with {dim} elements")
    tile = row // 128 * -(-blocks // 4) + block // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4


@typed
def swizzle(scale: Tensor) -> Tensor:
    """Return one-byte scales `[rows, dim / 16]` in tiles, padded with zeros to whole ones.

    Raises ValueError for what is no matrix of one-byte scales.
    """
    return layout.swizzle(scale)


@typed
def unswizzle(scale: Tensor, rows: int, dim: int) -> Tensor:
    """Return the scales `[rows, dim / 16]` of tiles.

    Raises ValueError for tiles that are not those of `rows` and `dim`.
    """
    if rows < 1 or dim < 1 or dim % BLOCK:
        raise ValueError(f"rows is a number, dim a multiple of 16, not {rows} and {dim}")
    return layout.unswizzle(scale, rows, dim // BLOCK)


def _e2m1_values(device: torch.device) -> Tensor:
    """Return the sixteen values of E2M1, fp32, made on the device: a copy would stop its queue."""
    code = torch.arange(16, device=device)
    exponent, mantissa = (code >> 1) & 3, code & 1
    doubled = torch.where(exponent > 0, (2 + mantissa) << (exponent - 1).clamp(min=0), mantissa)
    return doubled.float() * torch.where(code < 8, 0.5, -0.5)


@typed
def dequantize(
    packed: Tensor,
    scale: Tensor,
    global_scale: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Return fl(fl(value * scale) * global_scale) in `dtype` and the shape that was quantized;
    without a global scale fl(value * scale), for readers that multiply by it later.

    Raises ValueError for parts that do not belong together, and another dtype than fp32, bf16,
    fp16.
    """
    if packed.dtype != torch.uint8 or packed.dim() not in (2, 3) or packed.shape[-1] % 8:
        raise ValueError(
            "packed is uint8 of [tokens, heads, dim / 2] or [rows, dim / 2] with a dim of whole "
            f"blocks of 16, this is {packed.dtype} {list(packed.shape)}"
        )
    if dtype not in amax_of.FLOATING:
        raise ValueError(f"values come as float32, bfloat16 or float16, not as {dtype}")
    rows, blocks = packed.shape[:-1].numel(), packed.shape[-1] // 8
    tiles = layout.swizzled_shape(rows, blocks)
    check_scale(scale, tiles, packed.device, torch.float8_e4m3fn, "scale in tiles")
    linear = layout.unswizzle(scale, rows, blocks).float().unsqueeze(-1)
    codes = rounding.unpack(packed).reshape(rows, blocks, BLOCK)
    values = _e2m1_values(packed.device)[codes.int()] * linear
    if global_scale is not None:
        if global_scale.numel() != 1 or global_scale.dtype != torch.float32:
            found = f"{global_scale.dtype} {list(global_scale.shape)}"
            raise ValueError(f"a global scale is one fp32 number, not {found}")
        values = values * global_scale.reshape(()).to(packed.device)
    return values.to(dtype).reshape(*packed.shape[:-1], packed.shape[-1] * 2)
