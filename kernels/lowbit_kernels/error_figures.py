"""Error sums of bands of 128 rows, on the device and in one order everywhere: what `error` is made
of.

| function | of `w [*, R, C]` and | result |
|---|---|---|
| `figures` | values `v [*, R, C]` | fp64 `[bands, 6]` |
| `figures_of_parts` | data, scale, global_scale | the same, in one read |

The six are the sums of (v - w)^2, w^2, v^2 and w v, the largest |v - w|, and that in steps. All is
fp64. A tile is 64 columns of a band, a group 16 of its rows. The eight groups of a tile are added
to each other from first to last; the 1,024 sums that this leaves, row-major, as a tree that adds
the upper half onto the lower; the tiles of a band as such a tree, filled up with zeros to a power
of two. References and kernels give the same bits, on every device.

steps: the largest |v - w| over the distance from the value to its neighbour in the element's own
grid on the side of w; beyond the largest value the last such distance. Where each element was
rounded to the nearest it is at most 1/2, but for what the roundings of fp32 before that add (less
than 2^-16). Where a step underflowed to 0 there is no grid, and 0 is counted. A NaN on either side
makes NaN of what it enters.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from lowbit_kernels import rounding
from lowbit_kernels.amax import FLOATING
from lowbit_kernels.checks import as_matrix, check_shapes
from lowbit_kernels.formats import E2M1, E2M1_VALUES, E4M3, E5M2, INT4, INT8, Format
from lowbit_kernels.jit import OPTIONS, jit, loadable, static_range, tl, use_kernel
from lowbit_kernels.rounding import decode_e2m1, decode_e4m3, decode_e8m0, decode_fp8, widen

BAND = 128
_GROUPS, _HIGH, _WIDE = 8, 16, 64
# The code of the largest value.
_LAST = {"E2M1": 7, "E4M3": 0x7E, "E5M2": 0x7B, "INT8": 127, "INT4": 7}


def _tree(e: Tensor) -> Tensor:
    """Add the upper half of the last axis, of any length, onto the lower until one is left."""
    size = e.shape[-1]
    return rounding.tree_sum_of(functional.pad(e, (0, (1 << (size - 1).bit_length()) - size)))


@dataclass(frozen=True)
class Parts:
    """Canonical parts, and how to find the scale of an element in them."""

    element: Format
    data: Tensor
    scale: Tensor
    global_scale: Tensor | None
    block: tuple[int, int]


def placed(
    w: Tensor,
    parts: Mapping[str, Tensor],
    element: Format,
    block: tuple[int | None, int | None],
) -> Parts:
    """Check that parts belong to `w` and fill in what None stands for in `block`."""
    if w.dim() < 2 or w.numel() != parts["data"].numel() * element.per_byte:
        raise ValueError(f"{list(parts['data'].shape)} codes do not belong to {list(w.shape)}")
    high, wide = block[0] or w.shape[-2], block[1] or w.shape[-1]
    scale = parts["scale"]
    matrices = w.shape[:-2].numel()
    if scale.numel() != matrices * -(-w.shape[-2] // high) * -(-w.shape[-1] // wide):
        raise ValueError(f"{list(scale.shape)} scales do not belong to {list(w.shape)} by {block}")
    shared = parts.get("global_scale")
    if shared is not None and shared.numel() != matrices:
        raise ValueError(f"{list(shared.shape)} global scales do not belong to {list(w.shape)}")
    return Parts(element, parts["data"], scale, shared, (high, wide))


def _steps_of(w: Tensor, parts: Parts) -> Tensor:
    """Return fp32 steps fl(scale * global_scale) that broadcast over `w`, one for each element."""
    scale, (high, wide) = parts.scale, parts.block
    step = rounding.e8m0_value(scale) if scale.dtype == torch.uint8 else scale.float()
    lead, (rows, cols) = w.shape[:-2], w.shape[-2:]
    step = step.reshape(*lead, -(-rows // high), -(-cols // wide))
    if parts.global_scale is not None:
        step = step * parts.global_scale.reshape(*lead, 1, 1)
    return step.repeat_interleave(high, -2)[..., :rows, :].repeat_interleave(wide, -1)[..., :cols]


def _magnitudes(element: Format, device: torch.device) -> Tensor:
    """Return the fp32 values of the non-negative codes up to the largest."""
    if element is E2M1:
        return torch.tensor(E2M1_VALUES[:8], device=device)
    codes = torch.arange(_LAST[element.name] + 1, dtype=torch.uint8, device=device)
    if element is INT8 or element is INT4:
        return codes.float()
    return codes.view(torch.float8_e4m3fn if element is E4M3 else torch.float8_e5m2).float()


def _elements(parts: Parts, like: Tensor) -> Tensor:
    """Return the fp32 value of each code."""
    if parts.element is INT4:
        return rounding.unpack_int4(parts.data).float().reshape(like.shape)
    if parts.element is not E2M1:
        return parts.data.float().reshape(like.shape)
    values = torch.tensor(E2M1_VALUES, device=like.device)
    return values[rounding.unpack(parts.data).int()].reshape(like.shape)


def decoded(w: Tensor, parts: Parts) -> tuple[Tensor, Tensor]:
    """Return fp32 values, and fp64 sizes of the grid's steps on the side where `w` lies."""
    element, step = _elements(parts, w), _steps_of(w, parts)
    value = element * step
    magnitudes = _magnitudes(parts.element, w.device)
    index = torch.searchsorted(magnitudes, element.abs().contiguous())
    d = value.double() - w.double()
    inward = torch.where(element < 0, d < 0, d > 0)
    lower = (index - inward.int()).clamp(0, len(magnitudes) - 2)
    gap = magnitudes[lower + 1] - magnitudes[lower]
    return value, gap.double() * step.double()


