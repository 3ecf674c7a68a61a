"""Weights on the CPU, a slice that fits the cache at a time: the same bytes as the references.

| tensors | path |
|---|---|
| few elements, or inside `jit.references()` | the reference, whole |
| numba installed, LOWBIT_NUMBA not 0 | `cpu_numba`, in torch.get_num_threads() threads |
| else | `cpu_steps`, SLICE elements at a time, with torch's own threads |

Blocks, rows and elements are independent once the scales over them are given, so a slice has the
bytes that the whole would have there. A slice that neither path takes goes to the reference, which
is handed in. No temporary is larger than a slice. A whole matrix of bf16 or fp16 that shares a
scale has at most 65,536 different elements, and FP8 at most 256 codes: such a tensor is looked up
in a table that the reference made.
"""

import functools
import importlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lowbit_kernels import cpu_steps
from lowbit_kernels.cpu_steps import table, values
from lowbit_kernels.formats import E2M1, Format
from lowbit_kernels.jit import only_references

SLICE = 131072  # elements: 512 KiB as fp32; three such buffers fit a core's 2 MiB of L2
SMALL = 16384  # elements that are not worth slicing
LARGE = 262144  # elements that are worth the start of numba, or a table of 65,536 entries
PATTERNS = 65536  # of a 16-bit float
TABLED = 32768  # elements of a matrix that are worth a table for each of its scales, 30 us

Span = tuple[slice, slice]
Reference = Callable[..., "Tensor | tuple[Tensor, ...]"]


def takes(w: Tensor) -> bool:
    """Say whether `w` is one for this file: on the CPU, and not small."""
    return w.device.type == "cpu" and w.numel() > SMALL and not only_references()


@functools.cache
def _import_numba() -> ModuleType | None:
    try:
        return importlib.import_module("lowbit_kernels.cpu_numba")
    except (ImportError, OSError, RuntimeError):  # absent, or not for this numpy or processor
        return None


def compiled(w: Tensor) -> Any:
    """Return `cpu_numba` where it is to do `w`, else None; it is imported at the first large one.

    LOWBIT_NUMBA=0 forbids it.
    """
    if w.numel() < LARGE or os.environ.get("LOWBIT_NUMBA") == "0":
        return None
    return _import_numba()


