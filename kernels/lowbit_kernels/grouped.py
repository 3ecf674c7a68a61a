"""Quantize many weights in one set of launches, with the bytes of one at a time.

| scheme | launches for a group, however many weights |
|---|---|
| NVFP4 (rule amax), FP8 per tensor | a memset, amax, quantize; shared scales given: quantize |
| FP8 per channel, MXFP8, MXFP4 | quantize |

and before them one copy of a table to the device. Weights are read where they lie: the table holds
the address and size of each matrix, and a map says which matrix a program works on and what its
first program is. The parts of a group are cut out of one buffer for each part, so keeping the parts
of one weight keeps those of all. What does not fit goes one by one: other rules, weights of
different dtypes or devices, weights without elements, references.

    parts = grouped.quantize(nvfp4.NVFP4, weights)       # a list of what NVFP4.quantize returns

Arithmetic is that of `nvfp4`, `fp8`, `mx`; there are no equations of its own.
"""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lowbit_kernels import amax as amax_of
from lowbit_kernels import fp8, mx, nvfp4, rows
from lowbit_kernels.formats import E2M1, E4M3, Format
from lowbit_kernels.jit import OPTIONS, converts_fp8, jit, tl, use_kernel, use_new_kernel
from lowbit_kernels.ops import Ops
from lowbit_kernels.rounding import magnitude_bits, widen

Parts = dict[str, Tensor]
_WORD = {torch.float32: "FP32", torch.float16: "FP16", torch.bfloat16: "INT16"}
_AMAX_TILE, _AMAX_LOOPS = 4096, 4


@jit
def _mine(table_ptr, map_ptr):
    """Return what this program works on: the entry, the address of its row in the table, and which
    of the entry's programs this is.

    A row is: address, size, the first program, the place of the results.
    """
    entry = tl.load(map_ptr + tl.program_id(0))
    row_ptr = table_ptr + entry * 4
    return entry, row_ptr, tl.program_id(0) - tl.load(row_ptr + 2)


@jit
def _address(row_ptr, WORD: tl.constexpr):
    """Return the address in a row of the table as a pointer to words of a type."""
    if WORD == "FP32":
        return tl.load(row_ptr).to(tl.pointer_type(tl.float32))
    elif WORD == "FP16":
        return tl.load(row_ptr).to(tl.pointer_type(tl.float16))
    else:
        return tl.load(row_ptr).to(tl.pointer_type(tl.int16))


@jit
def _amax_kernel(
    table_ptr,  # [entries, 4] int64, sizes in elements
    map_ptr,  # [programs] int64
    out_ptr,  # [entries] int32, zero: patterns of fp32 magnitudes
    BF16: tl.constexpr,
    WORD: tl.constexpr,
    TILE: tl.constexpr,
    LOOPS: tl.constexpr,
):
    """Raise the pattern of an entry to the largest of TILE * LOOPS of its elements."""
    entry, row_ptr, program = _mine(table_ptr, map_ptr)
    w_ptr = _address(row_ptr, WORD)
    size = tl.load(row_ptr + 1)
    top = tl.zeros([TILE], tl.int32)
    for loop in range(LOOPS):
        offset = (program * LOOPS + loop) * TILE + tl.arange(0, TILE)
        x = widen(tl.load(w_ptr + offset, mask=offset < size, other=0), BF16)
        top = tl.maximum(top, magnitude_bits(x))
    tl.atomic_max(out_ptr + entry, tl.max(top, axis=0), sem="relaxed")


@jit
def _shared_scale(bits_ptr, scale_ptr, entry, program, LARGEST: tl.constexpr, GIVEN: tl.constexpr):
    """Return the scale of an entry: as given, or fl(amax / LARGEST), which its first program keeps;
    0 becomes the least subnormal, of zeros 1.
    """
    if GIVEN:
        scale = tl.load(scale_ptr + entry)
    else:
        amax = tl.load(bits_ptr + entry).to(tl.float32, bitcast=True)
        scale = tl.math.div_rn(amax, LARGEST)
        scale = tl.where(scale == 0, 2.0**-149, scale)
        scale = tl.where(amax == 0, 1.0, scale)
        if program == 0:
            tl.store(scale_ptr + entry, scale)
    return scale


