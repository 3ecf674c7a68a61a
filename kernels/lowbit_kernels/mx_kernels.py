"""The kernels of `mx`, which holds their equations and references: quantize by a rule, or with the
best of three scales, and dequantize.
"""

from lowbit_kernels.jit import jit, static_range, tl
from lowbit_kernels.layout import store_scales
from lowbit_kernels.mx_scales import scale_codes
from lowbit_kernels.rounding import (
    decode_e2m1,
    decode_e4m3,
    decode_e5m2,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    encode_e5m2,
    fp8_bytes,
    magnitude_bits,
    narrow,
    pack_nibbles,
    reciprocal_e8m0,
    swap_nibbles,
    tree_sum,
    widen,
)


@jit
def _encode(y, x, ELEMENT: tl.constexpr):
    """Return codes of y, which is x in units of the scale."""
    if ELEMENT == "E4M3":
        return encode_e4m3(y)
    elif ELEMENT == "E5M2":
        return encode_e5m2(y)
    else:
        return encode_e2m1(tl.abs(y)) | tl.where(x < 0, 8, 0)


@jit
def _decode(code, ELEMENT: tl.constexpr):
    """Return fp32 values of codes."""
    if ELEMENT == "E4M3":
        return decode_e4m3(code)
    elif ELEMENT == "E5M2":
        return decode_e5m2(code)
    else:
        return decode_e2m1(code)


