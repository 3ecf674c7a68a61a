"""The steps of `cpu` by loops that numba compiles: the same bytes as the references, NaN and Inf
included.

| function | does |
|---|---|
| `look_up` | elements by a table of all their patterns |
| `largest` | the patterns of the largest magnitudes of groups |
| `cast_fp8` | e4m3(w / scale) |
| `quantize_int8` | INT8 by rows |
| `quantize_nvfp4`, `nvfp4_bounds` | NVFP4 by rule amax |
| `search_nvfp4` | NVFP4 by the rules mse, mse_all |
| `quantize_mx` | MXFP8, MXFP4 by the rules amax, floor, ceil, even |
| `search_mxfp4` | MXFP4 by the rule mse |
| `quantize_fp8_blocks`, `dequantize_fp8_blocks` | FP8 by blocks of 128 columns |
| `dequantize` | values of codes with a step for each block |
| `dequantize_chosen`, `chosen_values` | the same for E2M1, chosen from eight values |

All take contiguous groups of tensors on the CPU and hold no lock while a loop runs. fp16 goes
through fp32, but for NVFP4, MXFP4 and look-ups. Imported only where numba is to be used, since that
takes 0.5 s.
"""

import functools
from typing import Any

import torch
from numba import float32, int16, int32  # pyright: ignore[reportMissingImports]
from torch import Tensor

from lowbit_kernels import cpu_back, cpu_casts, cpu_loops, cpu_search
from lowbit_kernels.cpu_loops import BOUNDS, HALF, STRIP
from lowbit_kernels.cpu_steps import table
from lowbit_kernels.formats import E2M1, E2M1_VALUES, Format

_NONE16 = torch.zeros(1, dtype=torch.int16).numpy()


def _array(t: Tensor, dtype: torch.dtype | None = None) -> Any:
    """Return contiguous `t` as a flat array, read as `dtype`."""
    flat = t.view(-1)
    return (flat if dtype is None else flat.view(dtype)).numpy()


def _groups(t: Tensor, dtype: torch.dtype | None = None) -> Any:
    """Return `t [groups, ...]`, each group contiguous, as an array `[groups, n]`."""
    flat = t.flatten(1)
    return (flat if dtype is None else flat.view(dtype)).numpy()


def _integers(w: Tensor) -> tuple[Tensor, torch.dtype, Any]:
    """Return w, fp16 as fp32; the dtype of its patterns, their shift to those of fp32."""
    if w.dtype == torch.bfloat16:
        return w, torch.int16, int32(16)
    return w.float(), torch.int32, int32(0)


def _by_pattern(dtype: torch.dtype) -> tuple[torch.dtype, Any, Any]:
    """Return the dtype of patterns, their shift, and the pattern of Inf where they have 16 bits."""
    if dtype == torch.float32:
        return torch.int32, int32(0), int16(0)
    if dtype == torch.bfloat16:
        return torch.int16, int32(16), int16(0x7F80)
    return torch.int16, int32(HALF), int16(0x7C00)


def look_up(index: Tensor, table: Tensor, out: Tensor) -> None:
    """Write table[pattern] for each of the patterns of one or two bytes in flat `index`."""
    unsigned = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
    values = unsigned[table.element_size()]
    patterns = _array(index, unsigned[index.element_size()])
    cpu_casts.look_up(patterns, _array(table, values), _array(out, values))


def largest(patterns: Tensor) -> Tensor:
    """Return int32 `[groups]`, the largest of `patterns [groups, n]`, int16 or int32, without their
    signs; the rows of a group follow each other, groups need not.
    """
    mask = int32(0x7FFFFFFF if patterns.element_size() == 4 else 0x7FFF)
    tops = torch.empty(len(patterns), dtype=torch.int32)
    cpu_casts.tops_of_groups(patterns.numpy(), mask, tops.numpy())
    return tops


