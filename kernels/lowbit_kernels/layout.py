"""Byte layouts that consumers use: scales swizzled 128 x 4, and which nibble comes first.

Swizzled 128 x 4, as tensor cores read block scales: scales `[R, C]` are padded with zero bytes to
multiples of 128 rows and 4 columns, and scale (r, c) lies at byte

    ((r // 128) * ceil(C / 4) + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4

| function | from | to |
|---|---|---|
| `swizzle` | bytes `[*, R, C]` | bytes `[*, ceil(R/128) * 128, ceil(C/4) * 4]` |
| `unswizzle` | that, and rows, cols | bytes `[*, R, C]` |
| `swap_nibbles` | packed bytes, low nibble first | high nibble first, and back |

`nvfp4.quantize` and `mx.quantize` store both as they go (`layout="128x4"`, `nibbles="high"`), with
the bytes that these make afterwards. Nothing is rounded. A stack is laid out matrix by matrix.
Source: cuBLAS, block scaling factors layout; the same in TransformerEngine `common/swizzle`.
"""

import torch
from torch import Tensor
from torch.nn import functional

from lowbit_kernels.jit import jit, tl, use_kernel
from lowbit_kernels.typed import typed

LAYOUTS, NIBBLES = ("linear", "128x4"), ("low", "high")


