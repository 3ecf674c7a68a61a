"""The loops of `cpu_numba` that dequantize, compiled when they are first called.

`value = element * step` in fp32, rounded once to bf16; bf16 is written as int16, fp32 as int32. For
E2M1 to 16 bits the eight values of each step are given as patterns, and a code chooses among them.
"""

from numba import int64  # pyright: ignore[reportMissingImports]

from lowbit_kernels.cpu_rounding import decode_e2m1
from lowbit_kernels.cpu_vectors import F32, I8, I16, I32, Lanes, Memory, jit, vectors, where

VALUES = 8 * 16  # of a step: eight patterns, each in sixteen lanes


def _e4m3(code: Lanes) -> Lanes:
    """Return fp32 of E4M3 codes in lanes of 32 bits; a subnormal on the way would be slow."""
    a = code & 0x7F
    small = (a.signed_to(F32) * 2.0**-9).read_as(I32)
    bits = where((a * -1).above(-8), small, (a << 20) + (120 << 23))
    bits = where(a.equals(0x7F), 0x7FC00000, bits)
    return (bits | ((code & 0x80) << 24)).read_as(F32)


def _e5m2(code: Lanes) -> Lanes:
    a = code & 0x7F
    small = (a.signed_to(F32) * 2.0**-16).read_as(I32)
    bits = where((a * -1).above(-4), small, (a << 21) + (112 << 23))
    # Inf, and NaN of whichever mantissa.
    bits = where(a.above(0x7B), (a << 21) + (224 << 23), bits)
    return (bits | ((code & 0x80) << 24)).read_as(F32)


def _int8(code: Lanes) -> Lanes:
    return code.to(I8).signed_to(F32)


def _stored(value: Lanes, one: object) -> Lanes:
    """Return the pattern of fp32 values: of bf16, rounded to nearest even, where `one` is int16."""
    bits = value.read_as(I32)
    if one != I16:
        return bits
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return where((bits & 0x7FFFFFFF).above(0x7F800000), 0x7FC0, rounded).to(I16)


def _nibbles(data: Memory, at: Lanes) -> Lanes:
    """Return the 16 codes of 8 bytes, a byte each, the low nibbles first."""
    pairs = data.load(at, 8).to(I16)
    return ((pairs | (pairs << 4)) & 0x0F0F).read_as(I8)


def _eight(decode):
    """Return functions that write 16 values, and one, of a format of 8 bits."""

    def wide(data: Memory, at: Lanes, step: Lanes, out: Memory, to: Lanes) -> None:
        value = decode(data.load(at, 16).to(I32)) * step.spread(16)
        out.store(to, _stored(value, out.one))

    def single(data: Memory, at: Lanes, step: Lanes, out: Memory, to: Lanes) -> None:
        value = decode(data.load(at, 1).to(I32)) * step
        out.store(to, _stored(value, out.one))

    return vectors(wide), vectors(single)


_e4m3_wide, _e4m3_one = _eight(_e4m3)
_e5m2_wide, _e5m2_one = _eight(_e5m2)
_int8_wide, _int8_one = _eight(_int8)


@vectors
def _four_wide(data: Memory, at: Lanes, step: Lanes, out: Memory, to: Lanes) -> None:
    """Write values of the 16 E2M1 codes of 8 bytes."""
    value = decode_e2m1(_nibbles(data, at).to(I32)) * step.spread(16)
    out.store(to, _stored(value, out.one))


@vectors
def _four_chosen(data: Memory, at: Lanes, values: Memory, row: Lanes, out: Memory, to: Lanes):
    """Write 16 of the eight values of a step, with the signs of their codes."""
    codes = _nibbles(data, at).to(I16)
    given = [values.load(row + 16 * k, 16) for k in range(8)]
    for bit in (1, 2, 4):
        clear = (codes & bit).equals(0)
        given = [where(clear, *pair) for pair in zip(given[::2], given[1::2], strict=True)]
    out.store(to, given[0] ^ ((codes & 8) << 12))


@jit
def _run(data, kind, step, out, first, stop):
    """Write values of elements `first` to `stop` of E4M3, E5M2 or INT8, kind 0, 1, 2."""
    body = stop - (stop - first) % 16
    if kind == 0:
        for i in range(first, body, 16):
            _e4m3_wide(data, i, step, out, i)
        for i in range(body, stop):
            _e4m3_one(data, i, step, out, i)
    elif kind == 1:
        for i in range(first, body, 16):
            _e5m2_wide(data, i, step, out, i)
        for i in range(body, stop):
            _e5m2_one(data, i, step, out, i)
    else:
        for i in range(first, body, 16):
            _int8_wide(data, i, step, out, i)
        for i in range(body, stop):
            _int8_one(data, i, step, out, i)


@jit
def eight_bits(data, kind, steps, out):
    """Write values `[groups, n]`; a step holds for an equal share of a group."""
    groups, blocks = steps.shape
    width = out.shape[1] // blocks
    for group in range(groups):
        codes, into = data[group], out[group]
        for block in range(blocks):
            step = steps[group, block]
            _run(codes, kind, step, into, block * width, (block + 1) * width)


@jit
def four_bits(data, steps, out):
    """Write values of packed E2M1 codes with a step for an equal share of a group, of 16 or 32."""
    groups, blocks = steps.shape
    width = out.shape[1] // blocks
    for group in range(groups):
        codes, into = data[group], out[group]
        for block in range(blocks):
            step = steps[group, block]
            for at in range(block * width, (block + 1) * width, 16):
                _four_wide(codes, at >> 1, step, into, at)


@jit
def four_bits_chosen(data, scales, values, out):
    """Write values of packed E2M1 codes from those that `values [groups, n]` holds by scale."""
    groups, blocks = scales.shape
    width = out.shape[1] // blocks
    for group in range(groups):
        codes, given, into = data[group], values[group], out[group]
        for block in range(blocks):
            row = int64(scales[group, block]) * VALUES
            for at in range(block * width, (block + 1) * width, 16):
                _four_chosen(codes, at >> 1, given, row, into, at)


@jit
def fp8_blocks(data, scale, rows, cols, high, out):
    """Write values of E4M3 `[rows * cols]` with `scale [n, across]` for blocks of `high` x 128."""
    for row in range(rows):
        for block in range(scale.shape[1]):
            first = row * cols + block * 128
            stop = min(first + 128, (row + 1) * cols)
            _run(data, 0, scale[row // high, block], out, first, stop)
