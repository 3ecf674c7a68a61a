"""MX formats: elements with one power-of-two E8M0 scale for 32 columns of a row.

    w ~= value * 2^(scale - 127)
    data = element(clamp(w * 2^(127 - scale)))      nearest, ties to even, saturating

| | data | scale |
|---|---|---|
| MXFP8 (E4M3, or E5M2) | e4m3 (e5m2) `[*, R, C]` | uint8 (E8M0) `[*, R, C/32]` |
| MXFP4 (E2M1) | uint8 `[*, R, C/2]`, low nibble first | uint8 (E8M0) `[*, R, C/32]` |

The scale's exponent, with a the block's amax, max the element's largest value, emax its exponent:

| rule | exponent | as in |
|---|---|---|
| amax | least e with fl(a / max) <= 2^e: nothing saturates | TransformerEngine |
| floor | floor(log2 a) - emax | OCP Microscaling Formats 1.0 |
| ceil | ceil(log2 a) - emax | torchao CEIL |
| even | floor(log2 a') - emax, a' = a plus half a step of the mantissa | torchao EVEN |
| mse | of amax's e, then e - 1, e + 1: the least sum of squared errors | |

No logarithm is taken. mse: errors are taken in units of 2^e, in fp32, and summed as a tree that
adds the upper half onto the lower; a later candidate must be strictly better.
A block of zeros has scale code 0 (2^-127). -0.0 has E2M1 code 0, a negative number that rounds to
zero has code 8; FP8 keeps the sign. A block that holds a NaN has scale code 255 (NaN), FP8 codes
0x7F and E2M1 magnitudes 7. One that holds an Inf and no NaN has scale code 254 (by floor, ceil and
even 255 - emax); Inf saturates, and decodes to Inf again; beside it small numbers become zeros.
Source: OCP Microscaling Formats 1.0 for the format; rule amax rounds as the PTX instruction
`cvt.rp.satfinite.ue8m0x2.f32` does, as in TransformerEngine 2.20 `common/cast/mxfp8`.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lowbit_kernels import amax as amax_of
from lowbit_kernels import cpu, fp4_pairs, rounding
from lowbit_kernels.formats import E2M1, E2M1_VALUES, E4M3, E5M2, Format
from lowbit_kernels.jit import (
    OPTIONS,
    converts_fp8,
    jit,
    loadable,
    static_range,
    tl,
    use_kernel,
)
from lowbit_kernels.layout import arrange, check, room, store_scales
from lowbit_kernels.mx_scales import scale_codes, scale_of
from lowbit_kernels.ops import Ops
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

BLOCK = 32
RULES = ("amax", "floor", "ceil", "even", "mse")
TORCH = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2, "E2M1": torch.uint8}


def _element_codes(y: Tensor, x: Tensor, element: Format) -> Tensor:
    """Round y, the blocks `x` in units of their scales, to codes: one each, not packed."""
    if element is E4M3:
        return rounding.to_e4m3(y)
    if element is E5M2:
        return rounding.to_e5m2(y)
    return rounding.to_e2m1(y, x < 0)


def _element_values(codes: Tensor, element: Format) -> Tensor:
    if element is not E2M1:
        return codes.float()
    return torch.tensor(E2M1_VALUES, dtype=torch.float32, device=codes.device)[codes.int()]


def _best_of_three(x: Tensor, first: Tensor, element: Format) -> Tensor:
    """Return for each block of `x [..., 32]` the best code of first, first - 1, first + 1."""
    unit = x * rounding.e8m0_reciprocal(first).unsqueeze(-1)
    best, least = first, None
    for shift, up in ((0, 1.0), (-1, 2.0), (1, 0.5)):
        code = first.int() + shift
        values = _element_values(_element_codes(unit * up, x, element), element) / up
        d = values - unit
        error = rounding.tree_sum_of(d * d)
        if least is None:
            least = error
            continue
        better = (error < least) & (code >= 0) & (code <= 254)
        best = torch.where(better, code.to(torch.uint8), best)
        least = torch.where(better, error, least)
    return best


def _quantize_reference(w: Tensor, element: Format, rule: str) -> tuple[Tensor, Tensor]:
    x = w.contiguous().unflatten(-1, (w.shape[-1] // BLOCK, BLOCK)).float()
    scale = scale_of(amax_of.blocks(w, BLOCK), element, rule)
    if rule == "mse":
        scale = _best_of_three(x, scale, element)
    codes = _element_codes(x * rounding.e8m0_reciprocal(scale).unsqueeze(-1), x, element)
    data = rounding.pack(codes) if element is E2M1 else codes
    return data.flatten(-2), scale


def _dequantize_reference(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    element = E2M1 if data.dtype == torch.uint8 else E4M3
    codes = rounding.unpack(data) if element is E2M1 else data
    values = _element_values(codes, element).unflatten(-1, (scale.shape[-1], BLOCK))
    return (values * rounding.e8m0_value(scale).unsqueeze(-1)).to(dtype).flatten(-2)


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
def _error(unit, x, up, down, ELEMENT: tl.constexpr):
    """Return the squared errors of x, given in units, at a scale of down = 1 / up units."""
    d = _decode(_encode(unit * up, x, ELEMENT), ELEMENT) * down - unit
    return d * d


@jit
def _search_kernel(
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

    unit = reciprocal_e8m0(scale)[:, None]
    best = scale
    least = tl.full([TILE], float("inf"), tl.float32)
    for candidate in static_range(3):
        shift = 0 if candidate == 0 else (-1 if candidate == 1 else 1)
        up = 1.0 if candidate == 0 else (2.0 if candidate == 1 else 0.5)
        down = 1.0 if candidate == 0 else (0.5 if candidate == 1 else 2.0)
        lower = _error(a * unit, a, up, down, ELEMENT) + _error(c * unit, c, up, down, ELEMENT)
        upper = _error(b * unit, b, up, down, ELEMENT) + _error(d * unit, d, up, down, ELEMENT)
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


def _launch_quantize(
    w: Tensor, element: Format, rule: str, swizzled: bool = False, high: bool = False
) -> tuple[Tensor, Tensor]:
    cols = w.shape[-1]
    shape = (*w.shape[:-1], cols // element.per_byte)
    data = torch.empty(shape, dtype=TORCH[element.name], device=w.device)
    scale = room((*w.shape[:-1], cols // BLOCK), torch.uint8, w.device, swizzled)
    blocks = w.numel() // BLOCK
    if element is E2M1 and rule != "mse" and fp4_pairs.takes(w):
        fp4_pairs.launch_mxfp4(w.contiguous(), data, scale, rule, swizzled, high)
        return data, scale
    word = torch.int32 if element is E2M1 else torch.uint8
    arguments = (loadable(w), data.view(-1).view(word), scale, blocks, w.shape[-2], cols // BLOCK)
    constants = {
        "BF16": w.dtype == torch.bfloat16,
        "SWIZZLED": swizzled,
        "HIGH": high,
        "ELEMENT": element.name,
        "NATIVE": converts_fp8(w),
        **OPTIONS,
    }
    with torch.cuda.device_of(w):
        if rule == "mse":
            _search_kernel[(-(-blocks // 128),)](*arguments, **constants, TILE=128)
        else:
            constants["num_warps"] = 2
            _quantize_kernel[(-(-blocks // 32),)](*arguments, **constants, RULE=rule, TILE=32)
    return data, scale


def _launch_dequantize(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    name = next(name for name, stored in TORCH.items() if stored == data.dtype)
    word = torch.int32 if name == "E2M1" else torch.int64
    out = torch.empty((*scale.shape[:-1], scale.shape[-1] * BLOCK), dtype=dtype, device=data.device)
    quarters, tile = scale.numel() * 4, 256
    with torch.cuda.device_of(data):
        _dequantize_kernel[(-(-quarters // tile),)](
            data.contiguous().view(-1).view(word),
            scale.contiguous(),
            out,
            quarters,
            ELEMENT=name,
            TILE=tile,
            **{**OPTIONS, "num_warps": 4 if name == "E2M1" else 2},
        )
    return out


def quantize(
    w: Tensor, element: Format, rule: str = "amax", layout: str = "linear", nibbles: str = "low"
) -> tuple[Tensor, Tensor]:
    """Quantize `w [*, R, C]` to an MX format; return data and scale, uint8 (E8M0) `[*, R, C/32]`.

    `layout` 128x4 stores scales as `layout.swizzle` would, `nibbles` high the even column of E2M1
    in the high nibble; `dequantize` takes neither.
    Raises ValueError for a dtype or shape that is no weight, columns that are no multiple of 32, an
    unknown rule, layout or order of nibbles.
    """
    amax_of.check_weight(w, BLOCK)
    _check_rule(rule)
    check(layout, nibbles)
    if (layout, nibbles) != ("linear", "low"):
        if element is not E2M1 and nibbles == "high":
            raise ValueError(f"{element.name} has no nibbles")
        if use_kernel(w):
            return _launch_quantize(w, element, rule, layout == "128x4", nibbles == "high")
        return arrange(*quantize(w, element, rule), layout, nibbles)
    if cpu.takes(w) and not use_kernel(w):
        return cpu.quantize_mx(w, element, rule, _quantize_reference, TORCH[element.name])
    run = _launch_quantize if use_kernel(w) else _quantize_reference
    return run(w, element, rule)


def quantize_mxfp8(w: Tensor, rule: str = "amax", layout: str = "linear") -> tuple[Tensor, Tensor]:
    """Quantize `w [*, R, C]` to MXFP8; return data e4m3 `[*, R, C]` and scale uint8 (E8M0)."""
    return quantize(w, E4M3, rule, layout)


def quantize_mxfp4(
    w: Tensor, rule: str = "amax", layout: str = "linear", nibbles: str = "low"
) -> tuple[Tensor, Tensor]:
    """Quantize `w [*, R, C]` to MXFP4; return packed uint8 `[*, R, C/2]` and scale uint8 (E8M0)."""
    return quantize(w, E2M1, rule, layout, nibbles)


def dequantize(data: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return `[*, R, C]` in `dtype`; the dtype of `data` says whether it is E4M3, E5M2 or E2M1."""
    if cpu.takes(data) and not use_kernel(data):
        return cpu.dequantize_blocks(data, scale, None, "E8M0", dtype)
    run = _launch_dequantize if use_kernel(data) else _dequantize_reference
    return run(data, scale, dtype)


def _check_rule(rule: str) -> None:
    if rule not in RULES:
        raise ValueError(f"no rule {rule!r} for these scales; there is {', '.join(RULES)}")


def _shared(amax: Tensor, rule: str) -> Tensor | None:
    _check_rule(rule)
    return None


def _quantizer(element: Format) -> Callable[[Tensor, Tensor | None, str], dict[str, Tensor]]:
    def quantize_parts(w: Tensor, shared: Tensor | None, rule: str) -> dict[str, Tensor]:
        data, scale = quantize(w, element, rule)
        return {"data": data, "scale": scale}

    return quantize_parts


def _dequantize(parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    return dequantize(parts["data"], parts["scale"], dtype)


MXFP8 = Ops(amax_of.matrix, _shared, _quantizer(E4M3), _dequantize)
MXFP4 = Ops(amax_of.matrix, _shared, _quantizer(E2M1), _dequantize)