def _swizzle_reference(codes: Tensor) -> Tensor:
    """Return bytes `[*, R, C]` swizzled."""
    rows, cols = codes.shape[-2:]
    padded = functional.pad(codes, (0, -cols % 4, 0, -rows % 128))
    tiles = padded.unflatten(-1, (padded.shape[-1] // 4, 4))
    tiles = tiles.unflatten(-3, (padded.shape[-2] // 128, 4, 32))
    # [.., row tile, row // 32, row % 32, column tile, column]
    tiles = tiles.movedim(-2, -4).transpose(-3, -2)
    return tiles.reshape(padded.shape)


def _unswizzle_reference(codes: Tensor, rows: int, cols: int) -> Tensor:
    """Return bytes `[*, rows, cols]` of swizzled ones."""
    high, wide = codes.shape[-2:]
    tiles = codes.reshape(*codes.shape[:-2], high // 128, wide // 4, 32, 4, 4)
    tiles = tiles.transpose(-3, -2).movedim(-4, -2)
    return tiles.reshape(codes.shape)[..., :rows, :cols].contiguous()


@jit
def _place(row, col, wide):
    """Return where the scale (row, col) of a matrix lies; `wide` is how many tiles are in a row."""
    tile = (row // 128) * wide + col // 4
    return tile * 512 + (row % 32) * 16 + ((row % 128) // 32) * 4 + col % 4


@jit
def store_scales(scale_ptr, code, first, index, mask, rows, across, SWIZZLED: tl.constexpr):
    """Store the codes of blocks first + index of a stack of matrices with `rows` rows of `across`
    blocks each.
    """
    if SWIZZLED:
        # In 32 bits, where a division is cheap: a place of 64 is made of it last.
        block = first.to(tl.int32) + index
        row, wide = block // across, (across + 3) // 4
        matrix = (row // rows).to(tl.int64) * (((rows + 127) // 128) * wide * 512)
        place = matrix + _place(row % rows, block % across, wide)
        tl.store(scale_ptr + place, code.to(tl.uint8), mask=mask)
    else:
        tl.store(scale_ptr + first + index, code.to(tl.uint8), mask=mask)


@jit
def _swizzle_kernel(
    linear_ptr,  # [matrices, rows, cols] uint8
    swizzled_ptr,  # [matrices, tiles down, tiles in a row, 512] uint8
    rows,
    cols,
    down,  # tiles in a column
    wide,  # and in a row
    programs,  # in a row
    BACK: tl.constexpr,
    TILES: tl.constexpr,
):
    """Move TILES tiles of 128 x 4 scales in a row, into their places or BACK."""
    line = tl.program_id(0) // programs
    first = tl.program_id(0) % programs * TILES
    matrix = (line // down).to(tl.int64)
    row = line % down * 128 + tl.arange(0, 128)[:, None]
    col = first * 4 + tl.arange(0, TILES * 4)[None, :]
    inside = (row < rows) & (col < cols)
    linear_ptr += matrix * rows * cols + row.to(tl.int64) * cols + col
    index = tl.arange(0, TILES * 512)
    there = first + index // 512 < wide
    swizzled_ptr += (line.to(tl.int64) * wide + first) * 512 + index
    if BACK:
        tiles = tl.reshape(tl.load(swizzled_ptr, mask=there, other=0), [TILES, 32, 4, 4])
        tiles = tl.reshape(tl.permute(tiles, (2, 1, 0, 3)), [128, TILES * 4])
        tl.store(linear_ptr, tiles, mask=inside)
    else:
        tiles = tl.reshape(tl.load(linear_ptr, mask=inside, other=0), [4, 32, TILES, 4])
        tiles = tl.reshape(tl.permute(tiles, (2, 1, 0, 3)), [TILES * 512])
        tl.store(swizzled_ptr, tiles, mask=there)


def _launch(linear: Tensor, swizzled: Tensor, back: bool) -> None:
    down, wide = swizzled.shape[-2] // 128, swizzled.shape[-1] // 4
    lines, tiles = swizzled.shape[:-2].numel() * down, 8
    programs = -(-wide // tiles)
    with torch.cuda.device_of(linear):
        _swizzle_kernel[(lines * programs,)](
            linear,
            swizzled,
            linear.shape[-2],
            linear.shape[-1],
            down,
            wide,
            programs,
            BACK=back,
            TILES=tiles,
            num_warps=8,
        )


def can_fuse(rows: int, across: int, matrices: int) -> bool:
    """Say whether kernels of `matrices` with `rows` rows of `across` blocks can store their scales
    swizzled: they count all blocks, the padded scales of a matrix and the words of 128 rows in 32
    bits. Who cannot arranges afterwards.
    """
    high, wide = swizzled_shape(rows, across)
    return matrices * rows * across < 2**31 and high * wide < 2**31 and across < 2**21


@typed
def swizzled_shape(rows: int, cols: int) -> tuple[int, int]:
    """Return the rows and columns of whole tiles that hold `rows` x `cols` scales.

    Raises ValueError for fewer than none.
    """
    if rows < 0 or cols < 0:
        raise ValueError(f"there are no {rows} x {cols} scales")
    return rows + -rows % 128, cols + -cols % 4


def room(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, swizzled: bool
) -> Tensor:
    """Return memory for scales of `shape`, linear or swizzled; zero where tiles are padded."""
    if not swizzled:
        return torch.empty(shape, dtype=dtype, device=device)
    whole = swizzled_shape(*shape[-2:])
    make = torch.empty if whole == tuple(shape[-2:]) else torch.zeros
    return make((*shape[:-2], *whole), dtype=torch.uint8, device=device).view(dtype)


@typed
def swizzle(scale: Tensor) -> Tensor:
    """Return one-byte scales `[*, R, C]` swizzled, padded to whole tiles, in the same dtype.

    Raises ValueError for scales that are not one byte each.
    """
    codes = _bytes(scale)
    if not use_kernel(codes):
        return _swizzle_reference(codes).view(scale.dtype)
    shape = (*codes.shape[:-2], *swizzled_shape(*codes.shape[-2:]))
    out = torch.empty(shape, dtype=torch.uint8, device=codes.device)
    _launch(codes, out, back=False)
    return out.view(scale.dtype)


@typed
def unswizzle(scale: Tensor, rows: int, cols: int) -> Tensor:
    """Return the one-byte scales `[*, rows, cols]` of swizzled ones, in the same dtype.

    Raises ValueError for scales that are not one byte each, or that are no whole tiles of these
    rows and columns.
    """
    codes = _bytes(scale)
    high, wide = swizzled_shape(rows, cols)
    if codes.shape[-2:] != (high, wide):
        raise ValueError(f"{list(codes.shape[-2:])} are not the tiles of {rows} x {cols} scales")
    if not use_kernel(codes):
        return _unswizzle_reference(codes, rows, cols).view(scale.dtype)
    out = torch.empty((*codes.shape[:-2], rows, cols), dtype=torch.uint8, device=codes.device)
    if out.numel():
        _launch(out, codes, back=True)
    return out.view(scale.dtype)


@typed
def swap_nibbles(packed: Tensor) -> Tensor:
    """Return packed uint8, of any shape, with the two nibbles of each byte exchanged.

    Raises ValueError for another dtype.
    """
    if packed.dtype != torch.uint8:
        raise ValueError(f"nibbles are two to a byte of uint8, this is {packed.dtype}")
    return (packed >> 4) | (packed << 4)


def check(layout: str, nibbles: str = "low") -> None:
    """Raise ValueError for a layout of scales or an order of nibbles that there is not."""
    if layout not in LAYOUTS:
        raise ValueError(f"no layout {layout!r} for scales; there is {', '.join(LAYOUTS)}")
    if nibbles not in NIBBLES:
        raise ValueError(f"the low or the high nibble comes first, not {nibbles!r}")


def arrange(packed: Tensor, scale: Tensor, layout: str, nibbles: str) -> tuple[Tensor, Tensor]:
    """Return canonical data and scales in a layout and order of nibbles."""
    packed = swap_nibbles(packed) if nibbles == "high" else packed
    return packed, swizzle(scale) if layout == "128x4" else scale


def _bytes(scale: Tensor) -> Tensor:
    if scale.element_size() != 1 or scale.dim() < 2:
        raise ValueError(f"scales are [*, rows, cols] of a byte each, not {scale.dtype}")
    return scale.contiguous().view(torch.uint8)