def in_steps(d: Tensor, grid: Tensor) -> Tensor:
    return torch.where(grid == 0, 0.0, d.abs() / grid)


def _figures_reference(w: Tensor, v: Tensor, grid: Tensor | None) -> Tensor:
    """Return fp64 `[bands, 6]` of `w`, `v` and `grid`, all `[rows, cols]`, in that order."""
    fill = (0, -w.shape[1] % _WIDE, 0, -w.shape[0] % BAND)
    w, v = functional.pad(w.double(), fill), functional.pad(v.double(), fill)
    d = v - w
    terms = torch.stack((d * d, w * w, v * v, w * v))
    # [4, bands, groups, 16, tiles, 64]
    terms = terms.unflatten(2, (-1, _WIDE)).unflatten(1, (-1, _GROUPS, _HIGH))
    total = terms[:, :, 0]
    for group in range(1, _GROUPS):
        total = total + terms[:, :, group]
    tiles = rounding.tree_sum_of(total.transpose(2, 3).flatten(-2))
    worst = torch.zeros_like(d) if grid is None else in_steps(d, functional.pad(grid, fill))
    largest = torch.stack((d.abs(), worst)).unflatten(1, (-1, BAND)).amax((-2, -1))
    return torch.cat((_tree(tiles), largest)).t()


@jit
def _load_scale(ptr, place, mask):
    """Return fp32 scales: fp32 as they are, E4M3 as int8, E8M0 as uint8."""
    if ptr.dtype.element_ty == tl.float32:
        return tl.load(ptr + place, mask=mask, other=0)
    elif ptr.dtype.element_ty == tl.uint8:
        return decode_e8m0(tl.load(ptr + place, mask=mask, other=0).to(tl.int32))
    else:
        return decode_e4m3(tl.load(ptr + place, mask=mask, other=0).to(tl.int32) & 255)


@jit
def _decode(code, ELEMENT: tl.constexpr):
    """Return fp32 values of codes."""
    if ELEMENT == "E2M1":
        return decode_e2m1(code)
    elif ELEMENT == "INT8" or ELEMENT == "INT4":
        return code.to(tl.float32)
    else:
        return decode_fp8(code, ELEMENT, False)


