"""Rotate 16 columns at a time by a Hadamard matrix with random signs, and back.

    y = (x as [..., 16]) @ (diag(signs) H) / 4        x = y @ (diag(signs) H)^T / 4

H is Sylvester's 16 x 16 matrix of +-1, so both are orthogonal. In fp32: each column times +-1/4,
which is exact but among subnormals, then the sixteen terms added from first to last. Source:
TransformerEngine 2.20 `pytorch/custom_recipes/reference_nvfp4.py`, whose signs these are.
A NaN makes NaN of its sixteen columns. An Inf makes each of them Inf, with either sign; two make
NaN of those where their signs differ.
"""

import functools

import torch
from torch import Tensor

from lowbit_kernels.amax import FLOATING
from lowbit_kernels.jit import OPTIONS, jit, loadable, tl, use_kernel
from lowbit_kernels.rounding import widen
from lowbit_kernels.typed import typed

WIDTH = 16
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


@functools.lru_cache(maxsize=16)
def _matrix(signs: tuple[int, ...], device: torch.device) -> Tensor:
    """Return diag(signs) H / 4, fp32 `[16, 16]`, kept on the device once it is there."""
    if len(signs) != WIDTH or any(s not in (1, -1) for s in signs):
        raise ValueError("signs are sixteen of 1 and -1")
    index = torch.arange(WIDTH, device=device)
    common = index[:, None] & index
    # Sylvester's entry is -1 to the number of ones that both indices share.
    parity = (common ^ common >> 1 ^ common >> 2 ^ common >> 3) & 1
    return torch.tensor(signs, device=device)[:, None] * (1 - 2 * parity) * 0.25


def _multiply_reference(x: Tensor, matrix: Tensor) -> Tensor:
    blocks = x.contiguous().float().unflatten(-1, (x.shape[-1] // WIDTH, WIDTH))
    total = blocks[..., :1] * matrix[0]
    for row in range(1, WIDTH):
        total = total + blocks[..., row : row + 1] * matrix[row]
    return total.flatten(-2)


@jit
def _rotate_kernel(
    x_ptr,  # [blocks, 16] fp32, fp16, or bf16 as int16
    matrix_ptr,  # [16, 16] fp32
    out_ptr,  # [blocks, 16] fp32
    blocks,
    BF16: tl.constexpr,
    TILE: tl.constexpr,
):
    """Multiply TILE blocks with the matrix, a row of it at a time."""
    first = tl.program_id(0).to(tl.int64) * TILE
    index = tl.arange(0, TILE)
    mask = index < blocks - first
    column = tl.arange(0, 16)
    x_ptr += first * 16 + index * 16
    x = widen(tl.load(x_ptr, mask=mask, other=0), BF16)
    total = x[:, None] * tl.load(matrix_ptr + column)[None, :]
    for row in range(1, 16):
        x = widen(tl.load(x_ptr + row, mask=mask, other=0), BF16)
        total += x[:, None] * tl.load(matrix_ptr + row * 16 + column)[None, :]
    place = first * 16 + index[:, None] * 16 + column[None, :]
    tl.store(out_ptr + place, total, mask=mask[:, None])


def _launch(x: Tensor, matrix: Tensor) -> Tensor:
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    blocks, tile = x.numel() // WIDTH, 64
    with torch.cuda.device_of(x):
        _rotate_kernel[(-(-blocks // tile),)](
            loadable(x),
            matrix.contiguous(),
            out,
            blocks,
            BF16=x.dtype == torch.bfloat16,
            TILE=tile,
            **OPTIONS,
        )
    return out


def _multiply(x: Tensor, matrix: Tensor) -> Tensor:
    """Return `x [..., C]`, sixteen columns at a time, times `matrix`: terms added in order."""
    if x.dtype not in FLOATING or not x.dim():
        found = f"{x.dtype} {list(x.shape)}"
        raise ValueError(f"what is rotated is [..., C] in fp32, bf16 or fp16, this is {found}")
    if x.shape[-1] % WIDTH:
        raise ValueError(f"{x.shape[-1]} columns are no multiple of {WIDTH}")
    return _launch(x, matrix) if use_kernel(x) else _multiply_reference(x, matrix)


@typed
def rotate(x: Tensor, signs: tuple[int, ...] = SIGNS) -> Tensor:
    """Return fp32 `x [..., C]` rotated sixteen columns at a time.

    Raises ValueError for another dtype than fp32, bf16, fp16, columns that are no multiple of 16,
    or signs that are not 1 and -1.
    """
    return _multiply(x, _matrix(tuple(signs), x.device))


@typed
def rotate_back(y: Tensor, signs: tuple[int, ...] = SIGNS) -> Tensor:
    """Return fp32 `y [..., C]` rotated back; undoes `rotate` up to rounding.

    Raises ValueError for another dtype than fp32, bf16, fp16, columns that are no multiple of 16,
    or signs that are not 1 and -1.
    """
    return _multiply(y, _matrix(tuple(signs), y.device).t())