def cast_fp8(w: Tensor, scale: Tensor, out: Tensor) -> None:
    """Write e4m3(w / scale) of `w [groups, n]`, with one of `scale [groups, 1]` for each group."""
    w, dtype, shift = _integers(w)
    cpu_casts.cast_groups(_groups(w, dtype), shift, _array(scale), _groups(out, torch.uint8))


def quantize_int8(w: Tensor, data: Tensor, scale: Tensor) -> None:
    """Write INT8 codes of `w [rows, cols]` and a scale for each row."""
    w, dtype, shift = _integers(w)
    patterns = w.view(dtype)
    amax = (largest(patterns) << int(shift)).view(torch.float32)
    step = amax / 127.0
    step = torch.where(step == 0, 2.0**-149, step)
    scale.copy_(torch.where(amax == 0, 1.0, step).view(-1, 1))
    codes = _groups(data, torch.uint8)
    cpu_casts.int8_groups(patterns.numpy(), shift, _array(scale), codes)


def nvfp4_bounds(g: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bounds of E2M1 codes by global scale `g []` and block scale, for patterns of a
    dtype of 16 bits.
    """
    return _bounds(table("E4M3")[:128] * g, dtype, True)


@functools.cache
def _mx_bounds(dtype: torch.dtype) -> Tensor:
    return _bounds(table("1/E8M0"), dtype, False)


def _bounds(steps: Tensor, dtype: torch.dtype, divide: bool) -> Tensor:
    found = torch.empty(len(steps) * BOUNDS, dtype=torch.int16)
    cpu_loops.bounds_of(steps.numpy(), _by_pattern(dtype)[1], divide, found.numpy())
    return found


def quantize_nvfp4(w: Tensor, g: Tensor, bounds: Tensor, packed: Tensor, scale: Tensor) -> None:
    """Write codes and scales of blocks `w [groups, n, 16]` with a global scale and `nvfp4_bounds`,
    or one number, for each group.
    """
    if bounds.shape[1] == 1 and w.dtype == torch.float16:
        w = w.float()
    dtype, shift, limit = _by_pattern(w.dtype)
    cpu_loops.nvfp4_groups(
        _groups(w, dtype),
        shift,
        limit,
        _array(g),
        _array(table("E4M3")),
        bounds.numpy(),
        _groups(packed),
        _groups(scale, torch.uint8),
        torch.empty(STRIP // 16).numpy(),
    )


def search_nvfp4(
    w: Tensor,
    g: Tensor,
    bounds: Tensor,
    radius: int,
    h: Tensor | None,
    packed: Tensor,
    scale: Tensor,
) -> None:
    """Write codes and scales of blocks `w [groups, n, ...]` with the scales of least error; `h` are
    weights of columns, where a group is whole rows.
    """
    if w.dtype == torch.float16:
        w, bounds = w.float(), torch.zeros((len(bounds), 1), dtype=torch.int16)
    dtype, shift, limit = _by_pattern(w.dtype)
    cpu_search.nvfp4_groups(
        _groups(w, dtype),
        shift,
        limit,
        _array(g),
        _array(table("E4M3")),
        bounds.numpy(),
        int32(radius),
        (torch.ones(16) if h is None else h.view(-1)).numpy(),
        _groups(packed),
        _groups(scale, torch.uint8),
    )


def quantize_mx(w: Tensor, element: Format, rule: str, data: Tensor, scale: Tensor) -> None:
    """Write codes and scales of blocks `w [1, n, 32]`."""
    if w.dtype == torch.float16 and element is not E2M1:
        w = w.float()
    dtype, shift, limit = _by_pattern(w.dtype)
    kind = ("E4M3", "E5M2", "E2M1").index(element.name)
    emax, half = ((8, 0x80000), (15, 0x100000), (2, 0x200000))[kind]
    by_bounds = element is E2M1 and w.dtype != torch.float32
    cpu_loops.mx(
        _array(w, dtype),
        shift,
        limit,
        int32(kind),
        int32(("amax", "floor", "ceil", "even").index(rule)),
        (float32(element.max), int32(emax), int32(half)),
        _array(_mx_bounds(w.dtype)) if by_bounds else _NONE16,
        _array(data, torch.uint8),
        _array(scale),
        torch.empty(STRIP // 32).numpy(),
        torch.empty(STRIP // 32).numpy(),
    )


def search_mxfp4(w: Tensor, h: Tensor | None, data: Tensor, scale: Tensor) -> None:
    """Write codes and scales of blocks `w [1, n, ...]` with the best of three scales; `h` weighs
    the columns, where the last axis is whole rows.
    """
    if w.dtype == torch.float16:
        w = w.float()
    dtype, shift, limit = _by_pattern(w.dtype)
    cpu_search.mxfp4(
        _array(w, dtype),
        shift,
        limit,
        _array(_mx_bounds(w.dtype)) if w.dtype != torch.float32 else _NONE16,
        (torch.ones(32) if h is None else h.view(-1)).numpy(),
        _array(data),
        _array(scale),
    )


def quantize_fp8_blocks(w: Tensor, data: Tensor, scale: Tensor, high: int, rule: str) -> None:
    """Write codes of `w [rows, cols]` and scales of its blocks of `high` x 128."""
    rows, cols = w.shape
    w, dtype, shift = _integers(w)
    mask = int32(0x7FFF if dtype == torch.int16 else 0x7FFFFFFF)
    chosen = int32(("amax", "ue8m0").index(rule))
    cpu_casts.fp8_blocks(
        _array(w, dtype),
        shift,
        mask,
        rows,
        cols,
        high,
        chosen,
        _array(data, torch.uint8),
        scale.numpy(),
    )


def _written(out: Tensor) -> tuple[Tensor, torch.dtype]:
    """Return where values go before they are fp16, and the dtype of their patterns."""
    wide = out if out.dtype != torch.float16 else torch.empty(out.shape)
    return wide, torch.int16 if wide.dtype == torch.bfloat16 else torch.int32


def dequantize_fp8_blocks(data: Tensor, scale: Tensor, out: Tensor, high: int) -> None:
    """Write values of E4M3 `data [rows, cols]` with scales of blocks of `high` x 128."""
    rows, cols = data.shape
    wide, patterns = _written(out)
    codes = _array(data, torch.uint8)
    cpu_back.fp8_blocks(codes, scale.numpy(), rows, cols, high, _array(wide, patterns))
    if wide is not out:
        out.copy_(wide)


def dequantize(data: Tensor, steps: Tensor, name: str, out: Tensor) -> None:
    """Write values of codes of the format `name`, `data [groups, n, share]`, with a step for each
    share.
    """
    wide, patterns = _written(out)
    arrays = _groups(steps), _groups(wide, patterns)
    if name == "E2M1":
        cpu_back.four_bits(_groups(data), *arrays)
    else:
        kind = ("E4M3", "E5M2", "INT8").index(name)
        cpu_back.eight_bits(_groups(data), kind, *arrays)
    if wide is not out:
        out.copy_(wide)


def chosen_values(steps: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of the magnitudes of E2M1 by each of fp32 `steps`, of 16 bits, in sixteen
    lanes each.
    """
    values = (torch.tensor(E2M1_VALUES[:8]) * steps.view(-1, 1)).to(dtype)
    return values.unsqueeze(-1).expand(-1, -1, 16).reshape(-1)


def dequantize_chosen(data: Tensor, scale: Tensor, values: list[Tensor], out: Tensor) -> None:
    """Write values of E2M1 codes `data [groups, n, share]` from the `chosen_values` of each group,
    in which the bytes of `scale` count.
    """
    for group, given in enumerate(values):
        cpu_back.four_bits_chosen(
            _groups(data[group : group + 1]),
            _groups(scale[group : group + 1], torch.uint8),
            _groups(given.view(1, -1), torch.int16),
            _groups(out[group : group + 1], torch.int16),
        )
