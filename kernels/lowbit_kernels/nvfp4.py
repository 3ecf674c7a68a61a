"""NVFP4: E2M1 elements, an E4M3 scale for 16 columns of a row, an FP32 scale over all.

    w ~= value * fl(scale * global_scale)

    global_scale = fl(amax(w) / 2688)                               amax = 0 -> 1
    scale = e4m3(clamp(fl(a / fl(6 * global_scale)), 2^-9, 448))    a: block's amax; fl() = 0 -> 1
    code  = e2m1(fl(w / fl(scale * global_scale)))                  scale as stored; ties to even

That is rule amax. mse and mse_all search the scale of each block (`nvfp4_search`), four_over_six
and 2d are TransformerEngine's (`nvfp4_te`).

| | data | scale | global_scale |
|---|---|---|---|
| NVFP4 | uint8 `[*, R, C/2]`, low nibble first | e4m3 `[*, R, C/16]` | fp32 `[*]` |

-0.0 has code 0; a negative number that rounds to zero has code 8, which decodes to -0.0. An amax so
small that amax / 2688 is zero gets the smallest subnormal, 2^-149; where scale * global_scale
underflows to zero every code of the block is 0 or 8. A matrix that holds a NaN has global_scale
NaN, scales 0x7F and magnitudes 7; one that holds an Inf has global_scale Inf, the block with the
Inf scale 0x7F, all other codes 0 or 8; every element of either decodes to NaN. A search keeps the
scales 0x7F, and under an infinite global scale all others (mse_all: 1). Rules four_over_six and 2d:
see `nvfp4_te`. Under a global scale that is given they show in their block alone: NaN as above, Inf
as scale 0x7E (mse_all: 1) and magnitude 7.
Same bytes as ModelOpt 0.47 `NVFP4QTensor.quantize`, but for a matrix of zeros.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from lowbit_kernels import amax as amax_of
from lowbit_kernels import cpu, fp4_pair_kernels, nvfp4_search, nvfp4_te, rounding
from lowbit_kernels.checks import check_codes, check_device, check_scale
from lowbit_kernels.formats import E2M1_VALUES
from lowbit_kernels.importance import column_weights
from lowbit_kernels.jit import OPTIONS, loadable, use_kernel
from lowbit_kernels.layout import arrange, can_fuse, check, room
from lowbit_kernels.nvfp4_kernels import _dequantize_kernel, _quantize_kernel, quantize_tile
from lowbit_kernels.ops import Ops
from lowbit_kernels.typed import typed

BLOCK = 16

# What the largest block scale of a matrix is by each rule: global_scale = amax / (6 * this).
LARGEST_SCALE = {"amax": 448.0, "mse": 448.0, "mse_all": 448.0, "four_over_six": 256.0, "2d": 448.0}


@typed
def global_scale_of(amax: Tensor) -> Tensor:
    """Return fp32 fl(amax / 2688), in the shape of `amax`: 1 for 0, never 0."""
    amax = amax.float()
    scale = amax / torch.full_like(amax, 2688.0)
    scale = torch.where(scale == 0, 2.0**-149, scale)
    return torch.where(amax == 0, 1.0, scale)


def scales_of(amax: Tensor, global_scale: Tensor) -> Tensor:
    """Return the E4M3 scales of blocks with largest magnitudes `amax`; `global_scale` broadcasts
    over them.
    """
    quotient = amax / (global_scale * 6.0)
    quotient = torch.where(quotient == 0, 1.0, quotient)
    return rounding.to_e4m3(quotient.clamp(2.0**-9, 448.0))


def encode(blocks: Tensor, step: Tensor) -> Tensor:
    """Return packed E2M1 codes `[..., 8]` of `blocks [..., 16]`; `step [...]` is what a code of
    value 1 stands for.
    """
    step = step.unsqueeze(-1)
    x = blocks.float()
    q = torch.where(step == 0, 0.0, x / step)
    return rounding.pack(rounding.to_e2m1(q, x < 0))


def _radius(rule: str, weighted: bool) -> int | None:
    """Return how many E4M3 codes a search looks to each side: 0 is all of them, None no search."""
    if rule == "mse":
        return nvfp4_search.WEIGHTED_WINDOW if weighted else nvfp4_search.WINDOW
    return 0 if rule == "mse_all" else None


def _quantize_reference(
    w: Tensor, global_scale: Tensor, radius: int | None, h: Tensor | None
) -> tuple[Tensor, Tensor]:
    shared = global_scale[..., None, None]
    amax = amax_of.blocks(w, BLOCK)
    scale = scales_of(amax, shared)
    blocks = w.contiguous().unflatten(-1, (w.shape[-1] // BLOCK, BLOCK))
    if radius is not None:
        codes = nvfp4_search.best_codes_of(
            blocks.float(), amax, scale.view(torch.uint8), shared, radius, h
        )
        scale = codes.view(torch.float8_e4m3fn)
    return encode(blocks, scale.float() * shared).flatten(-2), scale


def _dequantize_reference(
    packed: Tensor, scale: Tensor, global_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    step = scale.float() * global_scale[..., None, None]
    values = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=packed.device)
    element = values[rounding.unpack(packed).int()].unflatten(-1, (scale.shape[-1], BLOCK))
    return (element * step.unsqueeze(-1)).to(dtype).flatten(-2)


def _quantize_here(
    w: Tensor, global_scale: Tensor, radius: int | None, h: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Quantize on the CPU slice by slice, elsewhere by the reference."""
    if not cpu.takes(w):
        return _quantize_reference(w, global_scale, radius, h)
    return cpu.quantize_nvfp4(w, global_scale, _quantize_reference, radius, h)


