"""Weights that provoke every branch of the arithmetic, made from a seed."""

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def bits(t: Tensor) -> Tensor:
    """Return the patterns of `t` as integers, on the CPU; every NaN of a wide float as one."""
    t = t.detach().cpu()
    if t.is_floating_point() and t.element_size() > 1:
        # Which NaN an instruction makes is the device's own.
        t = torch.where(torch.isnan(t), torch.nan, t)
    of_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return t.contiguous().view(of_size[t.element_size()])


def difference(got: Tensor, want: Tensor) -> str:
    """Say how `got` differs from `want` in dtype, shape or bits; empty where it does not."""
    if got.dtype != want.dtype or got.shape != want.shape:
        return f"{got.dtype} {list(got.shape)}, not {want.dtype} {list(want.shape)}"
    unequal = bits(got) != bits(want)
    if not unequal.any():
        return ""
    first = tuple(unequal.nonzero()[0].tolist())
    return f"{int(unequal.sum())} of {unequal.numel()} differ, first at {first}"


def _random(shape: tuple[int, ...], seed: int, spread: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.randint(-spread, spread + 1, shape, generator=generator)
    return torch.randn(shape, generator=generator) * torch.exp2(exponent.float())


def weights(dtype: torch.dtype, rows: int = 6, cols: int = 96) -> dict[str, Tensor]:
    """Return weights `[rows, cols]` by name; the finite ones first, then `nan` and `inf`."""
    info = torch.finfo(dtype)
    gauss = _random((rows, cols), 1, 0)
    wide = _random((rows, cols), 2, 12)
    sparse = gauss.clone()
    sparse[0] = 0
    sparse[1, : cols // 2] = -0.0
    sparse[2, 3] = -0.0
    ties = torch.tensor([0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, -0.25, -2.5, -5, 448, 464, 416])
    ties = ties.repeat(rows * cols // len(ties) + 1)[: rows * cols].reshape(rows, cols)
    tiny = gauss.sign() * torch.randint(
        0, 9, (rows, cols), generator=torch.Generator().manual_seed(3)
    )
    smallest = 2.0**-149 if dtype == torch.float32 else info.smallest_normal * info.eps
    huge = torch.where(wide > 1, info.max, wide)
    huge[0, 0] = -info.max
    samples = {
        "gauss": gauss * 0.02,
        "wide": wide,
        "sparse": sparse,
        "zeros": torch.zeros(rows, cols),
        "ties": ties,
        "ties_scaled": ties * 0.1,
        "subnormal": tiny.double() * smallest,
        "one_subnormal": torch.zeros(rows, cols).index_fill_(1, torch.tensor([5]), 1) * smallest,
        "huge": huge,
        "tiny_blocks": torch.where(
            torch.arange(cols) < cols // 2, wide * info.smallest_normal, wide
        ),
        "nan": gauss.clone().index_fill_(1, torch.tensor([7]), torch.nan),
        "inf": gauss.clone(),
    }
    samples["inf"][1, 2], samples["inf"][2, cols - 3] = torch.inf, -torch.inf
    samples["nan"][1:] = gauss[1:]
    return {name: w.to(dtype) for name, w in samples.items()}


def finite(dtype: torch.dtype, rows: int = 6, cols: int = 96) -> dict[str, Tensor]:
    """Return those weights that hold neither NaN nor Inf."""
    return {name: w for name, w in weights(dtype, rows, cols).items() if w.isfinite().all()}
