"""The kernels of `fp4_pairs`, which holds their arithmetic, and when they can be used."""

# Triton's stubs know neither constants as assembly nor that a reduction gives a tensor.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

import torch
from torch import Tensor

from lowbit_kernels.fp4_pairs import quantize_mxfp4_pairs, quantize_pairs
from lowbit_kernels.jit import OPTIONS, capability, jit, tl, version

LOOKED_AT = ((3, 6), (3, 9))  # Triton releases, the first and the last


@jit
def _nvfp4_pairs_kernel(
    w_ptr,  # [matrices, blocks, 8] int32, two elements each
    packed_ptr,  # [matrices, blocks] int64
    scale_ptr,  # [matrices, blocks] E4M3 as uint8
    global_scale_ptr,  # [matrices] fp32
    blocks,
    programs,
    BF16: tl.constexpr,
    HIGH: tl.constexpr,
    TILE: tl.constexpr,
    FEW: tl.constexpr,
):
    """Quantize TILE blocks."""
    matrix = (tl.program_id(0) // programs).to(tl.int64)
    start = (tl.program_id(0) % programs).to(tl.int64) * TILE
    first = matrix * blocks + start
    quantize_pairs(
        w_ptr + first * 8,
        packed_ptr + first,
        scale_ptr + first,
        tl.load(global_scale_ptr + matrix),
        blocks - start,
        1,
        1,
        BF16,
        False,
        HIGH,
        TILE,
        FEW,
    )


@jit
def _nvfp4_tiles_kernel(
    w_ptr,  # [matrices, rows, across, 8] int32, two elements each
    packed_ptr,  # [matrices, rows, across] int64
    scale_ptr,  # [matrices, down, wide, 512] E4M3 as uint8
    global_scale_ptr,  # [matrices] fp32
    rows,
    across,  # blocks of a row
    down,  # tiles of 128 x 4 in a column
    wide,  # and in a row
    BF16: tl.constexpr,
    HIGH: tl.constexpr,
    FEW: tl.constexpr,
):
    """Quantize the blocks of a tile of scales."""
    tile = tl.program_id(0) // wide
    column = (tl.program_id(0) % wide) * 4
    matrix = (tile // down).to(tl.int64)
    row = (tile % down) * 128
    first = (matrix * rows + row) * across + column
    quantize_pairs(
        w_ptr + first * 8,
        packed_ptr + first,
        scale_ptr + tl.program_id(0).to(tl.int64) * 512,
        tl.load(global_scale_ptr + matrix),
        across - column,
        across,
        rows - row,
        BF16,
        True,
        HIGH,
        512,
        FEW,
    )


@jit
def _mxfp4_pairs_kernel(
    w_ptr,  # [blocks, 4, 4] int32, two elements each
    packed_ptr,  # [blocks, 4] int32
    scale_ptr,  # [blocks] E8M0 as uint8
    blocks,
    rows,
    across,  # blocks of a row
    BF16: tl.constexpr,
    SWIZZLED: tl.constexpr,
    HIGH: tl.constexpr,
    RULE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Quantize TILE blocks of 32."""
    first = tl.program_id(0).to(tl.int64) * TILE
    quantize_mxfp4_pairs(
        w_ptr + first * 16,
        packed_ptr + first * 4,
        scale_ptr,
        blocks - first,
        first,
        rows,
        across,
        BF16,
        SWIZZLED,
        HIGH,
        RULE,
        TILE,
    )


def takes(w: Tensor) -> bool:
    """Say whether these kernels can quantize `w`: pairs, on a device that has the instructions,
    read sixteen bytes at a time, compiled by a Triton that was looked at.

    The last two are no matter of speed: `fp4_pairs._word` takes for granted that a thread holds
    the four words of a row, which is how Triton lays out such loads; tests/kernels/test_compile.py
    looks.
    """
    aligned = not w.is_contiguous() or w.data_ptr() % 16 == 0
    pairs = w.dtype in (torch.bfloat16, torch.float16) and capability(w) >= (9, 0)
    return pairs and aligned and LOOKED_AT[0] <= version() <= LOOKED_AT[1]


def launch_nvfp4(
    w: Tensor, global_scale: Tensor, packed: Tensor, scale: Tensor, swizzled: bool, high: bool
) -> None:
    """Quantize contiguous `w` into `packed` and `scale`, which `nvfp4` made."""
    rows, across = w.shape[-2], w.shape[-1] // 16
    matrices, blocks, tile = w.shape[:-2].numel(), rows * across, 256
    programs = -(-blocks // tile)
    down, wide = -(-rows // 128), -(-across // 4)
    pointers = (w.view(torch.int32), packed.view(torch.int64), scale.view(torch.uint8))
    # As many as there are threads: the four words of a row are in one of them.
    constants = {"BF16": w.dtype == torch.bfloat16, "HIGH": high, "FEW": 128, **OPTIONS}
    with torch.cuda.device_of(w):
        if swizzled:
            _nvfp4_tiles_kernel[(matrices * down * wide,)](
                *pointers, global_scale, rows, across, down, wide, **constants
            )
        else:
            constants |= {"FEW": 64, "num_warps": 2}
            _nvfp4_pairs_kernel[(matrices * programs,)](
                *pointers, global_scale, blocks, programs, TILE=tile, **constants
            )


def launch_mxfp4(
    w: Tensor, packed: Tensor, scale: Tensor, rule: str, swizzled: bool, high: bool
) -> None:
    """Quantize contiguous `w` into `packed` and `scale`, which `mx` made."""
    blocks = w.numel() // 32
    with torch.cuda.device_of(w):
        _mxfp4_pairs_kernel[(-(-blocks // 64),)](
            w.view(torch.int32),
            packed.view(torch.int32),
            scale,
            blocks,
            w.shape[-2],
            w.shape[-1] // 32,
            BF16=w.dtype == torch.bfloat16,
            SWIZZLED=swizzled,
            HIGH=high,
            RULE=rule,
            TILE=64,
            **{**OPTIONS, "num_warps": 1},
        )
