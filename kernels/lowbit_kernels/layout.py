"""Byte layouts that consumers use: scales swizzled 128 x 4, and which nibble comes first.

Swizzled 128 x 4, as tensor cores read block scales: scales `[R, C]` are padded with zero bytes to
multiples of 128 rows and 4 columns, and scale (r, c) lies at byte

    ((r // 128) * ceil(C / 4) + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4

| function | from | to |
|---|---|---|
| `swizzle` | bytes `[*, R, C]` | bytes `[*, ceil(R/128) * 128, ceil(C/4) * 4]` |
| `unswizzle` | that, and rows, cols | bytes `[*, R, C]` |
| `swap_nibbles` | packed bytes, low nibble first | high nibble first, and back |

Nothing is rounded. A stack is laid out matrix by matrix.
Source: cuBLAS, block scaling factors layout; the same in TransformerEngine `common/swizzle`.
"""

import torch
from torch import Tensor
from torch.nn import functional


def swizzle(scale: Tensor) -> Tensor:
    """Return one-byte scales `[*, R, C]` swizzled, padded to whole tiles, in the same dtype.

    Raises ValueError for scales that are not one byte each.
    """
    codes = _bytes(scale)
    rows, cols = codes.shape[-2:]
    padded = functional.pad(codes, (0, -cols % 4, 0, -rows % 128))
    tiles = padded.unflatten(-1, (padded.shape[-1] // 4, 4))
    tiles = tiles.unflatten(-3, (padded.shape[-2] // 128, 4, 32))
    # [.., row tile, row // 32, row % 32, column tile, column]
    tiles = tiles.movedim(-2, -4).transpose(-3, -2)
    return tiles.reshape(padded.shape).view(scale.dtype)


def unswizzle(scale: Tensor, rows: int, cols: int) -> Tensor:
    """Return the one-byte scales `[*, rows, cols]` of swizzled ones, in the same dtype.

    Raises ValueError for scales that are not one byte each, or that are no whole tiles of these
    rows and columns.
    """
    codes = _bytes(scale)
    high, wide = rows + -rows % 128, cols + -cols % 4
    if codes.shape[-2:] != (high, wide):
        raise ValueError(f"{list(codes.shape[-2:])} are not the tiles of {rows} x {cols} scales")
    tiles = codes.reshape(*codes.shape[:-2], high // 128, wide // 4, 32, 4, 4)
    tiles = tiles.transpose(-3, -2).movedim(-4, -2)
    linear = tiles.reshape(codes.shape)[..., :rows, :cols]
    return linear.contiguous().view(scale.dtype)


def swap_nibbles(packed: Tensor) -> Tensor:
    """Return packed uint8 with the two nibbles of each byte exchanged."""
    return (packed >> 4) | (packed << 4)


def _bytes(scale: Tensor) -> Tensor:
    if scale.element_size() != 1 or scale.dim() < 2:
        raise ValueError(f"scales are [*, rows, cols] of a byte each, not {scale.dtype}")
    return scale.contiguous().view(torch.uint8)
