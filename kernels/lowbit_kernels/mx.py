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
adds the upper half onto the lower; a later candidate must be strictly better. With importance each
square is multiplied by its column's weight (`importance.column_weights`).
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
from lowbit_kernels import cpu, fp4_pair_kernels, rounding
from lowbit_kernels.checks import check_codes, check_device, check_scale
from lowbit_kernels.formats import E2M1, E2M1_VALUES, E4M3, E5M2, Format
from lowbit_kernels.importance import column_weights
from lowbit_kernels.jit import OPTIONS, converts_fp8, loadable, use_kernel
from lowbit_kernels.layout import arrange, can_fuse, check, room
from lowbit_kernels.mx_kernels import (
    _dequantize_kernel,
    _quantize_kernel,
    _search_kernel,
    quantize_tile,
)
from lowbit_kernels.mx_scales import scale_of
from lowbit_kernels.ops import Ops
from lowbit_kernels.typed import typed

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


def _best_of_three(x: Tensor, first: Tensor, element: Format, h: Tensor | None) -> Tensor:
    """Return for each block of `x [..., 32]` the best code of first, first - 1, first + 1; `h` is
    of `column_weights`."""
    unit = x * rounding.e8m0_reciprocal(first).unsqueeze(-1)
    best, least = first, None
    for shift, up in ((0, 1.0), (-1, 2.0), (1, 0.5)):
        code = first.int() + shift
        values = _element_values(_element_codes(unit * up, x, element), element) / up
        d = values - unit
        error = rounding.tree_sum_of(d * d if h is None else d * d * h)
        if least is None:
            least = error
            continue
        better = (error < least) & (code >= 0) & (code <= 254)
        best = torch.where(better, code.to(torch.uint8), best)
        least = torch.where(better, error, least)
    return best


