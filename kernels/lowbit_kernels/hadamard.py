"""Rotate 16 columns at a time by a Hadamard matrix with random signs, and back.

    y = (x as [..., 16]) @ (diag(signs) H) / 4        x = y @ (diag(signs) H)^T / 4

H is Sylvester's 16 x 16 matrix of +-1, so both are orthogonal. In fp32, as four rounds of sums and
differences in a fixed order (columns 8 apart, then 4, 2, 1), then one division by 4, which is
exact. Source: TransformerEngine 2.20 `pytorch/custom_recipes/reference_nvfp4.py`, whose signs these
are.
"""

import torch
from torch import Tensor

WIDTH = 16
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def _matrix(signs: tuple[int, ...], device: torch.device) -> Tensor:
    """Return diag(signs) H / 4, fp32 `[16, 16]`."""
    if len(signs) != WIDTH or any(s not in (1, -1) for s in signs):
        raise ValueError("signs are sixteen of 1 and -1")
    index = torch.arange(WIDTH, device=device)
    common = index[:, None] & index
    # Sylvester's entry is -1 to the number of ones that both indices share.
    parity = (common ^ common >> 1 ^ common >> 2 ^ common >> 3) & 1
    return torch.tensor(signs, device=device)[:, None] * (1 - 2 * parity) * 0.25


def _multiply(x: Tensor, matrix: Tensor) -> Tensor:
    """Return `x [..., C]`, sixteen columns at a time, times `matrix`: terms added in order."""
    if x.shape[-1] % WIDTH:
        raise ValueError(f"{x.shape[-1]} columns are no multiple of {WIDTH}")
    blocks = x.float().unflatten(-1, (x.shape[-1] // WIDTH, WIDTH))
    total = blocks[..., :1] * matrix[0]
    for row in range(1, WIDTH):
        total = total + blocks[..., row : row + 1] * matrix[row]
    return total.flatten(-2)


def rotate(x: Tensor, signs: tuple[int, ...] = SIGNS) -> Tensor:
    """Return fp32 `x [..., C]` rotated sixteen columns at a time.

    Raises ValueError for columns that are no multiple of 16, or signs that are not 1 and -1.
    """
    return _multiply(x, _matrix(signs, x.device))


def rotate_back(y: Tensor, signs: tuple[int, ...] = SIGNS) -> Tensor:
    """Return fp32 `y [..., C]` rotated back; undoes `rotate` up to rounding.

    Raises ValueError for columns that are no multiple of 16, or signs that are not 1 and -1.
    """
    return _multiply(y, _matrix(signs, y.device).t())