@jit
def _store(
    data_ptr,
    y,
    x,
    offset,
    mask,
    ELEMENT: tl.constexpr,
    HIGH: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Store the codes of y `[N, 8]`, which is x in units of the scale, at element `offset [N]`."""
    column = tl.arange(0, 8)[None, :]
    if ELEMENT == "E2M1":
        word = pack_nibbles(_encode(y, x, ELEMENT), column, 1)
        if HIGH:
            word = swap_nibbles(word)
        tl.store(data_ptr + offset // 8, word, mask)
    else:
        tl.store(
            data_ptr + offset[:, None] + column, fp8_bytes(y, ELEMENT, NATIVE), mask=mask[:, None]
        )


@jit
def quantize_tile(
    w_ptr,
    data_ptr,
    scale_ptr,
    left,
    first,
    rows,
    across,
    BF16: tl.constexpr,
    SWIZZLED: tl.constexpr,
    HIGH: tl.constexpr,
    ELEMENT: tl.constexpr,
    RULE: tl.constexpr,
    NATIVE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Quantize TILE blocks, of which `left` are there; four threads hold a block, eight elements
    each. Pointers are those of the first block, but for scales: it is `first` of the stack.
    """
    quarter = tl.arange(0, TILE * 4)
    mask = quarter // 4 < left
    offset = quarter * 8
    x = widen(
        tl.load(w_ptr + offset[:, None] + tl.arange(0, 8)[None, :], mask=mask[:, None], other=0),
        BF16,
    )
    top = tl.max(tl.reshape(tl.max(magnitude_bits(x), axis=1), [TILE, 4]), axis=1)
    scale = scale_codes(tl.cast(top, tl.float32, bitcast=True), ELEMENT, RULE)
    index = tl.arange(0, TILE)
    store_scales(scale_ptr, scale, first, index, index < left, rows, across, SWIZZLED)
    unit = tl.broadcast_to(reciprocal_e8m0(scale)[:, None], [TILE, 4])
    y = x * tl.reshape(unit, [TILE * 4])[:, None]
    _store(data_ptr, y, x, offset, mask, ELEMENT, HIGH, NATIVE)


@jit
def _quantize_kernel(
    w_ptr,  # [blocks, 32] fp32, fp16, or bf16 as int16
    data_ptr,  # [blocks, 32] FP8 codes as uint8, or [blocks, 4] int32 of E2M1 codes
    scale_ptr,  # [blocks] E8M0 as uint8
    blocks,
    rows,
    across,  # blocks of a row
    BF16: tl.constexpr,
    SWIZZLED: tl.constexpr,
    HIGH: tl.constexpr,
    ELEMENT: tl.constexpr,
    RULE: tl.constexpr,
    NATIVE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Quantize TILE blocks."""
    first = tl.program_id(0).to(tl.int64) * TILE
    data_ptr += first * (4 if ELEMENT == "E2M1" else 32)
    quantize_tile(
        w_ptr + first * 32,
        data_ptr,
        scale_ptr,
        blocks - first,
        first,
        rows,
        across,
        BF16,
        SWIZZLED,
        HIGH,
        ELEMENT,
        RULE,
        NATIVE,
        TILE,
    )


@jit
def _error(unit, x, h, up, down, ELEMENT: tl.constexpr):
    """Return weighted squared errors of x, given in units, at a scale of down = 1 / up units."""
    d = _decode(_encode(unit * up, x, ELEMENT), ELEMENT) * down - unit
    return d * d * h


@jit
def _search_kernel(
    w_ptr,  # [blocks, 32] fp32, fp16, or bf16 as int16
    data_ptr,  # [blocks, 32] FP8 codes as uint8, or [blocks, 4] int32 of E2M1 codes
    scale_ptr,  # [blocks] E8M0 as uint8
    blocks,
    rows,
    across,  # blocks of a row
    h_ptr,  # [blocks of a row, 32] fp32, see importance; read where WEIGHTED
    BF16: tl.constexpr,
    SWIZZLED: tl.constexpr,
    HIGH: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ELEMENT: tl.constexpr,
    NATIVE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Quantize TILE blocks with the best of three scales; a thread holds a block as quarters."""
    first = tl.program_id(0).to(tl.int64) * TILE
    index = tl.arange(0, TILE)
    mask = index < blocks - first
    column = tl.arange(0, 8)[None, :]
    offset = index[:, None] * 32 + column
    w_ptr += first * 32
    a = widen(tl.load(w_ptr + offset, mask=mask[:, None], other=0), BF16)
    b = widen(tl.load(w_ptr + offset + 8, mask=mask[:, None], other=0), BF16)
    c = widen(tl.load(w_ptr + offset + 16, mask=mask[:, None], other=0), BF16)
    d = widen(tl.load(w_ptr + offset + 24, mask=mask[:, None], other=0), BF16)
    top = tl.maximum(
        tl.maximum(magnitude_bits(a), magnitude_bits(b)),
        tl.maximum(magnitude_bits(c), magnitude_bits(d)),
    )
    scale = scale_codes(tl.cast(tl.max(top, axis=1), tl.float32, bitcast=True), ELEMENT, "mse")

    a_h, b_h, c_h, d_h = 1.0, 1.0, 1.0, 1.0
    if WEIGHTED:
        h_offset = ((first + index) % across)[:, None] * 32 + column
        a_h, b_h = tl.load(h_ptr + h_offset), tl.load(h_ptr + h_offset + 8)
        c_h, d_h = tl.load(h_ptr + h_offset + 16), tl.load(h_ptr + h_offset + 24)
    unit = reciprocal_e8m0(scale)[:, None]
    best = scale
    least = tl.full([TILE], float("inf"), tl.float32)
    for candidate in static_range(3):
        shift = 0 if candidate == 0 else (-1 if candidate == 1 else 1)
        up = 1.0 if candidate == 0 else (2.0 if candidate == 1 else 0.5)
        down = 1.0 if candidate == 0 else (0.5 if candidate == 1 else 2.0)
        lower = _error(a * unit, a, a_h, up, down, ELEMENT)
        lower += _error(c * unit, c, c_h, up, down, ELEMENT)
        upper = _error(b * unit, b, b_h, up, down, ELEMENT)
        upper += _error(d * unit, d, d_h, up, down, ELEMENT)
        error = tree_sum(lower + upper)
        code = scale + shift
        if candidate == 0:
            least = error
        else:
            better = (error < least) & (code >= 0) & (code <= 254)
            best = tl.where(better, code, best)
            least = tl.where(better, error, least)

    store_scales(scale_ptr, best, first, index, mask, rows, across, SWIZZLED)
    multiplier = reciprocal_e8m0(best)[:, None]
    data_ptr += first * (4 if ELEMENT == "E2M1" else 32)
    for quarter in static_range(4):
        x = a if quarter == 0 else (b if quarter == 1 else (c if quarter == 2 else d))
        offset = index * 32 + quarter * 8
        _store(data_ptr, x * multiplier, x, offset, mask, ELEMENT, HIGH, NATIVE)


@jit
def _dequantize_kernel(
    data_ptr,  # [quarters] int64 of FP8 codes, or int32 of E2M1 codes
    scale_ptr,  # [quarters / 4] E8M0 as uint8
    out_ptr,  # [quarters, 8] fp32, fp16 or bf16
    quarters,
    ELEMENT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Dequantize TILE quarters of blocks, eight elements to a thread."""
    first = tl.program_id(0).to(tl.int64) * TILE
    index = tl.arange(0, TILE)
    mask = index < quarters - first
    column = tl.arange(0, 8)[None, :]
    word = tl.load(data_ptr + first + index, mask=mask, other=0)
    scale = tl.load(scale_ptr + first // 4 + index // 4, mask=mask, other=0)
    if ELEMENT == "E2M1":
        code = (word[:, None] >> (column * 4)) & 15
    else:
        code = ((word[:, None] >> (column * 8)) & 255).to(tl.int32)
    value = _decode(code, ELEMENT) * decode_e8m0(scale.to(tl.int32))[:, None]
    out = narrow(value, out_ptr.dtype.element_ty)
    place = out_ptr + first * 8 + index[:, None] * 8 + column
    tl.store(place, out, mask=mask[:, None], cache_modifier=".cs" if ELEMENT == "E2M1" else "")
