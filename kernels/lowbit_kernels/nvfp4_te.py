"""NVFP4 in TransformerEngine's order of operations: four over six, 16 x 16 tiles.

With A the matrix's amax, a the block's, E the largest scale (256 for four over six, 448 else):

    encode = min(fl(6 E / A), FLT_MAX)                 A = 0, or this 0: 1
    base = fl(a * fl(encode * fl(1 / 6)))              four over six: fl(fl(a / 6) * encode)
    scale = e4m3(min(base, 448))
    inverse = min(fl(1 / fl(scale * fl(1 / encode))), FLT_MAX)
    code = e2m1(fl(w * inverse))

Four over six makes a second candidate, scale = e4m3(min(fl(1.5 * base), 448)), with which the
largest value becomes 4 and not 6; its errors fl(fl(fl(value * scale) * A) / (6 E)) - w are squared,
summed from left to right, and it is taken where the sum is strictly less. A tile of 16 x 16 takes
its amax over 16 rows and repeats its scale on each of them, so that readers see blocks of 1 x 16.
A reader multiplies by global_scale = fl(A / (6 E)). A block that is zero or underflows has scale 0.
A matrix that holds a NaN has global_scale NaN, scales 0x7F and magnitudes 7. One that holds an Inf
and no NaN has global_scale Inf, and codes and scales as if encode were 1: 448 and 7 where the Inf
is. Every element of either decodes to NaN or Inf.
Source: TransformerEngine 2.20 `pytorch/custom_recipes/reference_nvfp4.py`.
"""

import torch
from torch import Tensor
from torch.nn import functional

from lowbit_kernels import rounding
from lowbit_kernels.formats import E2M1_VALUES
from lowbit_kernels.jit import OPTIONS, jit, loadable, tl
from lowbit_kernels.rounding import (
    decode_e2m1,
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
    magnitude_bits,
    widen,
)

BLOCK = 16
FLT_MAX = torch.finfo(torch.float32).max


def global_scale_of(amax: Tensor, largest: float) -> Tensor:
    """Return fp32 fl(amax / (6 * largest)) of fp32 `amax`: 1 for 0, never 0."""
    scale = amax / torch.full_like(amax, 6.0 * largest)
    scale = torch.where(scale == 0, 2.0**-149, scale)
    return torch.where(amax == 0, 1.0, scale)


def _encode_scale(amax: Tensor, largest: float) -> Tensor:
    """Return what TransformerEngine multiplies block scales by, with two axes more than `amax`."""
    encode = (torch.full_like(amax, 6.0 * largest) / amax).clamp(max=FLT_MAX)
    return torch.where((amax == 0) | (encode == 0), 1.0, encode)[..., None, None]


def _codes(x: Tensor, scale: Tensor, encode: Tensor) -> Tensor:
    """Return E2M1 codes, one each, of blocks `x [..., 16]`."""
    step = scale.float() * (torch.ones_like(encode) / encode)
    inverse = (torch.ones_like(step) / step).clamp(max=FLT_MAX).unsqueeze(-1)
    return rounding.to_e2m1(x * inverse, x < 0)


def _squared_error(x: Tensor, codes: Tensor, scale: Tensor, amax: Tensor, largest: float) -> Tensor:
    values = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=x.device)[codes.int()]
    whole = amax[..., None, None, None]
    value = values * scale.float().unsqueeze(-1) * whole
    d = value / torch.full_like(value, 6.0 * largest) - x
    squares = d * d
    total = squares[..., 0]
    for i in range(1, BLOCK):
        total = total + squares[..., i]
    return total


def quantize_four_over_six(
    x: Tensor, amax: Tensor, largest: float = 256.0
) -> tuple[Tensor, Tensor]:
    """Return packed codes and E4M3 scales of blocks `x [*, R, C/16, 16]`; `amax [*]`."""
    encode = _encode_scale(amax, largest)
    block_amax = x.abs().amax(-1)
    base = block_amax / torch.full_like(block_amax, 6.0) * encode
    six = rounding.to_e4m3(base.clamp(max=448.0))
    four = rounding.to_e4m3((base * 1.5).clamp(max=448.0))
    codes_six, codes_four = _codes(x, six, encode), _codes(x, four, encode)
    error_six = _squared_error(x, codes_six, six, amax, largest)
    error_four = _squared_error(x, codes_four, four, amax, largest)
    better = error_four < error_six
    codes = torch.where(better.unsqueeze(-1), codes_four, codes_six)
    scale = torch.where(better, four.view(torch.uint8), six.view(torch.uint8))
    return rounding.pack(codes).flatten(-2), scale.view(torch.float8_e4m3fn)