def _quantize_reference(
    w: Tensor, element: Format, rule: str, h: Tensor | None
) -> tuple[Tensor, Tensor]:
    x = w.contiguous().unflatten(-1, (w.shape[-1] // BLOCK, BLOCK)).float()
    scale = scale_of(amax_of.blocks(w, BLOCK), element, rule)
    if rule == "mse":
        scale = _best_of_three(x, scale, element, h)
    codes = _element_codes(x * rounding.e8m0_reciprocal(scale).unsqueeze(-1), x, element)
    data = rounding.pack(codes) if element is E2M1 else codes
    return data.flatten(-2), scale


def _dequantize_reference(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    element = E2M1 if data.dtype == torch.uint8 else E4M3
    codes = rounding.unpack(data) if element is E2M1 else data
    values = _element_values(codes, element).unflatten(-1, (scale.shape[-1], BLOCK))
    return (values * rounding.e8m0_value(scale).unsqueeze(-1)).to(dtype).flatten(-2)


def _launch_quantize(
    w: Tensor,
    element: Format,
    rule: str,
    h: Tensor | None,
    swizzled: bool = False,
    high: bool = False,
) -> tuple[Tensor, Tensor]:
    cols = w.shape[-1]
    shape = (*w.shape[:-1], cols // element.per_byte)
    data = torch.empty(shape, dtype=TORCH[element.name], device=w.device)
    scale = room((*w.shape[:-1], cols // BLOCK), torch.uint8, w.device, swizzled)
    blocks = w.numel() // BLOCK
    if element is E2M1 and rule != "mse" and fp4_pair_kernels.takes(w):
        fp4_pair_kernels.launch_mxfp4(w.contiguous(), data, scale, rule, swizzled, high)
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
            given = {"h_ptr": scale if h is None else h, "WEIGHTED": h is not None}
            _search_kernel[(-(-blocks // 128),)](*arguments, **given, **constants, TILE=128)
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


@typed
def quantize(
    w: Tensor,
    element: Format,
    rule: str = "amax",
    layout: str = "linear",
    nibbles: str = "low",
    importance: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize `w [*, R, C]` to an MX format; return data and scale, uint8 (E8M0) `[*, R, C/32]`.

    `layout` 128x4 stores scales as `layout.swizzle` would, `nibbles` high the even column of E2M1
    in the high nibble; `dequantize` takes neither. `importance [C]` weighs the columns in rule mse.
    Raises ValueError for a dtype or shape that is no weight, columns that are no multiple of 32, an
    unknown element, rule, layout or order of nibbles.
    """
    amax_of.check_weight(w, BLOCK)
    w = w.detach()
    if element.name not in TORCH:
        raise ValueError(f"an MX element is {', '.join(TORCH)}, not {element.name}")
    _check_rule(rule)
    check(layout, nibbles)
    if importance is not None:
        if rule != "mse" or importance.shape != w.shape[-1:]:
            raise ValueError("importance is a number for each column, for the rule mse")
        check_device(importance, w.device, "importance")
    h = None if importance is None else column_weights(importance, BLOCK)
    if (layout, nibbles) != ("linear", "low"):
        if element is not E2M1 and nibbles == "high":
            raise ValueError(f"{element.name} has no nibbles")
        fused = can_fuse(w.shape[-2], w.shape[-1] // BLOCK, w.shape[:-2].numel())
        if use_kernel(w) and fused:
            return _launch_quantize(w, element, rule, h, layout == "128x4", nibbles == "high")
        parts = quantize(w, element, rule, importance=importance)
        return arrange(*parts, layout, nibbles)
    if cpu.takes(w) and not use_kernel(w):
        return cpu.quantize_mx(w, element, rule, _quantize_reference, TORCH[element.name], h)
    run = _launch_quantize if use_kernel(w) else _quantize_reference
    return run(w, element, rule, h)


@typed
def quantize_mxfp8(w: Tensor, rule: str = "amax", layout: str = "linear") -> tuple[Tensor, Tensor]:
    """Quantize `w [*, R, C]` to MXFP8; return data e4m3 `[*, R, C]` and scale uint8 (E8M0).

    Raises ValueError as `quantize` does.
    """
    return quantize(w, E4M3, rule, layout)


@typed
def quantize_mxfp4(
    w: Tensor,
    rule: str = "amax",
    layout: str = "linear",
    nibbles: str = "low",
    importance: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize `w [*, R, C]` to MXFP4; return packed uint8 `[*, R, C/2]` and scale uint8 (E8M0).

    Raises ValueError as `quantize` does.
    """
    return quantize(w, E2M1, rule, layout, nibbles, importance)


@typed
def dequantize(data: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return `[*, R, C]` in `dtype`; the dtype of `data` says whether it is E4M3, E5M2 or E2M1.

    Raises ValueError for parts that do not belong together, or another dtype than fp32, bf16, fp16.
    """
    check_codes(data, tuple(TORCH.values()), dtype)
    width = BLOCK // 2 if data.dtype == torch.uint8 else BLOCK
    shape = (*data.shape[:-1], data.shape[-1] // width)
    check_scale(scale, shape, data.device, torch.uint8)
    if data.shape[-1] % width:
        raise ValueError(f"{data.shape[-1]} bytes of a row are no whole blocks of 32 columns")
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


def _quantizer(element: Format) -> Callable[..., dict[str, Tensor]]:
    def quantize_parts(
        w: Tensor, shared: Tensor | None, rule: str, importance: Tensor | None = None
    ) -> dict[str, Tensor]:
        data, scale = quantize(w, element, rule, importance=importance)
        return {"data": data, "scale": scale}

    return quantize_parts


def _dequantize(parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    return dequantize(parts["data"], parts["scale"], dtype)


MXFP8 = Ops(amax_of.matrix, _shared, _quantizer(E4M3), _dequantize)
MXFP4 = Ops(amax_of.matrix, _shared, _quantizer(E2M1), _dequantize)

__all__ = [
    "BLOCK",
    "MXFP4",
    "MXFP8",
    "RULES",
    "TORCH",
    "dequantize",
    "quantize",
    "quantize_mxfp4",
    "quantize_mxfp8",
    "quantize_tile",
]