@jit
def _nvfp4_kernel(
    table_ptr,  # [entries, 4] int64, sizes and places in blocks
    map_ptr,  # [programs] int64
    bits_ptr,  # [entries] int32, patterns of amax
    packed_ptr,  # [blocks] int64
    scale_ptr,  # [blocks] E4M3 as uint8
    global_scale_ptr,  # [entries] fp32
    BF16: tl.constexpr,
    WORD: tl.constexpr,
    GIVEN: tl.constexpr,
    TILE: tl.constexpr,
):
    """Quantize TILE blocks of an entry."""
    entry, row_ptr, program = _mine(table_ptr, map_ptr)
    g = _shared_scale(bits_ptr, global_scale_ptr, entry, program, 2688.0, GIVEN)
    start = program * TILE
    left = tl.load(row_ptr + 1) - start
    first = tl.load(row_ptr + 3) + start
    packed_ptr += first
    address = tl.multiple_of(_address(row_ptr, WORD), 16)
    nvfp4.quantize_tile(
        address + start * 16,
        packed_ptr,
        scale_ptr,
        global_scale_ptr,
        g,
        start,
        left,
        first,
        1,
        1,
        BF16,
        False,
        False,
        False,
        0,
        0,
        TILE,
    )


@jit
def _fp8_kernel(
    table_ptr,  # [entries, 4] int64, sizes and places in elements
    map_ptr,  # [programs] int64
    bits_ptr,  # [entries] int32, patterns of amax
    data_ptr,  # E4M3 as uint8
    scale_ptr,  # [entries] fp32
    BF16: tl.constexpr,
    WORD: tl.constexpr,
    ALIGNED: tl.constexpr,
    NATIVE: tl.constexpr,
    GIVEN: tl.constexpr,
    TILE: tl.constexpr,
):
    """Cast TILE times eight elements of an entry."""
    entry, row_ptr, program = _mine(table_ptr, map_ptr)
    scale = _shared_scale(bits_ptr, scale_ptr, entry, program, 448.0, GIVEN)
    start = program * (TILE * 8)
    address = _address(row_ptr, WORD)
    place = tl.load(row_ptr + 3)
    if ALIGNED:
        address = tl.multiple_of(address, 16)
        place = tl.multiple_of(place, 16)
    left = tl.load(row_ptr + 1) - start
    fp8.cast_tile(
        address + start, data_ptr + place + start, scale, left, "E4M3", BF16, ALIGNED, NATIVE, TILE
    )


@jit
def _channel_kernel(
    table_ptr,  # [entries, 4] int64, sizes in columns, places in elements
    map_ptr,  # [rows] int64
    data_ptr,  # E4M3 as uint8
    scale_ptr,  # [rows] fp32
    BF16: tl.constexpr,
    WORD: tl.constexpr,
    ALIGNED: tl.constexpr,
    NATIVE: tl.constexpr,
    ONCE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Quantize a row of an entry."""
    _entry, row_ptr, row = _mine(table_ptr, map_ptr)
    address = _address(row_ptr, WORD)
    cols = tl.load(row_ptr + 1)
    place = tl.multiple_of(tl.load(row_ptr + 3), 16)
    if ALIGNED:
        address = tl.multiple_of(address, 16)
        cols = tl.multiple_of(cols, 16)
    rows.quantize_row(
        address + row * cols,
        data_ptr + place + row * cols,
        scale_ptr + tl.program_id(0),
        cols,
        BF16,
        "E4M3",
        ALIGNED,
        NATIVE,
        ONCE,
        TILE,
    )


@jit
def _mx_kernel(
    table_ptr,  # [entries, 4] int64, sizes and places in blocks
    map_ptr,  # [programs] int64
    data_ptr,  # [blocks, 32] FP8 codes as uint8, or [blocks, 4] int32 of E2M1 codes
    scale_ptr,  # [blocks] E8M0 as uint8
    BF16: tl.constexpr,
    WORD: tl.constexpr,
    ELEMENT: tl.constexpr,
    RULE: tl.constexpr,
    NATIVE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Quantize TILE blocks of an entry."""
    _entry, row_ptr, program = _mine(table_ptr, map_ptr)
    start = program * TILE
    first = tl.load(row_ptr + 3) + start
    address = tl.multiple_of(_address(row_ptr, WORD), 16)
    mx.quantize_tile(
        address + start * 32,
        data_ptr + first * (4 if ELEMENT == "E2M1" else 32),
        scale_ptr,
        tl.load(row_ptr + 1) - start,
        first,
        1,
        1,
        BF16,
        False,
        False,
        ELEMENT,
        RULE,
        NATIVE,
        TILE,
    )


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


def _table(
    device: torch.device, jobs: Sequence[tuple[Sequence[int], ...]]
) -> list[tuple[Tensor, Tensor]]:
    """Return table and map of each launch, in one copy to the device.

    A job is four lists as long as there are entries: addresses, sizes, places, programs.
    """
    pieces, bounds = [], [0]
    for addresses, sizes, places, programs in jobs:
        firsts = _places(programs)[:-1]
        table = torch.tensor([addresses, sizes, firsts, places[: len(sizes)]]).t()
        owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(programs))
        for piece in (table.flatten(), owner):
            pieces.append(piece)
            bounds.append(bounds[-1] + piece.numel())
    flat = torch.cat(pieces)
    if device.type == "cuda":
        flat = flat.pin_memory().to(device, non_blocking=True)
    cut = [flat[a:b] for a, b in itertools.pairwise(bounds)]
    return list(zip(cut[0::2], cut[1::2], strict=True))


