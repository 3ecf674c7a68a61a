"""Quantize many weights in one set of launches, with the bytes of one at a time.

| scheme | launches for a group, however many weights |
|---|---|
| NVFP4 (rule amax), FP8 per tensor | a memset, amax, quantize; shared scales given: quantize |
| FP8 and INT8 per channel, MXFP8, MXFP4 | quantize |

and before them one copy of a table to the device. Weights are read where they lie: the table holds
the place and size of each matrix and the first of its programs, of which each finds its matrix;
kernels are in `grouped_kernels`. The parts of a group are cut out of one buffer for each part, so
keeping the parts of one weight keeps those of all. What does not fit goes one by one: other rules,
weights of different dtypes or devices, weights without elements, references.

    parts = grouped.quantize(nvfp4.NVFP4, weights)       # a list of what NVFP4.quantize returns

Arithmetic is that of `nvfp4`, `fp8`, `integer`, `mx`; there are no equations of its own.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from lowbit_kernels import amax as amax_of
from lowbit_kernels import fp4_pair_kernels, fp8, grouped_kernels, integer, mx, nvfp4, rows
from lowbit_kernels.checks import check_scale
from lowbit_kernels.formats import E2M1, E4M3, E5M2, INT8, Format
from lowbit_kernels.jit import OPTIONS, converts_fp8, loadable, use_kernel
from lowbit_kernels.ops import Ops
from lowbit_kernels.rounding import FP8_DTYPES
from lowbit_kernels.typed import typed

Parts = dict[str, Tensor]
AMAX_TILE, AMAX_LOOPS = 4096, 8
# How many tiles of what size a program does, and with how many warps.
NVFP4_PAIRS = {"TILE": 128, "LOOPS": 8, "num_warps": 1}
NVFP4 = {"TILE": 128, "LOOPS": 2, "num_warps": 4}
TENSOR = {"TILE": 256, "LOOPS": 4, "num_warps": 4}
MX_PAIRS = {"TILE": 64, "LOOPS": 8, "num_warps": 1}
MX = {"TILE": 32, "LOOPS": 4, "num_warps": 2}
ROWS = 8  # to a program
PLAIN = (fp8.TENSOR, fp8.TENSOR_E5M2, fp8.CHANNEL, integer.INT8_CHANNEL)  # of any columns


def _aligned(w: Tensor) -> Tensor:
    """Return contiguous `w` at an address that is a multiple of 16, a copy if need be."""
    w = w.contiguous()
    return w if w.data_ptr() % 16 == 0 else w.clone()


def _places(sizes: Sequence[int], multiple: int = 1) -> list[int]:
    """Return where each of `sizes` begins when they follow each other, and where all end."""
    places = [0]
    for size in sizes:
        places.append(places[-1] + -(-size // multiple) * multiple)
    return places


class _Group:
    """Weights of one dtype, each matrix with its place after the first in memory, in `unit`
    elements; `starts` are of weights, `at` of all matrices.
    """

    def __init__(self, ws: Sequence[Tensor]) -> None:
        self.ws = [_aligned(w) for w in ws]
        self.first = min(self.ws, key=Tensor.data_ptr)
        size = self.first.element_size()
        base = self.first.data_ptr()
        at, self.sizes = [], []
        for w in self.ws:
            elements = w.shape[-2] * w.shape[-1]
            for index in range(w.shape[:-2].numel()):
                at.append((w.data_ptr() - base) // size + index * elements)
                self.sizes.append(elements)
        self.unit = 16 // size if all(place * size % 16 == 0 for place in at) else 1
        self.at = [place // self.unit for place in at]
        self.starts = [(w.data_ptr() - base) // size // self.unit for w in self.ws]

    @property
    def constants(self) -> dict:
        return {"BF16": self.first.dtype == torch.bfloat16, "UNIT": self.unit}


class _Table(NamedTuple):
    """Where the programs of a launch find their entries; `arguments` start with the table."""

    arguments: tuple[Tensor, Tensor, int, int]
    programs: int


def _table(
    device: torch.device, *jobs: Sequence[Sequence[int]], more: Sequence[int] = ()
) -> tuple[list[_Table], Tensor]:
    """Return the table of each launch, and the numbers `more`, in one copy to the device.

    A job is four lists as long as there are entries: places, sizes, places of results, programs.
    """
    pieces = [torch.tensor(more, dtype=torch.int64)]
    for at, sizes, places, programs in jobs:
        table = torch.tensor([at, sizes, places[: len(sizes)]]).t()
        firsts = torch.tensor(_places(programs), dtype=torch.int32)
        even = functional.pad(firsts, (0, len(firsts) % 2))
        pieces += [table.flatten(), even.view(torch.int64)]
    flat = torch.cat(pieces).to(device, non_blocking=True)
    found = flat.split([piece.numel() for piece in pieces])
    tables = []
    for job, table, firsts in zip(jobs, found[1::2], found[2::2], strict=True):
        entries = len(job[1])
        arguments = (table, firsts.view(torch.int32), entries, (entries - 1).bit_length())
        tables.append(_Table(arguments, sum(job[3])))
    return tables, found[0]


def _programs(sizes: Sequence[int], tile: int) -> list[int]:
    return [-(-size // tile) for size in sizes]


def _launch_shared(
    group: _Group, shared: Sequence[Tensor] | None, job: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor, _Table]:
    """Return patterns of amax, where scales are or will be, and the table for the launch that
    follows, which is `job`.
    """
    device = group.first.device
    if shared is not None:
        scale = torch.cat([s.reshape(-1) for s in shared])
        return scale.view(torch.int32), scale, _table(device, job)[0][0]
    counts = _programs(group.sizes, AMAX_TILE * AMAX_LOOPS)
    measured = (group.at, group.sizes, group.at, counts)
    (mine, table), _ = _table(device, job, measured)
    bits = torch.zeros(len(group.at), dtype=torch.int32, device=device)
    grouped_kernels._amax_kernel[(table.programs,)](
        *table.arguments,
        loadable(group.first),
        bits,
        **group.constants,
        TILE=AMAX_TILE,
        LOOPS=AMAX_LOOPS,
        **OPTIONS,
    )
    return bits, torch.empty(len(bits), dtype=torch.float32, device=device), mine


def _cut(flat: Tensor, ws: Sequence[Tensor], per: Callable[[Tensor], tuple[int, ...]]) -> list:
    """Cut a buffer into shapes that follow each other."""
    shapes = [per(w) for w in ws]
    counts = [torch.Size(shape).numel() for shape in shapes]
    pieces = flat.split(counts)
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _launch_nvfp4(ws: Sequence[Tensor], shared: Sequence[Tensor] | None) -> list[Parts]:
    group = _Group(ws)
    w, pairs = group.first, fp4_pair_kernels.takes(group.first)
    chosen = NVFP4_PAIRS if pairs else NVFP4
    sizes = [size // nvfp4.BLOCK for size in group.sizes]
    places = _places(sizes)
    packed = torch.empty(places[-1] * 8, dtype=torch.uint8, device=w.device)
    scale = torch.empty(places[-1], dtype=torch.uint8, device=w.device)
    with torch.cuda.device_of(w):
        job = (group.at, sizes, places, _programs(sizes, chosen["TILE"] * chosen["LOOPS"]))
        bits, g, table = _launch_shared(group, shared, job)
        results = (bits, packed.view(torch.int64), scale, g)
        constants = {"GIVEN": shared is not None, **OPTIONS, **chosen}
        if pairs:
            constants |= {"BF16": w.dtype == torch.bfloat16, "FEW": 32}
            words = w.view(torch.int32)
            grouped_kernels._nvfp4_pairs_kernel[(table.programs,)](
                *table.arguments, words, *results, **constants
            )
        else:
            grouped_kernels._nvfp4_kernel[(table.programs,)](
                *table.arguments, loadable(w), *results, **group.constants, **constants
            )
    scale = scale.view(torch.float8_e4m3fn)
    found = zip(
        _cut(packed, ws, lambda w: (*w.shape[:-1], w.shape[-1] // 2)),
        _cut(scale, ws, lambda w: (*w.shape[:-1], w.shape[-1] // nvfp4.BLOCK)),
        _cut(g, ws, lambda w: w.shape[:-2]) if shared is None else shared,
        strict=True,
    )
    return [{"data": p, "scale": s, "global_scale": g} for p, s, g in found]


def _in_16(flat: Tensor, ws: Sequence[Tensor], places: Sequence[int]) -> list[Tensor]:
    """Cut weights' elements out of a buffer where each begins at a multiple of 16."""
    return [flat[at : at + w.numel()].view(w.shape) for w, at in zip(ws, places, strict=True)]