def _launch_quantize(
    w: Tensor,
    global_scale: Tensor,
    radius: int | None,
    h: Tensor | None,
    swizzled: bool = False,
    high: bool = False,
) -> tuple[Tensor, Tensor]:
    rows, cols = w.shape[-2:]
    packed = torch.empty((*w.shape[:-1], cols // 2), dtype=torch.uint8, device=w.device)
    scale = room((*w.shape[:-1], cols // BLOCK), torch.float8_e4m3fn, w.device, swizzled)
    global_scale = global_scale.contiguous()
    if radius is None and fp4_pair_kernels.takes(w):
        fp4_pair_kernels.launch_nvfp4(w.contiguous(), global_scale, packed, scale, swizzled, high)
        return packed, scale
    blocks, tile = rows * cols // BLOCK, 128
    programs = -(-blocks // tile)
    with torch.cuda.device_of(w):
        _quantize_kernel[(w.shape[:-2].numel() * programs,)](
            loadable(w),
            packed.view(torch.int64),
            scale.view(torch.uint8),
            global_scale,
            global_scale if h is None else h,
            blocks,
            programs,
            rows,
            cols // BLOCK,
            BF16=w.dtype == torch.bfloat16,
            SWIZZLED=swizzled,
            HIGH=high,
            WEIGHTED=h is not None,
            RADIUS=radius or 0,
            COUNT=0 if radius is None else (2 * radius + 1 if radius else nvfp4_search.LAST),
            TILE=tile,
            **OPTIONS,
        )
    return packed, scale


def _launch_dequantize(
    packed: Tensor, scale: Tensor, global_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    rows, cols = packed.shape[-2], packed.shape[-1] * 2
    out = torch.empty((*packed.shape[:-1], cols), dtype=dtype, device=packed.device)
    halves, tile = rows * cols // 8, 256
    programs = -(-halves // tile)
    with torch.cuda.device_of(packed):
        _dequantize_kernel[(packed.shape[:-2].numel() * programs,)](
            packed.contiguous().view(torch.int32),
            scale.contiguous().view(torch.uint8),
            global_scale.contiguous(),
            out,
            halves,
            programs,
            TILE=tile,
            **{**OPTIONS, "num_warps": 2},
        )
    return out


@typed
def quantize(
    w: Tensor,
    global_scale: Tensor | None = None,
    rule: str = "amax",
    importance: Tensor | None = None,
    layout: str = "linear",
    nibbles: str = "low",
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize `w [*, R, C]` to NVFP4; return packed uint8 `[*, R, C/2]`, scale e4m3
    `[*, R, C/16]`, global_scale fp32 `[*]`.

    `global_scale` is the value that a reader will multiply by, where that is not fl(amax / 2688),
    or fl(amax / 1536) by rule four_over_six. `importance [C]` weighs the columns in rule mse.
    `layout` 128x4 stores scales as `layout.swizzle` would, `nibbles` high the even column in the
    high nibble; `dequantize` takes neither.
    Raises ValueError for a dtype or shape that is no weight, columns that are no multiple of 16, a
    global scale that is not fp32 `[*]`, an unknown rule, layout or order of nibbles.
    """
    amax_of.check_weight(w, BLOCK)
    w = w.detach()
    _check_rule(rule)
    check(layout, nibbles)
    if global_scale is not None:
        check_scale(global_scale, w.shape[:-2], w.device, name="global scale")
    if importance is not None:
        if not rule.startswith("mse") or importance.shape != w.shape[-1:]:
            raise ValueError("importance is a number for each column, for the rules mse, mse_all")
        check_device(importance, w.device, "importance")
    if (layout, nibbles) != ("linear", "low"):
        return _quantize_arranged(w, global_scale, rule, importance, layout, nibbles)
    if rule in ("four_over_six", "2d"):
        return _quantize_in_other_order(w, global_scale, rule)
    if global_scale is None:
        global_scale = _own_scale(w)
    run = _launch_quantize if use_kernel(w) else _quantize_here
    h = None if importance is None else column_weights(importance, BLOCK)
    packed, scale = run(w, global_scale, _radius(rule, h is not None), h)
    return packed, scale, global_scale


def _own_scale(w: Tensor) -> Tensor:
    """Return the global scale of each matrix of `w`, fp32 `[*]`."""
    if use_kernel(w):
        return amax_of.launch_scale(w, 2688.0)
    return global_scale_of(amax_of.matrix(w))


def _quantize_arranged(
    w: Tensor,
    global_scale: Tensor | None,
    rule: str,
    importance: Tensor | None,
    layout: str,
    nibbles: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize into a layout, in the same launch where there is one for the rule."""
    fused = can_fuse(w.shape[-2], w.shape[-1] // BLOCK, w.shape[:-2].numel())
    if not use_kernel(w) or not fused or rule in ("four_over_six", "2d"):
        packed, scale, global_scale = quantize(w, global_scale, rule, importance)
        return *arrange(packed, scale, layout, nibbles), global_scale
    if global_scale is None:
        global_scale = _own_scale(w)
    h = None if importance is None else column_weights(importance, BLOCK)
    radius, swizzled = _radius(rule, h is not None), layout == "128x4"
    packed, scale = _launch_quantize(w, global_scale, radius, h, swizzled, nibbles == "high")
    return packed, scale, global_scale


def _quantize_in_other_order(
    w: Tensor, global_scale: Tensor | None, rule: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize as TransformerEngine does, which starts from amax and not from global_scale.

    Given a global scale, amax is taken back out of it: exactly for bf16 and fp16 weights by rule
    four_over_six, since (x / 3) * 3 is x where x has a bit to spare; else to one unit in the last
    place, which changes a scale only on a tie.
    """
    largest = LARGEST_SCALE[rule]
    if global_scale is None:
        amax = amax_of.matrix(w)
        global_scale = nvfp4_te.global_scale_of(amax, largest)
    else:
        amax = global_scale * (6.0 * largest)
    if use_kernel(w):
        packed, scale = nvfp4_te.launch(w, amax, largest, rule == "2d")
        return packed, scale, global_scale
    if not cpu.takes(w):
        return *_te_reference(w, amax, rule), global_scale
    packed = torch.empty((*w.shape[:-1], w.shape[-1] // 2), dtype=torch.uint8)
    scale = torch.empty((*w.shape[:-1], w.shape[-1] // BLOCK), dtype=torch.float8_e4m3fn)
    each = amax[..., None, None].expand(*w.shape[:-1], 1)

    def run_slice(part: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
        return _te_reference(part, amax[0, 0], rule)

    cpu.by_rows(run_slice, BLOCK, (w, each), (packed, scale))
    return packed, scale, global_scale


def _te_reference(w: Tensor, amax: Tensor, rule: str) -> tuple[Tensor, Tensor]:
    blocks = w.contiguous().float().unflatten(-1, (w.shape[-1] // BLOCK, BLOCK))
    if rule == "four_over_six":
        return nvfp4_te.quantize_four_over_six(blocks, amax, LARGEST_SCALE[rule])
    return nvfp4_te.quantize_blocks(blocks, amax, tall=True)


@typed
def dequantize(
    packed: Tensor, scale: Tensor, global_scale: Tensor, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Return `[*, R, C]` in `dtype` of NVFP4 parts; fl(scale * global_scale) comes first.

    Raises ValueError for parts that do not belong together, or another dtype than fp32, bf16, fp16.
    """
    check_codes(packed, (torch.uint8,), dtype)
    shape = (*packed.shape[:-1], packed.shape[-1] // 8)
    check_scale(scale, shape, packed.device, torch.float8_e4m3fn)
    check_scale(global_scale, packed.shape[:-2], packed.device, name="global scale")
    if packed.shape[-1] % 8:
        raise ValueError(f"{packed.shape[-1]} bytes of a row are no whole blocks of 16 columns")
    if cpu.takes(packed) and not use_kernel(packed):
        return cpu.dequantize_blocks(packed, scale, global_scale, "E4M3", dtype)
    run = _launch_dequantize if use_kernel(packed) else _dequantize_reference
    return run(packed, scale, global_scale, dtype)


def _check_rule(rule: str) -> None:
    if rule not in LARGEST_SCALE:
        known = ", ".join(LARGEST_SCALE)
        raise ValueError(f"no rule {rule!r} for these scales; there is {known}")


def _shared(amax: Tensor, rule: str) -> Tensor | None:
    _check_rule(rule)
    return nvfp4_te.global_scale_of(amax, LARGEST_SCALE[rule])


def _quantize(
    w: Tensor, shared: Tensor | None, rule: str, importance: Tensor | None = None
) -> dict[str, Tensor]:
    packed, scale, global_scale = quantize(w, shared, rule, importance)
    return {"data": packed, "scale": scale, "global_scale": global_scale}


def _dequantize(parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    return dequantize(parts["data"], parts["scale"], parts["global_scale"], dtype)


NVFP4 = Ops(amax_of.matrix, _shared, _quantize, _dequantize)

__all__ = [
    "BLOCK",
    "LARGEST_SCALE",
    "NVFP4",
    "dequantize",
    "encode",
    "global_scale_of",
    "quantize",
    "quantize_tile",
    "scales_of",
]