def _spans(groups: int, units: int, width: int, size: int) -> Iterator[Span]:
    """Cut `[groups, units]` of `width` elements each into spans of about `size` elements."""
    per_group = max(1, size // max(1, units * width))
    step = max(1, size // width)
    for group in range(0, groups, per_group):
        chosen = slice(group, min(groups, group + per_group))
        for unit in range(0, units, step):
            yield chosen, slice(unit, min(units, unit + step))


def _each(step: Callable[[Span], None], w: Tensor, width: int, compiled: bool) -> None:
    """Do `step` for spans of `w [groups, units, ...]`: slices of it, larger ones where compiled
    code does them; torch's own threads share a slice, so that each has one that fits its cache.
    """
    size = 4 * SLICE if compiled else SLICE * torch.get_num_threads()
    _all(step, list(_spans(w.shape[0], w.shape[1], width, size)), compiled)


def _all(step: Callable[[Span], None], spans: list[Span], compiled: bool) -> None:
    """Do `step` for each of `spans`: in turn, or side by side where compiled code does them."""
    threads = min(torch.get_num_threads(), len(spans)) if compiled else 1
    if threads <= 1:
        for span in spans:
            step(span)
        return
    # A pool for each call costs less than 0.1 ms and leaves nothing behind for a fork to inherit.
    with ThreadPoolExecutor(threads, "lowbit-cpu") as pool:
        for _ in pool.map(step, spans):
            pass


def _integers(w: Tensor) -> tuple[Tensor, int]:
    """Return `w` as the integers of its patterns, and the mask of their magnitudes."""
    wide = w.element_size() == 4
    return w.view(torch.int32 if wide else torch.int16), 0x7FFFFFFF if wide else 0x7FFF


def largest(w: Tensor) -> Tensor:
    """Return fp32 `[*]`, the largest magnitude of each matrix of `w [*, R, C]`, which is not empty:
    NaN or Inf where it holds one.
    """
    flat = w.detach().contiguous().view(w.shape[:-2].numel(), -1)
    integers, mask = _integers(flat)
    tops = torch.zeros(flat.shape[0], dtype=torch.int32)
    fast = compiled(w)

    def step(span: Span) -> None:
        groups, units = span
        part, into = integers[groups, units], tops[groups]
        top = fast.largest(part) if fast else (part & mask).amax(-1).int()
        torch.maximum(into, top, out=into)

    # Spans of one group raise the same number, so threads would be in each other's way.
    _each(step, flat, 1, False)
    # As patterns, which keep NaN above Inf.
    found = tops.to(integers.dtype).view(w.dtype).float()
    return torch.where(torch.isnan(found), torch.nan, found).view(w.shape[:-2])


def _put(results: "Tensor | tuple[Tensor, ...]", *outs: Tensor) -> None:
    """Copy what a reference returned into `outs`."""
    results = (results,) if isinstance(results, Tensor) else results
    for result, out in zip(results, outs, strict=True):
        out.copy_(result)


# From here on: one function for each family, called by its public functions.


def cast_fp8(w: Tensor, scale: Tensor, reference: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return e4m3(w / scale); each of `scale [n]` holds for an equal share of `w`, in order."""
    x = w.detach().contiguous().view(scale.numel(), -1)
    flat = scale.contiguous().view(-1, 1)
    data = torch.empty(w.shape, dtype=torch.float8_e4m3fn)
    out = data.view(x.shape)
    fast = compiled(w)
    found = None
    if not fast and w.element_size() == 2 and x.shape[1] >= LARGE:
        every = torch.arange(PATTERNS, dtype=torch.int32).to(torch.int16).view(w.dtype)
        found = reference(every, flat).view(torch.uint8)

    def step(span: Span) -> None:
        groups, units = span
        source, divisor, target = x[groups, units], flat[groups], out[groups, units]
        if found is not None:
            index = source.view(torch.uint16).to(torch.int32)
            for group, row in enumerate(index):
                codes = out[groups.start + group, units].view(torch.uint8)
                torch.index_select(found[groups.start + group], 0, row, out=codes)
        elif fast:
            fast.cast_fp8(source, divisor, target)
        else:
            q = source.to(torch.float32, copy=True).div_(divisor).clamp_(-448.0, 448.0)
            # The sum is NaN exactly where an element is.
            if torch.isnan(q.sum()):
                target.copy_(reference(source, divisor))
            else:
                target.copy_(q)

    _each(step, x, 1, bool(fast))
    return data


def quantize_nvfp4(
    w: Tensor, global_scale: Tensor, reference: Reference, radius: int | None, h: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return packed codes and scales of NVFP4; radius is None by rule amax, else it and `h` are for
    a search.
    """
    lead = w.shape[:-2].numel()
    # Weights of columns need whole rows.
    across = 16 if h is None else w.shape[-1]
    x = w.detach().contiguous().view(lead, -1, across)
    shared = global_scale.contiguous().view(lead)
    packed = torch.empty((*w.shape[:-1], w.shape[-1] // 2), dtype=torch.uint8)
    scale = torch.empty((*w.shape[:-1], w.shape[-1] // 16), dtype=torch.float8_e4m3fn)
    codes, scales = packed.view(lead, -1, across // 2), scale.view(lead, -1, across // 16)
    fast = compiled(w)
    bounds = torch.zeros((lead, 1), dtype=torch.int16)
    if fast and w.element_size() == 2 and x[0].numel() >= TABLED:
        bounds = torch.stack([fast.nvfp4_bounds(g, w.dtype) for g in shared])

    def step(span: Span) -> None:
        source, g = x[span], shared[span[0]]
        into, found = codes[span], scales[span]
        if fast:
            if radius is None:
                fast.quantize_nvfp4(source, g, bounds[span[0]], into, found)
            else:
                fast.search_nvfp4(source, g, bounds[span[0]], radius, h, into, found)
        elif radius is not None or not cpu_steps.nvfp4(source, g, into, found):
            _put(reference(source, g, radius, h), into, found)

    _each(step, x, across, bool(fast))
    return packed, scale


def quantize_mx(
    w: Tensor, element: Format, rule: str, reference: Reference, dtype: torch.dtype, h: Any
) -> tuple[Tensor, Tensor]:
    """Return data, of `dtype`, and scales of an MX format; `h` weighs the columns in rule mse."""
    # Weights of columns need whole rows.
    across = 32 if h is None else w.shape[-1]
    x = w.detach().contiguous().view(1, -1, across)
    shape = (*w.shape[:-1], w.shape[-1] // element.per_byte)
    data = torch.empty(shape, dtype=dtype)
    scale = torch.empty((*w.shape[:-1], w.shape[-1] // 32), dtype=torch.uint8)
    codes, scales = data.view(1, -1, across // element.per_byte), scale.view(1, -1, across // 32)
    searches = rule == "mse"
    fast = compiled(w) if element is E2M1 or not searches else None

    def step(span: Span) -> None:
        source, into, found = x[span], codes[span], scales[span]
        if fast and searches:
            fast.search_mxfp4(source, h, into, found)
        elif fast:
            fast.quantize_mx(source, element, rule, into, found)
        elif searches or not cpu_steps.mx(source, element, rule, into, found):
            _put(reference(source, element, rule, h), into, found)

    _each(step, x, across, bool(fast))
    return data, scale


def dequantize_blocks(
    data: Tensor, scale: Tensor, shared: Tensor | None, scale_name: str, dtype: torch.dtype
) -> Tensor:
    """Return values `[*, R, C]` of `data` with a scale for each equal share of a row: `scale` of
    the format scale_name (F32, E4M3 or E8M0), times `shared [*]` where there is one.
    """
    names = {torch.uint8: "E2M1", torch.float8_e5m2: "E5M2", torch.int8: "INT8"}
    name = names.get(data.dtype, "E4M3")
    lead = 1 if shared is None else shared.numel()
    bytes_ = data.detach().contiguous().view(torch.uint8).view(lead, scale.numel() // lead, -1)
    scales = scale.contiguous().view(lead, -1, 1)
    per_byte = 2 if name == "E2M1" else 1
    out = torch.empty((*data.shape[:-1], data.shape[-1] * per_byte), dtype=dtype)
    target = out.view(lead, bytes_.shape[1], -1)
    fast = compiled(out)
    if fast and name == "E2M1" and out.element_size() == 2 and target[0].numel() >= TABLED:
        _choose(fast, bytes_, scales, shared, scale_name, target)
        return out

    def step(span: Span) -> None:
        steps = scales[span] if scale_name == "F32" else values(scales[span], scale_name)
        if shared is not None:
            steps = steps * shared.view(-1, 1, 1)[span[0]]
        if fast:
            fast.dequantize(bytes_[span], steps, name, target[span])
        else:
            target[span].copy_(values(bytes_[span], name).mul_(steps))

    _each(step, bytes_, target.shape[-1], bool(fast))
    return out


def _choose(
    fast: Any,
    packed: Tensor,
    scales: Tensor,
    shared: Tensor | None,
    scale_name: str,
    target: Tensor,
) -> None:
    """Fill `target` with values of 16 bits of E2M1 codes: a step has only eight magnitudes."""
    steps = table(scale_name)
    if shared is None:
        every = [fast.chosen_values(steps, target.dtype)] * len(packed)
    else:
        every = [fast.chosen_values(steps * g, target.dtype) for g in shared.view(-1)]

    def step(span: Span) -> None:
        fast.dequantize_chosen(packed[span], scales[span], every[span[0]], target[span])

    _each(step, packed, target.shape[-1], True)


def dequantize_shared(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values of e4m3 `data [*, R, C]` with one of `scale [*]` for each matrix."""
    codes = data.detach().contiguous().view(torch.uint8).view(scale.numel(), -1)
    found = (table("E4M3") * scale.contiguous().view(-1, 1)).to(dtype)
    out = torch.empty(data.shape, dtype=dtype)
    target = out.view(codes.shape)
    fast = compiled(out)

    def step(span: Span) -> None:
        groups, units = span
        for group in range(groups.start, groups.stop):
            if fast:
                fast.look_up(codes[group, units], found[group], target[group, units])
            else:
                index = codes[group, units].to(torch.int32)
                torch.index_select(found[group], 0, index, out=target[group, units])

    _each(step, codes, 1, bool(fast))
    return out


def by_rows(
    run: Reference,
    high: int,
    sources: tuple[Tensor, ...],
    outs: tuple[Tensor, ...],
    loop: tuple[Any, ...] = (),
) -> None:
    """Fill `outs` by `run(*slices)` for slices of a multiple of `high` rows; the first of `sources`
    is `[*, R, C]`, each other tensor has a row for each of its rows or for each `high` of them.

    `loop` names a function of `cpu_numba` that fills slices where it can, and its last arguments.
    """
    stacks = [t.detach().reshape(-1, *t.shape[-2:]) for t in (*sources, *outs)]
    count, rows, cols = stacks[0].shape
    fast = compiled(sources[0]) if loop else None
    size = 4 * SLICE if fast else SLICE * torch.get_num_threads()
    tall = max(high, size // (cols * high) * high)

    def step(span: Span) -> None:
        matrix, start, stop = span[0].start, span[1].start, span[1].stop
        parts = []
        for stack in stacks:
            each = 1 if stack.shape[1] == rows else high
            parts.append(stack[matrix, start // each : -(-stop // each)])
        if fast:
            getattr(fast, loop[0])(*(part.contiguous() for part in parts), *loop[1:])
        else:
            _put(run(*parts[: len(sources)]), *parts[len(sources) :])

    starts = [slice(start, start + tall) for start in range(0, rows, tall)]
    _all(step, [(slice(i, i + 1), start) for i in range(count) for start in starts], bool(fast))


__all__ = [
    "by_rows",
    "cast_fp8",
    "compiled",
    "dequantize_blocks",
    "dequantize_shared",
    "largest",
    "quantize_mx",
    "quantize_nvfp4",
    "takes",
]