@jit
def _in_steps_of(code, d, step, ELEMENT: tl.constexpr, LAST: tl.constexpr):
    """Return |d| in steps of the grid at codes of a magnitude, on the side that d points from."""
    if ELEMENT == "INT8" or ELEMENT == "INT4":
        grid = step.to(tl.float64)
    else:
        sign = 8 if ELEMENT == "E2M1" else 128
        # -0 counts as 0, whose only neighbours are away from it.
        inward = tl.where((code & sign) != 0, d < 0, d > 0).to(tl.int32)
        lower = tl.minimum(tl.maximum((code & (sign - 1)) - inward, 0), LAST - 1)
        gap = _decode(lower + 1, ELEMENT) - _decode(lower, ELEMENT)
        grid = gap.to(tl.float64) * step.to(tl.float64)
    return tl.where(grid == 0, 0.0, tl.abs(d) / grid)


@jit
def _halved(e):
    """Add up fp64 `[1024]` as a tree: the upper half onto the lower."""
    for _ in static_range(9):
        e = tl.sum(tl.reshape(e, [2, e.shape[0] // 2]), axis=0)
    return tl.sum(e, axis=0)


@jit
def _larger(top, x):
    """Raise the patterns in top to those of fp64 magnitudes x; they order alike, NaN above all."""
    return tl.maximum(top, x.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF)


@jit
def _figures_kernel(
    w_ptr,  # [rows, cols] fp32, fp16, or bf16 as int16
    data_ptr,  # values as w, or codes [rows, cols]; [rows, cols / 2] of E2M1, INT4
    scale_ptr,  # [matrices, row blocks, column blocks] fp32, E4M3 as int8, E8M0 as uint8
    global_scale_ptr,  # [matrices] fp32, read where SHARED
    out_ptr,  # [bands, tiles, 6] fp64
    rows,
    cols,
    tiles,
    matrix_rows,
    high,  # rows of a block
    wide,  # and columns
    BF16: tl.constexpr,
    DATA_BF16: tl.constexpr,
    ELEMENT: tl.constexpr,  # of codes; VALUE where there are none
    LAST: tl.constexpr,
    SHARED: tl.constexpr,
    GROUPS: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Sum a tile of GROUPS * HIGH rows and WIDE columns."""
    band = tl.program_id(0) // tiles
    index = tl.arange(0, HIGH * WIDE)
    col = (tl.program_id(0) % tiles) * WIDE + index % WIDE
    error = tl.zeros([HIGH * WIDE], tl.float64)
    signal, value, product, largest, steps = error, error, error, error, error
    largest = largest.to(tl.int64, bitcast=True)
    steps = steps.to(tl.int64, bitcast=True)
    row_blocks = (matrix_rows + high - 1) // high
    column_blocks = (cols + wide - 1) // wide
    for group in range(GROUPS):
        row = band * (GROUPS * HIGH) + group * HIGH + index // WIDE
        mask = (row < rows) & (col < cols)
        offset = row.to(tl.int64) * cols + col
        w = widen(tl.load(w_ptr + offset, mask=mask, other=0), BF16)
        if ELEMENT == "VALUE":
            v = widen(tl.load(data_ptr + offset, mask=mask, other=0), DATA_BF16)
            code, step = index, w  # not looked at
        else:
            matrix = row // matrix_rows
            block = matrix * row_blocks + (row % matrix_rows) // high
            place = block.to(tl.int64) * column_blocks + col // wide
            step = _load_scale(scale_ptr, place, mask)
            if SHARED:
                step *= tl.load(global_scale_ptr + matrix, mask=mask, other=0)
            if ELEMENT == "E2M1" or ELEMENT == "INT4":
                code = tl.load(data_ptr + (offset >> 1), mask=mask, other=0).to(tl.int32)
                if ELEMENT == "E2M1":
                    code = (code >> ((col % 2) * 4)) & 15
                else:  # up to the top, so that the way down brings the sign
                    code = (code << (28 - (col % 2) * 4)) >> 28
            else:
                code = tl.load(data_ptr + offset, mask=mask, other=0).to(tl.int32)
            v = _decode(code, ELEMENT) * step
        x, y = w.to(tl.float64), v.to(tl.float64)
        d = y - x
        error += d * d
        signal += x * x
        value += y * y
        product += x * y
        largest = _larger(largest, d)
        if ELEMENT != "VALUE":
            steps = _larger(steps, _in_steps_of(code, d, step, ELEMENT, LAST))
    out_ptr += tl.program_id(0).to(tl.int64) * 6
    tl.store(out_ptr, _halved(error))
    tl.store(out_ptr + 1, _halved(signal))
    tl.store(out_ptr + 2, _halved(value))
    tl.store(out_ptr + 3, _halved(product))
    tl.store(out_ptr + 4, tl.cast(tl.max(largest, axis=0), tl.float64, bitcast=True))
    tl.store(out_ptr + 5, tl.cast(tl.max(steps, axis=0), tl.float64, bitcast=True))


def _launch(w: Tensor, v: Tensor, parts: Parts | None) -> Tensor:
    """Return fp64 `[bands, 6]`; `v` holds values, or the codes of `parts`."""
    cols = w.shape[-1]
    rows = w.numel() // cols
    count, tiles = -(-rows // BAND), -(-cols // _WIDE)
    out = torch.empty(count, tiles, 6, dtype=torch.float64, device=w.device)
    if parts is None:
        element, data, scale, shared, block = "VALUE", loadable(v), out, None, (1, 1)
    else:
        element, shared, block = parts.element.name, parts.global_scale, parts.block
        data, scale = parts.data.contiguous(), parts.scale.contiguous()
        if parts.element in (E4M3, E5M2):
            data = data.view(torch.uint8)
        if scale.dtype == torch.float8_e4m3fn:
            scale = scale.view(torch.int8)
    with torch.cuda.device_of(w):
        _figures_kernel[(count * tiles,)](
            loadable(w),
            data,
            scale,
            scale if shared is None else shared.contiguous(),
            out,
            rows,
            cols,
            tiles,
            w.shape[-2],
            *block,
            BF16=w.dtype == torch.bfloat16,
            DATA_BF16=v.dtype == torch.bfloat16,
            ELEMENT=element,
            LAST=_LAST.get(element, 0),
            SHARED=shared is not None,
            GROUPS=_GROUPS,
            HIGH=_HIGH,
            WIDE=_WIDE,
            **OPTIONS,
        )
    out = torch.where(torch.isnan(out), torch.nan, out)
    return torch.cat((_tree(out[..., :4].transpose(1, 2)), out[..., 4:].amax(1)), -1)


def figures(w: Tensor, v: Tensor) -> Tensor:
    """Return fp64 `[bands, 6]` on the device of `w`: error, signal, value, product, largest and
    steps (0 here) of each band of 128 rows, in the order that the module describes.

    Raises:
        ValueError: the shapes differ.
    """
    check_shapes(w, v)
    floating = w.dtype in FLOATING and v.dtype in FLOATING and w.dim() > 1
    if use_kernel(w) and floating:
        return _launch(w, v, None)
    return _figures_reference(as_matrix(w), as_matrix(v), None)


def figures_of_parts(
    w: Tensor,
    parts: Mapping[str, Tensor],
    element: Format,
    block: tuple[int | None, int | None],
) -> Tensor:
    """Return `figures` of the values that `parts` stand for, and steps, in one read.

    `parts` are data, scale and, if there is one, global_scale, as a scheme's `quantize` made them
    of `w`; `block` is the rows and columns that share a scale, None for all of them.

    Raises:
        ValueError: the parts do not belong to `w`.
    """
    found = placed(w, parts, element, block)
    if use_kernel(w) and w.dtype in FLOATING:
        return _launch(w, found.data, found)
    value, grid = decoded(w, found)
    return _figures_reference(as_matrix(w), as_matrix(value), as_matrix(grid))
