"""The steps of `cpu` by loops that numba compiles: the same bytes as the references, NaN and Inf
included.

| function | does |
|---|---|
| `look_up` | elements by a table of all their patterns |
| `cast_fp8` | e4m3(w / scale) |
| `quantize_nvfp4` | NVFP4 by rule amax |
| `quantize_mx` | MXFP8, MXFP4 by the rules amax, floor, ceil, even |
| `dequantize` | values of codes with a scale for each block |

All take contiguous groups of tensors on the CPU and hold no lock while a loop runs. fp16 goes
through fp32. Imported only where numba is to be used, since that takes 0.5 s.
"""

from typing import Any

import torch
from numba import float32, int32  # pyright: ignore[reportMissingImports]
from torch import Tensor

from lowbit_kernels import cpu_loops
from lowbit_kernels.cpu_loops import STRIP
from lowbit_kernels.formats import Format


def _array(t: Tensor, dtype: torch.dtype | None = None) -> Any:
    """Return contiguous `t` as a flat array, read as `dtype`."""
    flat = t.view(-1)
    return (flat if dtype is None else flat.view(dtype)).numpy()


def _groups(t: Tensor, dtype: torch.dtype | None = None) -> Any:
    """Return `t [groups, ...]`, each group contiguous, as an array `[groups, n]`."""
    flat = t.flatten(1)
    return (flat if dtype is None else flat.view(dtype)).numpy()


def _unsigned(w: Tensor) -> tuple[Tensor, torch.dtype, int, int]:
    """Return w, fp16 as fp32; the dtype of its patterns, their mask, their shift to fp32's."""
    if w.dtype == torch.bfloat16:
        return w, torch.uint16, 0x7FFF, 16
    return w.float(), torch.uint32, 0x7FFFFFFF, 0


def _scratch(dtype: torch.dtype) -> tuple[Any, ...]:
    def empty(count: int, dtype: torch.dtype) -> Any:
        return torch.empty(count, dtype=dtype).numpy()

    halves = tuple(empty(STRIP >> n, dtype) for n in range(1, 6))
    blocks = STRIP // 16
    codes = torch.empty(STRIP, dtype=torch.uint8)
    return (
        halves,
        empty(blocks, torch.int32),
        empty(blocks, torch.float32),
        torch.empty((7, blocks), dtype=torch.uint16).numpy(),
        empty(STRIP, torch.float32),
        codes.numpy(),
        codes.view(torch.uint16).numpy(),
    )


def look_up(index: Tensor, table: Tensor, out: Tensor) -> None:
    """Write table[pattern] for each of the patterns of one or two bytes in flat `index`."""
    unsigned = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
    values = unsigned[table.element_size()]
    patterns = _array(index, unsigned[index.element_size()])
    cpu_loops.look_up(patterns, _array(table, values), _array(out, values))


def cast_fp8(w: Tensor, scale: Tensor, out: Tensor) -> None:
    """Write e4m3(w / scale) of `w [groups, n]`, with one of `scale [groups, 1]` for each group."""
    w, dtype, _, shift = _unsigned(w)
    arrays = _groups(w, dtype), int32(shift), _array(scale), _groups(out, torch.uint8)
    cpu_loops.cast_groups(*arrays)


def quantize_nvfp4(w: Tensor, g: Tensor, packed: Tensor, scale: Tensor) -> None:
    """Write codes and scales of blocks `w [groups, n, 16]` with a global scale for each group."""
    w, dtype, mask, shift = _unsigned(w)
    x = _groups(w, dtype)
    codes, scales = _groups(packed), _groups(scale, torch.uint8)
    decoded = _array(_DECODED)
    scratch = _scratch(dtype)
    cpu_loops.nvfp4_groups(
        x, x.dtype.type(mask), int32(shift), _array(g), decoded, codes, scales, scratch
    )


def quantize_mx(w: Tensor, element: Format, rule: str, data: Tensor, scale: Tensor) -> None:
    """Write codes and scales of blocks `w [1, n, 32]`."""
    w, dtype, mask, shift = _unsigned(w)
    x = _array(w, dtype)
    kind = ("E4M3", "E5M2", "E2M1").index(element.name)
    emax, half = ((8, 0x80000), (15, 0x100000), (2, 0x200000))[kind]
    numbers = float32(element.max), int32(emax), int32(half)
    chosen = int32(kind), int32(("amax", "floor", "ceil", "even").index(rule))
    codes, scratch = _array(data, torch.uint8), _scratch(dtype)
    cpu_loops.mx(
        x, x.dtype.type(mask), int32(shift), *chosen, numbers, codes, _array(scale), scratch
    )


def dequantize(data: Tensor, steps: Tensor, name: str, out: Tensor) -> None:
    """Write values of codes of the format `name`, `data [groups, n, share]`, with a step for each
    share.
    """
    wide = out if out.dtype != torch.float16 else torch.empty(out.shape)
    narrow = wide.dtype == torch.bfloat16
    patterns = torch.int16 if narrow else torch.int32
    kind = ("E4M3", "E5M2", "E2M1", "INT8").index(name)
    spread = torch.empty(STRIP).numpy()
    target = _groups(wide, patterns)
    cpu_loops.dequantize(_groups(data), kind, _groups(steps), narrow, target, spread)
    if wide is not out:
        out.copy_(wide)


_DECODED = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).float()