def quantize_blocks(x: Tensor, amax: Tensor, tall: bool) -> tuple[Tensor, Tensor]:
    """Return packed codes and E4M3 scales of blocks `x [*, R, C/16, 16]`; `amax [*]`.

    `tall`: a scale is shared by 16 rows.
    """
    encode = _encode_scale(amax, 448.0)
    block_amax = x.abs().amax(-1)
    if tall:
        rows = x.shape[-3]
        padded = functional.pad(block_amax, (0, 0, 0, -rows % BLOCK))
        tiles = padded.unflatten(-2, (padded.shape[-2] // BLOCK, BLOCK)).amax(-2)
        block_amax = tiles.repeat_interleave(BLOCK, dim=-2)[..., :rows, :]
    sixth = torch.ones_like(encode) / torch.full_like(encode, 6.0)
    scale = rounding.to_e4m3((block_amax * (encode * sixth)).clamp(max=448.0))
    return rounding.pack(_codes(x, scale, encode)).flatten(-2), scale


@jit
def _inverse(code, back):
    """Return what elements are multiplied by under E4M3 scales; `back` is fl(1 / encode)."""
    step = decode_e4m3(code) * back
    inverse = tl.math.div_rn(tl.full(step.shape, 1.0, tl.float32), step)
    return tl.where(inverse > 3.4028234663852886e38, 3.4028234663852886e38, inverse)


@jit
def _signed_codes(x, inverse):
    """Return E2M1 codes 0 to 15 of x."""
    return encode_e2m1(tl.abs(x * inverse)) | tl.where(x < 0, 8, 0)


@jit
def _square(x, codes, scale, amax, DIVISOR: tl.constexpr):
    """Return squared errors of x."""
    value = decode_e2m1(codes) * scale * amax
    d = tl.math.div_rn(value, tl.full(value.shape, DIVISOR, tl.float32)) - x
    return d * d


@jit
def _te_kernel(
    w_ptr,  # [matrices, rows, across, 16] fp32, fp16, or bf16 as int16
    packed_ptr,  # [matrices, rows, across] int64
    scale_ptr,  # [matrices, rows, across] E4M3 as uint8
    amax_ptr,  # [matrices] fp32
    rows,
    across,  # blocks of a row
    down,  # tiles in a column
    wide,  # and in a row
    BF16: tl.constexpr,
    TALL: tl.constexpr,
    DIVISOR: tl.constexpr,  # 6 E
    WIDE: tl.constexpr,
):
    """Quantize a tile of 16 rows and WIDE blocks: 16 x 16 where TALL, else four over six."""
    tile = tl.program_id(0)
    matrix = (tile // (down * wide)).to(tl.int64)
    row = (tile // wide) % down * 16 + tl.arange(0, 16)[:, None]
    block = tile % wide * WIDE + tl.arange(0, WIDE)[None, :]
    mask = (row < rows) & (block < across)
    place = (matrix * rows + row) * across + block
    w_ptr += place * 16
    top = tl.zeros([16, WIDE], tl.int32)
    for i in range(16):
        x = widen(tl.load(w_ptr + i, mask=mask, other=0), BF16)
        top = tl.maximum(top, magnitude_bits(x))
    if TALL:
        top = tl.broadcast_to(tl.max(top, axis=0, keep_dims=True), [16, WIDE])
    a = top.to(tl.float32, bitcast=True)

    amax = tl.load(amax_ptr + matrix)
    encode = tl.math.div_rn(DIVISOR, amax)
    encode = tl.where(encode > 3.4028234663852886e38, 3.4028234663852886e38, encode)
    encode = tl.where((amax == 0) | (encode == 0), 1.0, encode)
    back = tl.math.div_rn(1.0, encode)
    if TALL:
        six = encode_e4m3(a * (encode * tl.math.div_rn(1.0, 6.0)))
        four = six
    else:
        base = tl.math.div_rn(a, tl.full([16, WIDE], 6.0, tl.float32)) * encode
        six, four = encode_e4m3(base), encode_e4m3(base * 1.5)
    inverse, inverse_four = _inverse(six, back), _inverse(four, back)
    word = tl.zeros([16, WIDE], tl.int64)
    error = tl.zeros([16, WIDE], tl.float32)
    word_four, error_four = word, error
    for i in range(16):
        x = widen(tl.load(w_ptr + i, mask=mask, other=0), BF16)
        codes = _signed_codes(x, inverse)
        word |= codes.to(tl.int64) << (i * 4)
        if not TALL:
            codes_four = _signed_codes(x, inverse_four)
            word_four |= codes_four.to(tl.int64) << (i * 4)
            error += _square(x, codes, decode_e4m3(six), amax, DIVISOR)
            error_four += _square(x, codes_four, decode_e4m3(four), amax, DIVISOR)
    if not TALL:
        better = error_four < error
        word = tl.where(better, word_four, word)
        six = tl.where(better, four, six)
    tl.store(packed_ptr + place, word, mask=mask)
    tl.store(scale_ptr + place, six.to(tl.uint8), mask=mask)


def launch(w: Tensor, amax: Tensor, largest: float, tall: bool) -> tuple[Tensor, Tensor]:
    """Return packed codes and E4M3 scales of `w [*, R, C]` by the kernel; `amax [*]`."""
    rows, across = w.shape[-2], w.shape[-1] // BLOCK
    packed = torch.empty((*w.shape[:-1], across * 8), dtype=torch.uint8, device=w.device)
    shape = (*w.shape[:-1], across)
    scale = torch.empty(shape, dtype=torch.float8_e4m3fn, device=w.device)
    down, wide = -(-rows // BLOCK), -(-across // 8)
    with torch.cuda.device_of(w):
        _te_kernel[(w.shape[:-2].numel() * down * wide,)](
            loadable(w),
            packed.view(torch.int64),
            scale.view(torch.uint8),
            amax.contiguous(),
            rows,
            across,
            down,
            wide,
            BF16=w.dtype == torch.bfloat16,
            TALL=tall,
            DIVISOR=6.0 * largest,
            WIDE=8,
            **OPTIONS,
        )
    return packed, scale
