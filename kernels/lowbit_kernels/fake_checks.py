"""What fake quantization takes: looked at before anything is computed, refused by ValueError.

Shapes, dtypes and devices are known without waiting for a device. Signs are not: only numbers that
lie on the CPU are looked at.
"""

from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import (  # pyright: ignore[reportMissingModuleSource]
    is_functorch_wrapped_tensor,
)

from lowbit_kernels.amax import FLOATING
from lowbit_kernels.checks import check_tensor

KNOWN = "float32, bfloat16 or float16"


def check_values(x: Any, name: str = "what is rounded") -> None:
    """Raise ValueError unless `x` is a dense tensor of fp32, bf16 or fp16."""
    check_tensor(x, name)
    if x.dtype not in FLOATING:
        raise ValueError(f"{name} is {KNOWN}, this is {x.dtype}")


def check_out_dtype(dtype: torch.dtype | None) -> None:
    """Raise ValueError unless values can be returned in `dtype`, None for their own."""
    if dtype is not None and dtype not in FLOATING:
        raise ValueError(f"values come as {KNOWN}, not as {dtype}")


def check_beside(part: Any, x: Tensor, name: str) -> None:
    """Raise ValueError unless `part` is a dense tensor of real numbers where `x` is, or a number
    without dimensions on the CPU."""
    check_tensor(part, name)
    if part.device != x.device and (part.dim() or part.device.type != "cpu"):
        raise ValueError(f"{name} lies on {part.device}, what is rounded on {x.device}")


def check_broadcast(part: Any, x: Tensor, name: str) -> None:
    """Raise ValueError unless `part` is as `check_beside` wants it and broadcasts over `x`."""
    check_beside(part, x, name)
    sizes = zip(reversed(part.shape), reversed(x.shape), strict=False)
    if part.dim() > x.dim() or any(n not in (1, size) for n, size in sizes):
        raise ValueError(f"{name} {list(part.shape)} does not broadcast over {list(x.shape)}")


def check_bias(bias: Tensor | None, x: Tensor) -> None:
    """Raise ValueError unless there is no bias, or it can be taken from `x`."""
    check_values(x)
    if bias is not None:
        check_broadcast(bias, x, "bias")


def integer_range(num_bits: int, unsigned: bool, narrow_range: bool) -> tuple[float, float]:
    """Return the least and the largest integer of `num_bits`.

    Raises ValueError for bits that are not 2 to 16.
    """
    if not 2 <= num_bits <= 16:
        raise ValueError(f"an integer has 2 to 16 bits, not {num_bits}")
    most = 2.0 ** (num_bits - 1 + int(unsigned)) - 1.0
    return (0.0 if unsigned else -most - (0.0 if narrow_range else 1.0)), most


def check_signs(x: Tensor, amax: Tensor, unsigned: bool) -> None:
    """Raise ValueError for a negative amax, or negative values for unsigned integers, where they
    lie on the CPU: nothing waits for another device, and nothing looks at what is traced.
    """
    if torch.compiler.is_compiling() or amax.device.type != "cpu" or x.device.type != "cpu":
        return
    if is_functorch_wrapped_tensor(x) or is_functorch_wrapped_tensor(amax):
        return  # a sample of many, of which nobody can ask
    if (amax < 0).any():
        raise ValueError("amax is a magnitude, here some are negative")
    if unsigned and (x < 0).any():
        raise ValueError("unsigned integers hold no negative values, here are some")


def check_blocks(x: Tensor, amax: Tensor, global_amax: Tensor | None) -> None:
    """Raise ValueError unless `x` has a whole number of elements for each of `amax`."""
    check_values(x)
    check_beside(amax, x, "amax")
    if not amax.numel() or x.numel() % amax.numel():
        raise ValueError(f"{x.numel()} values are no whole blocks for {amax.numel()} amax")
    check_global(global_amax, amax)
    check_signs(x, amax, False)


def check_global(global_amax: Tensor | None, amax: Tensor) -> None:
    """Raise ValueError unless there is no global amax, or it is one number."""
    if global_amax is None:
        return
    check_beside(global_amax, amax, "global amax")
    if global_amax.numel() != 1:
        raise ValueError(f"global amax is one number, this is {list(global_amax.shape)}")


def check_spread(amax: Tensor, x: Tensor, block_size: int | None, axis: int | None) -> None:
    """Raise ValueError unless `spread` can make `amax` broadcast over `x`."""
    check_beside(amax, x, "amax")
    if amax.numel() == 1:
        return
    if block_size is None and axis is None:
        check_broadcast(amax, x, "amax")
        return
    if not -x.dim() <= (axis or 0) < x.dim():
        raise ValueError(f"{list(x.shape)} has no axis {axis}")
    along = (x.dim() - 1 if axis is None else axis) % x.dim()
    size = x.shape[along]
    if block_size is None:
        if amax.numel() != size:
            raise ValueError(f"axis {axis} has {size} indices, there are {amax.numel()} amax")
        return
    blocks = [n // max(block_size, 1) if i == along else n for i, n in enumerate(x.shape)]
    if block_size < 1 or size % block_size or list(amax.shape) != blocks:
        raise ValueError(
            f"{list(amax.shape)} are not the amax of blocks of {block_size} along axis {along} "
            f"of {list(x.shape)}"
        )


def spread(amax: Tensor, x: Tensor, block_size: int | None, axis: int | None) -> Tensor:
    """Return `amax` in a shape that broadcasts over `x`.

    With `block_size` it has one number for each block along `axis` (the last), with `axis` alone
    one for each index of that axis. `check_spread` looks at it before.
    """
    if amax.numel() == 1 or (block_size is None and axis is None):
        return amax
    along = (x.dim() - 1 if axis is None else axis) % x.dim()
    if block_size is None:
        return amax.reshape([-1 if i == along else 1 for i in range(x.dim())])
    return amax.repeat_interleave(block_size, dim=along)
