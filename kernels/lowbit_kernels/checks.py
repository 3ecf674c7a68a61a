"""Whether parts belong together: dtypes, shapes and devices, looked at before a kernel reads them.

A kernel finds everything by the shape of its first argument: scales of other shapes or dtypes would
be read out of bounds or as what they are not, and torch would broadcast some of them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit_kernels.amax import FLOATING
from lowbit_kernels.typed import DENSE, called, is_dense


def check_tensor(x: Any, name: str) -> None:
    """Raise ValueError unless `x` is a dense tensor of real numbers."""
    if not is_dense(x):
        raise ValueError(f"{name} is {DENSE}, this is {called(x)}")


def check_codes(data: Tensor, stored: Sequence[torch.dtype], dtype: torch.dtype) -> None:
    """Raise ValueError unless `data` is `[*, rows, columns]` of a dtype in `stored` and values are
    returned in `dtype`.
    """
    if data.dtype not in stored or data.dim() < 2:
        known = " or ".join(map(str, stored))
        found = f"{data.dtype} {list(data.shape)}"
        raise ValueError(f"codes are {known} of the shape [*, rows, columns], these are {found}")
    if dtype not in FLOATING:
        raise ValueError(f"values come as float32, bfloat16 or float16, not as {dtype}")


def check_scale(
    scale: Tensor,
    shape: Sequence[int],
    device: torch.device,
    stored: torch.dtype = torch.float32,
    name: str = "scale",
) -> None:
    """Raise ValueError unless `scale` has this shape, device and dtype."""
    if scale.shape != torch.Size(shape) or scale.device != device or scale.dtype != stored:
        wanted = f"{stored} {list(shape)} on {device}"
        found = f"{scale.dtype} {list(scale.shape)} on {scale.device}"
        raise ValueError(f"the {name} belonging to this is {wanted}, not {found}")


def check_device(part: Tensor, device: torch.device, name: str) -> None:
    """Raise ValueError unless `part` lies on this device."""
    if part.device != device:
        raise ValueError(f"{name} lies on {part.device}, what it belongs to on {device}")


def as_matrix(w: Tensor) -> Tensor:
    return w.reshape(-1, max(w.shape[-1] if w.dim() else 1, 1))


def check_shapes(w: Tensor, v: Tensor) -> None:
    if w.shape != v.shape:
        raise ValueError(f"shapes differ: {tuple(w.shape)} and {tuple(v.shape)}")