def _matrices(ws: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """Return the address of each matrix of contiguous `ws`, and its elements."""
    addresses, sizes = [], []
    for w in ws:
        size = w.shape[-2] * w.shape[-1]
        for index in range(w.shape[:-2].numel()):
            addresses.append(w.data_ptr() + index * size * w.element_size())
            sizes.append(size)
    return addresses, sizes


def _constants(w: Tensor) -> dict:
    return {"BF16": w.dtype == torch.bfloat16, "WORD": _WORD[w.dtype]}


def _launch_shared(
    ws: Sequence[Tensor],
    shared: Sequence[Tensor] | None,
    programs: Sequence[int],
    sizes: Sequence[int],
    places: Sequence[int],
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Return patterns of amax, where scales are or will be, and table and map for the elements.

    `sizes`, `places` and `programs` are those of the launch that follows.
    """
    device = ws[0].device
    addresses, elements = _matrices(ws)
    jobs = [(addresses, sizes, places, programs)]
    if shared is not None:
        scale = torch.cat([s.reshape(-1) for s in shared])
        return scale.view(torch.int32), scale, _table(device, jobs)[0]
    tile = _AMAX_TILE * _AMAX_LOOPS
    counts = [-(-size // tile) for size in elements]
    mine, (table, owner) = _table(device, [*jobs, (addresses, elements, places, counts)])
    bits = torch.zeros(len(addresses), dtype=torch.int32, device=device)
    _amax_kernel[(len(owner),)](
        table, owner, bits, **_constants(ws[0]), TILE=_AMAX_TILE, LOOPS=_AMAX_LOOPS, **OPTIONS
    )
    return bits, torch.empty(len(addresses), dtype=torch.float32, device=device), mine


def _cut(flat: Tensor, ws: Sequence[Tensor], per: Callable[[Tensor], tuple[int, ...]]) -> list:
    """Cut a buffer into shapes that follow each other."""
    shapes = [per(w) for w in ws]
    counts = [torch.Size(shape).numel() for shape in shapes]
    pieces = flat.split(counts)
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _launch_nvfp4(ws: Sequence[Tensor], shared: Sequence[Tensor] | None) -> list[Parts]:
    ws = [_aligned(w) for w in ws]
    w, device = ws[0], ws[0].device
    tile = 128
    sizes = [size // nvfp4.BLOCK for size in _matrices(ws)[1]]
    places = _places(sizes)
    packed = torch.empty(places[-1] * 8, dtype=torch.uint8, device=device)
    scale = torch.empty(places[-1], dtype=torch.uint8, device=device)
    with torch.cuda.device_of(w):
        programs = [-(-size // tile) for size in sizes]
        bits, g, (table, owner) = _launch_shared(ws, shared, programs, sizes, places)
        _nvfp4_kernel[(len(owner),)](
            table,
            owner,
            bits,
            packed.view(torch.int64),
            scale,
            g,
            BF16=w.dtype == torch.bfloat16,
            WORD=_WORD[w.dtype],
            GIVEN=shared is not None,
            TILE=tile,
            **OPTIONS,
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


def _launch_tensor(ws: Sequence[Tensor], shared: Sequence[Tensor] | None) -> list[Parts]:
    ws = [_aligned(w) for w in ws]
    w = ws[0]
    sizes = _matrices(ws)[1]
    # Matrices of a stack follow each other, weights begin at multiples of 16.
    starts = _places([w.numel() for w in ws], 16)
    places = [
        start + index * w.shape[-2] * w.shape[-1]
        for w, start in zip(ws, starts, strict=False)
        for index in range(w.shape[:-2].numel())
    ]
    data = torch.empty(starts[-1], dtype=torch.uint8, device=w.device)
    aligned = all(size % 16 == 0 for size in sizes)
    with torch.cuda.device_of(w):
        programs = [-(-size // 2048) for size in sizes]
        bits, scale, (table, owner) = _launch_shared(ws, shared, programs, sizes, places)
        _fp8_kernel[(len(owner),)](
            table,
            owner,
            bits,
            data,
            scale,
            **_constants(w),
            ALIGNED=aligned,
            NATIVE=converts_fp8(w),
            GIVEN=shared is not None,
            TILE=256,
            **OPTIONS,
        )
    data = _in_16(data.view(torch.float8_e4m3fn), ws, starts[:-1])
    scales = _cut(scale, ws, lambda w: w.shape[:-2]) if shared is None else shared
    return [{"data": d, "scale": s} for d, s in zip(data, scales, strict=True)]


def _launch_channel(ws: Sequence[Tensor]) -> list[Parts]:
    ws = [_aligned(w) for w in ws]
    w, counts = ws[0], [w.numel() // w.shape[-1] for w in ws]
    places = _places([w.numel() for w in ws], 16)
    data = torch.empty(places[-1], dtype=torch.uint8, device=w.device)
    scale = torch.empty(sum(counts), dtype=torch.float32, device=w.device)
    cols = [w.shape[-1] for w in ws]
    with torch.cuda.device_of(w):
        job = ([w.data_ptr() for w in ws], cols, places, counts)
        ((table, owner),) = _table(w.device, [job])
        _channel_kernel[(len(owner),)](
            table,
            owner,
            data,
            scale,
            **_constants(w),
            NATIVE=converts_fp8(w),
            **rows.shape_of_launch(max(cols), all(c % 16 == 0 for c in cols), w.element_size()),
        )
    data = _in_16(data.view(torch.float8_e4m3fn), ws, places[:-1])
    scales = _cut(scale, ws, lambda w: (*w.shape[:-1], 1))
    return [{"data": d, "scale": s} for d, s in zip(data, scales, strict=True)]


def _launch_mx(ws: Sequence[Tensor], element: Format, rule: str) -> list[Parts]:
    ws = [_aligned(w) for w in ws]
    w = ws[0]
    sizes = [w.numel() // mx.BLOCK for w in ws]
    places = _places(sizes)
    width = mx.BLOCK // element.per_byte
    data = torch.empty(places[-1] * width, dtype=torch.uint8, device=w.device)
    scale = torch.empty(places[-1], dtype=torch.uint8, device=w.device)
    with torch.cuda.device_of(w):
        programs = [-(-size // 32) for size in sizes]
        ((table, owner),) = _table(
            w.device, [([w.data_ptr() for w in ws], sizes, places, programs)]
        )
        _mx_kernel[(len(owner),)](
            table,
            owner,
            data.view(torch.int32) if element is E2M1 else data,
            scale,
            **_constants(w),
            ELEMENT=element.name,
            RULE=rule,
            NATIVE=converts_fp8(w),
            TILE=32,
            **{**OPTIONS, "num_warps": 2},
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
    elif ops not in (nvfp4.NVFP4, fp8.TENSOR, fp8.CHANNEL) or rule != "amax":
        return False
    if ops is nvfp4.NVFP4 and not all(use_new_kernel(w) for w in ws):
        return False
    return all(use_kernel(w) and w.dtype == ws[0].dtype and w.device == ws[0].device for w in ws)


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
        amax_of.check_weight(w, 1 if ops in (fp8.TENSOR, fp8.CHANNEL) else width)
    if ops is nvfp4.NVFP4:
        return _launch_nvfp4(ws, shared)
    if ops is fp8.TENSOR:
        return _launch_tensor(ws, shared)
    if ops is fp8.CHANNEL:
        return _launch_channel(ws)
    return _launch_mx(ws, E4M3 if ops is mx.MXFP8 else E2M1, rule)
