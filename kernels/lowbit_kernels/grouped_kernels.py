"""The kernels of `grouped`: those of one weight, around a table of where weights lie.

A program looks up which entry it works on and which of the entry's programs it is, then does LOOPS
tiles of it, so that what it looked up is paid for once. Weights are found from one pointer, that of
the first in memory, at multiples of UNIT elements, and places of results are kept in sixteens too:
what is multiplied by sixteen is known to the compiler as a multiple of it, and lets it load and
store sixteen bytes at a time. Of a number out of a table it knows nothing, whatever is asserted.
"""

from lowbit_kernels import fp8, mx, nvfp4, rows
from lowbit_kernels.amax import scale_from_bits
from lowbit_kernels.fp4_pairs import quantize_mxfp4_pairs, quantize_pairs
from lowbit_kernels.jit import jit, tl
from lowbit_kernels.rounding import magnitude_bits, widen


@jit
def _mine(table_ptr, first_ptr, entries, steps):
    """Return what this program works on: the entry, the entry's place, size and place of results,
    and which of its programs this is.

    A row of the table is: place in units, size, the place of the results. `first` holds the first
    program of each of the `entries`; they are at most 2^steps, one of which is found by bisection.
    """
    entry = 0
    for step in range(steps):
        next_one = entry + (1 << (steps - 1 - step))
        first = tl.load(first_ptr + next_one, mask=next_one < entries, other=0x7FFFFFFF)
        entry = tl.where(first <= tl.program_id(0), next_one, entry)
    program = (tl.program_id(0) - tl.load(first_ptr + entry)).to(tl.int64)
    row_ptr = table_ptr + entry * 3
    return entry, tl.load(row_ptr), tl.load(row_ptr + 1), tl.load(row_ptr + 2), program


@jit
def _amax_kernel(
    table_ptr,  # [entries, 3] int64, sizes in elements
    first_ptr,  # [entries] int32
    entries,
    steps,
    w_ptr,  # fp32, fp16, or bf16 as int16
    out_ptr,  # [entries] int32, zero: patterns of fp32 magnitudes
    BF16: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    LOOPS: tl.constexpr,
):
    """Raise the pattern of an entry to the largest of TILE * LOOPS of its elements."""
    entry, at, size, _, program = _mine(table_ptr, first_ptr, entries, steps)
    start = program * (TILE * LOOPS)
    w_ptr += at * UNIT + start
    top = tl.zeros([TILE], tl.int32)
    for loop in range(LOOPS):
        offset = loop * TILE + tl.arange(0, TILE)
        x = widen(tl.load(w_ptr + offset, mask=offset < size - start, other=0), BF16)
        top = tl.maximum(top, magnitude_bits(x))
    tl.atomic_max(out_ptr + entry, tl.max(top, axis=0), sem="relaxed")


@jit
def _shared_scale(bits_ptr, scale_ptr, entry, program, LARGEST: tl.constexpr, GIVEN: tl.constexpr):
    """Return the scale of an entry: as given, or from its amax, which its first program keeps."""
    if GIVEN:
        scale = tl.load(scale_ptr + entry)
    else:
        scale = scale_from_bits(tl.load(bits_ptr + entry), LARGEST)
        if program == 0:
            tl.store(scale_ptr + entry, scale)
    return scale


@jit
def _nvfp4_pairs_kernel(
    table_ptr,  # [entries, 3] int64, sizes and places in blocks
    first_ptr,  # [entries] int32
    entries,
    steps,
    w_ptr,  # int32, two elements each
    bits_ptr,  # [entries] int32, patterns of amax
    packed_ptr,  # [blocks] int64
    scale_ptr,  # [blocks] E4M3 as uint8
    global_scale_ptr,  # [entries] fp32
    BF16: tl.constexpr,
    GIVEN: tl.constexpr,
    TILE: tl.constexpr,
    FEW: tl.constexpr,
    LOOPS: tl.constexpr,
):
    """Quantize TILE * LOOPS blocks of an entry; a unit is four pairs."""
    entry, at, size, place, program = _mine(table_ptr, first_ptr, entries, steps)
    g = _shared_scale(bits_ptr, global_scale_ptr, entry, program, 2688.0, GIVEN)
    w_ptr += at * 4
    for loop in range(LOOPS):
        start = (program * LOOPS + loop) * TILE
        quantize_pairs(
            w_ptr + start * 8,
            packed_ptr + place + start,
            scale_ptr + place + start,
            g,
            size - start,
            1,
            1,
            BF16,
            False,
            False,
            TILE,
            FEW,
        )