def _launch_tensor(
    ws: Sequence[Tensor], shared: Sequence[Tensor] | None, element: Format
) -> list[Parts]:
    group = _Group(ws)
    w, per = group.first, TENSOR["TILE"] * 8 * TENSOR["LOOPS"]
    # Matrices of a stack follow each other, weights begin at multiples of 16.
    starts = _places([w.numel() for w in group.ws], 16)
    places = [
        start + index * w.shape[-2] * w.shape[-1]
        for w, start in zip(group.ws, starts, strict=False)
        for index in range(w.shape[:-2].numel())
    ]
    data = torch.empty(starts[-1], dtype=torch.uint8, device=w.device)
    aligned = all(size % 16 == 0 for size in group.sizes)
    with torch.cuda.device_of(w):
        placed = [place // 16 for place in places] if aligned else places
        job = (group.at, group.sizes, placed, _programs(group.sizes, per))
        bits, scale, table = _launch_shared(group, shared, job)
        grouped_kernels._fp8_kernel[(table.programs,)](
            *table.arguments,
            loadable(w),
            bits,
            data,
            scale,
            **group.constants,
            ELEMENT=element.name,
            ALIGNED=aligned,
            NATIVE=converts_fp8(w),
            GIVEN=shared is not None,
            **{**OPTIONS, **TENSOR},
        )
    data = _in_16(data.view(FP8_DTYPES[element.name]), ws, starts[:-1])
    scales = _cut(scale, ws, lambda w: w.shape[:-2]) if shared is None else shared
    return [{"data": d, "scale": s} for d, s in zip(data, scales, strict=True)]


def _launch_channel(ws: Sequence[Tensor], element: Format) -> list[Parts]:
    group = _Group(ws)
    w, counts = group.first, [w.numel() // w.shape[-1] for w in ws]
    places = _places([w.numel() for w in ws], 16)
    dtype = torch.int8 if element is INT8 else torch.uint8
    data = torch.empty(places[-1], dtype=dtype, device=w.device)
    scale = torch.empty(sum(counts), dtype=torch.float32, device=w.device)
    cols = [w.shape[-1] for w in ws]
    aligned = all(n % 16 == 0 for n in cols)
    wide = [n // 16 for n in cols] if aligned else cols
    shapes = [n for pair in zip(wide, _places(counts)[:-1], strict=True) for n in pair]
    with torch.cuda.device_of(w):
        placed = [place // 16 for place in places]
        job = (group.starts, counts, placed, _programs(counts, ROWS))
        (table,), shape = _table(w.device, job, more=shapes)
        grouped_kernels._channel_kernel[(table.programs,)](
            *table.arguments,
            shape,
            loadable(w),
            data,
            scale,
            **group.constants,
            ELEMENT=element.name,
            NATIVE=converts_fp8(w),
            LOOPS=ROWS,
            **rows.shape_of_launch(max(cols), aligned, w.element_size()),
        )
    data = _in_16(data.view(FP8_DTYPES.get(element.name, dtype)), ws, places[:-1])
    scales = _cut(scale, ws, lambda w: (*w.shape[:-1], 1))
    return [{"data": d, "scale": s} for d, s in zip(data, scales, strict=True)]


def _launch_mx(ws: Sequence[Tensor], element: Format, rule: str) -> list[Parts]:
    group = _Group(ws)
    w = group.first
    pairs = element is E2M1 and fp4_pair_kernels.takes(w)
    chosen = MX_PAIRS if pairs else MX
    sizes = [w.numel() // mx.BLOCK for w in ws]
    places = _places(sizes)
    width = mx.BLOCK // element.per_byte
    data = torch.empty(places[-1] * width, dtype=torch.uint8, device=w.device)
    scale = torch.empty(places[-1], dtype=torch.uint8, device=w.device)
    with torch.cuda.device_of(w):
        job = (group.starts, sizes, places, _programs(sizes, chosen["TILE"] * chosen["LOOPS"]))
        (table,), _ = _table(w.device, job)
        grouped_kernels._mx_kernel[(table.programs,)](
            *table.arguments,
            w.view(torch.int32) if pairs else loadable(w),
            data.view(torch.int32) if element is E2M1 else data,
            scale,
            **group.constants | ({"UNIT": 4} if pairs else {}),
            PAIRS=pairs,
            ELEMENT=element.name,
            RULE=rule,
            NATIVE=converts_fp8(w),
            **{**OPTIONS, **chosen},
        )
    data = data.view(mx.TORCH[element.name])
    found = zip(
        _cut(data, ws, lambda w: (*w.shape[:-1], w.shape[-1] // element.per_byte)),
        _cut(scale, ws, lambda w: (*w.shape[:-1], w.shape[-1] // mx.BLOCK)),
        strict=True,
    )
    return [{"data": d, "scale": s} for d, s in found]


def _is_group(ops: Ops, ws: Sequence[Tensor], rule: str) -> bool:
    """Say whether one set of launches can take these weights."""
    if ops is mx.MXFP8 or ops is mx.MXFP4:
        if rule not in mx.RULES or rule == "mse":
            return False
    elif (ops is not nvfp4.NVFP4 and ops not in PLAIN) or rule != "amax":
        return False
    return all(use_kernel(w) and w.dtype == ws[0].dtype and w.device == ws[0].device for w in ws)


@typed
def quantize(
    ops: Ops,
    ws: Sequence[Tensor],
    shared: Sequence[Tensor] | None = None,
    rule: str = "amax",
) -> list[Parts]:
    """Return what `ops.quantize` returns for each of the weights `ws`, in one set of launches where
    they can be a group.

    `shared` are the scales that each weight shares, fp32 `[*]`; None: from its own largest
    magnitude, where the scheme has such a scale.
    Raises ValueError for a dtype, shape or rule that the scheme does not take, or one shared scale
    too few.
    """
    if shared is not None and len(shared) != len(ws):
        raise ValueError(f"{len(shared)} shared scales for {len(ws)} weights")
    if len(ws) < 2 or not _is_group(ops, ws, rule):
        given = [None] * len(ws) if shared is None else shared
        return [ops.quantize(w, s, rule) for w, s in zip(ws, given, strict=True)]
    width = nvfp4.BLOCK if ops is nvfp4.NVFP4 else mx.BLOCK
    for w in ws:
        amax_of.check_weight(w, 1 if ops in PLAIN else width)
    for w, scale in zip(ws, shared or (), strict=False):
        check_scale(scale, w.shape[:-2], w.device, name="shared scale")
    if ops is nvfp4.NVFP4:
        return _launch_nvfp4(ws, shared)
    if ops in (fp8.TENSOR, fp8.TENSOR_E5M2):
        return _launch_tensor(ws, shared, E4M3 if ops is fp8.TENSOR else E5M2)
    if ops in (fp8.CHANNEL, integer.INT8_CHANNEL):
        return _launch_channel(ws, E4M3 if ops is fp8.CHANNEL else INT8)
    return _launch_mx(ws, E4M3 if ops is mx.MXFP8 else E2M1, rule)
