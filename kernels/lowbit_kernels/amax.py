"""Largest magnitude of each matrix, row or block: `amax = max |w|`.

| function | of `w [*, R, C]` | result |
|---|---|---|
| `matrix` | each matrix | fp32 `[*]` |
| `rows` | each row | fp32 `[*, R]` |
| `blocks` | each `width` columns of a row | fp32 `[*, R, C/width]` |

Taken as an integer maximum over the bit patterns without their sign: they order as the magnitudes
do, with Inf above every number and NaN above Inf, so a NaN or an Inf comes through without being
looked for. NaN comes out as 0x7FC00000.
"""

import torch
from torch import Tensor

from lowbit_kernels import cpu
from lowbit_kernels.jit import OPTIONS, jit, loadable, tl, use_kernel
from lowbit_kernels.rounding import magnitude_bits, widen
from lowbit_kernels.typed import typed

FLOATING = (torch.float32, torch.bfloat16, torch.float16)


def check_weight(w: Tensor, width: int = 1) -> None:
    """Raise ValueError unless `w` is `[*, rows, cols]` in fp32, bf16 or fp16 with cols a multiple
    of `width`.
    """
    if not isinstance(w, Tensor) or w.layout is not torch.strided:
        raise ValueError("a weight is a dense tensor of torch")
    if w.dtype not in FLOATING:
        raise ValueError(f"a weight is float32, bfloat16 or float16, this is {w.dtype}")
    if w.dim() < 2:
        raise ValueError(f"a weight has the shape [*, rows, cols], this {list(w.shape)}")
    if w.shape[-1] % width:
        raise ValueError(f"{w.shape[-1]} columns are no multiple of {width}")


def _largest(w: Tensor) -> Tensor:
    """Return fp32 max |w| over the last axis; 0 where that is empty."""
    if w.shape[-1] == 0:
        return torch.zeros(w.shape[:-1], dtype=torch.float32, device=w.device)
    integer, mask = (torch.int32, 0x7FFFFFFF) if w.dtype == torch.float32 else (torch.int16, 0x7FFF)
    amax = (w.view(integer) & mask).amax(-1).view(w.dtype).float()
    return torch.where(torch.isnan(amax), torch.nan, amax)


@jit
def scale_from_bits(bits, LARGEST: tl.constexpr):
    """Return the scale fl(amax / LARGEST) of the pattern of an amax: 1 for 0, never 0."""
    amax = bits.to(tl.float32, bitcast=True)
    scale = tl.math.div_rn(amax, LARGEST)
    scale = tl.where(scale == 0, 2.0**-149, scale)
    return tl.where(amax == 0, 1.0, scale)


@jit
def _matrix_kernel(
    w_ptr,  # [matrices, size] fp32, fp16, or bf16 as int16
    out_ptr,  # [matrices] int32, zero: patterns of fp32 magnitudes
    size,
    programs,
    BF16: tl.constexpr,
    TILE: tl.constexpr,
    LOOPS: tl.constexpr,
):
    """Take the largest pattern of TILE * LOOPS elements and raise the matrix's to it."""
    matrix = tl.program_id(0) // programs
    start = (tl.program_id(0) % programs).to(tl.int64) * (TILE * LOOPS)
    w_ptr += matrix.to(tl.int64) * size
    top = tl.zeros([TILE], tl.int32)
    for loop in range(LOOPS):
        offset = start + loop * TILE + tl.arange(0, TILE)
        x = widen(tl.load(w_ptr + offset, mask=offset < size, other=0), BF16)
        top = tl.maximum(top, magnitude_bits(x))
    tl.atomic_max(out_ptr + matrix, tl.max(top, axis=0), sem="relaxed")


def _launch_bits(w: Tensor) -> Tensor:
    """Return the pattern of the largest magnitude of each matrix, int32 `[*]`."""
    lead, size = w.shape[:-2], w.shape[-2] * w.shape[-1]
    bits = torch.zeros(lead, dtype=torch.int32, device=w.device)
    tile, loops = 4096, 4
    programs = -(-size // (tile * loops))
    with torch.cuda.device_of(w):
        _matrix_kernel[(bits.numel() * programs,)](
            loadable(w),
            bits,
            size,
            programs,
            BF16=w.dtype == torch.bfloat16,
            TILE=tile,
            LOOPS=loops,
            **OPTIONS,
        )
    return bits


def _launch_matrix(w: Tensor) -> Tensor:
    amax = _launch_bits(w).view(torch.float32)
    return torch.where(torch.isnan(amax), torch.nan, amax)


@jit
def _scale_kernel(
    bits_ptr,  # [matrices] int32, patterns of amax
    scale_ptr,  # [matrices] fp32
    LARGEST: tl.constexpr,
):
    """Turn an amax into a scale."""
    index = tl.program_id(0)
    tl.store(scale_ptr + index, scale_from_bits(tl.load(bits_ptr + index), LARGEST))


def launch_scale(w: Tensor, largest: float) -> Tensor:
    """Return fp32 `[*]`: fl(amax / largest) of each matrix, 1 for 0, never 0; for weights that go
    to kernels.
    """
    bits = _launch_bits(w)
    scale = torch.empty(bits.shape, dtype=torch.float32, device=w.device)
    with torch.cuda.device_of(w):
        _scale_kernel[(bits.numel(),)](bits, scale, LARGEST=float(largest), num_warps=1)
    return scale


@typed
def matrix(w: Tensor) -> Tensor:
    """Return fp32 `[*]`: the largest magnitude of each matrix of `w`.

    Raises ValueError for what is no weight.
    """
    check_weight(w)
    if use_kernel(w):
        return _launch_matrix(w)
    return cpu.largest(w) if cpu.takes(w) else _largest(w.contiguous().flatten(-2))


@typed
def rows(w: Tensor) -> Tensor:
    """Return fp32 `[*, R]`: the largest magnitude of each row of `w`.

    Raises ValueError for what is no weight.
    """
    check_weight(w)
    return cpu.largest(w.unsqueeze(-2)) if cpu.takes(w) else _largest(w.contiguous())


@typed
def blocks(w: Tensor, width: int) -> Tensor:
    """Return fp32 `[*, R, C/width]`: the largest magnitude of each `width` columns of `w`.

    Raises ValueError for what is no weight, and columns that are no multiple of `width`.
    """
    if width < 1:
        raise ValueError(f"a block is one column or more, not {width}")
    check_weight(w, width)
    return _largest(w.contiguous().unflatten(-1, (w.shape[-1] // width, width)))