@jit
def _nvfp4_kernel(
    table_ptr,  # [entries, 3] int64, sizes and places in blocks
    first_ptr,  # [entries] int32
    entries,
    steps,
    w_ptr,  # fp32, fp16, or bf16 as int16
    bits_ptr,  # [entries] int32, patterns of amax
    packed_ptr,  # [blocks] int64
    scale_ptr,  # [blocks] E4M3 as uint8
    global_scale_ptr,  # [entries] fp32
    BF16: tl.constexpr,
    UNIT: tl.constexpr,
    GIVEN: tl.constexpr,
    TILE: tl.constexpr,
    LOOPS: tl.constexpr,
):
    """Quantize TILE * LOOPS blocks of an entry."""
    entry, at, size, place, program = _mine(table_ptr, first_ptr, entries, steps)
    g = _shared_scale(bits_ptr, global_scale_ptr, entry, program, 2688.0, GIVEN)
    w_ptr += at * UNIT
    for loop in range(LOOPS):
        start = (program * LOOPS + loop) * TILE
        nvfp4.quantize_tile(
            w_ptr + start * 16,
            packed_ptr + place + start,
            scale_ptr,
            global_scale_ptr,
            g,
            start,
            size - start,
            place + start,
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
    table_ptr,  # [entries, 3] int64, sizes in elements, places in sixteens where ALIGNED
    first_ptr,  # [entries] int32
    entries,
    steps,
    w_ptr,  # fp32, fp16, or bf16 as int16
    bits_ptr,  # [entries] int32, patterns of amax
    data_ptr,  # FP8 codes as uint8
    scale_ptr,  # [entries] fp32
    BF16: tl.constexpr,
    UNIT: tl.constexpr,
    ELEMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    NATIVE: tl.constexpr,
    GIVEN: tl.constexpr,
    TILE: tl.constexpr,
    LOOPS: tl.constexpr,
):
    """Cast TILE * LOOPS times eight elements of an entry."""
    entry, at, size, place, program = _mine(table_ptr, first_ptr, entries, steps)
    scale = _shared_scale(
        bits_ptr, scale_ptr, entry, program, 448.0 if ELEMENT == "E4M3" else 57344.0, GIVEN
    )
    w_ptr += at * UNIT
    data_ptr += place * (16 if ALIGNED else 1)
    for loop in range(LOOPS):
        start = (program * LOOPS + loop) * (TILE * 8)
        left = size - start
        fp8.cast_tile(
            w_ptr + start, data_ptr + start, scale, left, ELEMENT, BF16, ALIGNED, NATIVE, TILE
        )


@jit
def _channel_kernel(
    table_ptr,  # [entries, 3] int64, sizes in rows, places in sixteens
    first_ptr,  # [entries] int32
    entries,
    steps,
    shape_ptr,  # [entries, 2] int64: columns, in sixteens where ALIGNED, and the rows before
    w_ptr,  # fp32, fp16, or bf16 as int16
    data_ptr,  # E4M3 as uint8, or int8
    scale_ptr,  # [rows] fp32
    BF16: tl.constexpr,
    UNIT: tl.constexpr,
    ELEMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    NATIVE: tl.constexpr,
    ONCE: tl.constexpr,
    TILE: tl.constexpr,
    LOOPS: tl.constexpr,
):
    """Quantize LOOPS rows of an entry."""
    entry, at, size, place, program = _mine(table_ptr, first_ptr, entries, steps)
    cols = tl.load(shape_ptr + entry * 2) * (16 if ALIGNED else 1)
    scale_ptr += tl.load(shape_ptr + entry * 2 + 1)
    w_ptr += at * UNIT
    data_ptr += place * 16
    for loop in range(LOOPS):
        row = program * LOOPS + loop
        if row < size:
            rows.quantize_row(
                w_ptr + row * cols,
                data_ptr + row * cols,
                scale_ptr + row,
                cols,
                BF16,
                ELEMENT,
                ALIGNED,
                NATIVE,
                ONCE,
                TILE,
            )


@jit
def _mx_kernel(
    table_ptr,  # [entries, 3] int64, sizes and places in blocks
    first_ptr,  # [entries] int32
    entries,
    steps,
    w_ptr,  # fp32, fp16, or bf16 as int16; int32 of two elements each where PAIRS
    data_ptr,  # [blocks, 32] FP8 codes as uint8, or [blocks, 4] int32 of E2M1 codes
    scale_ptr,  # [blocks] E8M0 as uint8
    BF16: tl.constexpr,
    UNIT: tl.constexpr,
    PAIRS: tl.constexpr,
    ELEMENT: tl.constexpr,
    RULE: tl.constexpr,
    NATIVE: tl.constexpr,
    TILE: tl.constexpr,
    LOOPS: tl.constexpr,
):
    """Quantize TILE * LOOPS blocks of an entry."""
    _, at, size, place, program = _mine(table_ptr, first_ptr, entries, steps)
    w_ptr += at * UNIT
    for loop in range(LOOPS):
        start = (program * LOOPS + loop) * TILE
        first = place + start
        if PAIRS:
            quantize_mxfp4_pairs(
                w_ptr + start * 16,
                data_ptr + first * 4,
                scale_ptr,
                size - start,
                first,
                1,
                1,
                BF16,
                False,
                False,
                RULE,
                TILE,
            )
        else:
            mx.quantize_tile(
                w_ptr + start * 32,
                data_ptr + first * (4 if ELEMENT == "E2M1" else 32),
                scale_ptr,
                size - start,
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
