"""How far the values of a quantized weight lie from the weight: sums from which every figure of
error follows.

    error = sum (v - w)^2    signal = sum w^2    value = sum v^2    product = sum w v
    relative = sqrt(error / signal)    SQNR = 10 log10(signal / error)
    cosine = product / sqrt(signal value)

| function | of `w [*, R, C]` and | result |
|---|---|---|
| `sums`, `bands` | values `v [*, R, C]` | `Sums` over all, of each band of 128 rows |
| `sums_of_parts`, `bands_of_parts` | data, scale, global_scale | the same, and `steps` |

Sums are taken in fp64 over bands of 128 rows and the bands are added in index order, so that a
figure does not depend on how a weight was cut into slices of whole bands. The order within a band
is that of `error_figures` on every device; only `bands_of_parts` on a CPU takes torch's own, whose
last digits may differ.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit_kernels import cpu_figures
from lowbit_kernels.error_figures import (
    BAND,
    as_matrix,
    check_shapes,
    decoded,
    figures,
    figures_of_parts,
    in_steps,
    placed,
)
from lowbit_kernels.formats import Format
from lowbit_kernels.jit import use_kernel
from lowbit_kernels.typed import typed


def _larger(a: float, b: float) -> float:
    """Return the larger of both, NaN where one is."""
    return a if a > b or math.isnan(a) else b


@dataclass(frozen=True)
class Sums:
    """Sums over `count` elements; `largest` is the largest |v - w|, `steps` the same in steps of
    the element's grid, 0 where codes were not looked at.
    """

    count: int = 0
    error: float = 0.0
    signal: float = 0.0
    value: float = 0.0
    product: float = 0.0
    largest: float = 0.0
    steps: float = 0.0

    @property
    def is_finite(self) -> bool:
        """Whether both sides were finite, and their squares too."""
        return math.isfinite(self.error) and math.isfinite(self.signal)

    def plus(self, other: "Sums") -> "Sums":
        """Return the sums over both."""
        return Sums(
            self.count + other.count,
            self.error + other.error,
            self.signal + other.signal,
            self.value + other.value,
            self.product + other.product,
            _larger(self.largest, other.largest),
            _larger(self.steps, other.steps),
        )

    @property
    def relative(self) -> float:
        """The error's norm over the signal's; 0 where nothing differs, infinite where only noise
        is.
        """
        if self.error == 0:
            return 0.0
        return math.sqrt(self.error / self.signal) if self.signal else math.inf

    @property
    def is_lost(self) -> bool:
        """Whether hardly anything is left: the error's norm is 0.7 of the signal's or more, an SQNR
        of 3 dB or less."""
        return self.is_finite and self.relative >= 0.7

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise in dB; infinite where nothing differs."""
        if self.error == 0:
            return math.inf
        return 10 * math.log10(self.signal / self.error) if self.signal else -math.inf

    @property
    def cosine(self) -> float:
        """The cosine between the two as vectors; 1 where both are zero."""
        if self.signal == 0 or self.value == 0:
            return 1.0 if self.signal == self.value else 0.0
        return self.product / math.sqrt(self.signal * self.value)


def _listed(w: Tensor, rows: Sequence[Sequence[float]]) -> list[Sums]:
    """Return `Sums` of bands from their figures."""
    cols = max(w.shape[-1] if w.dim() else 1, 1)
    left = w.numel() // cols
    return [Sums(min(BAND, left - i * BAND) * cols, *map(float, row)) for i, row in enumerate(rows)]


def _band(w: Tensor, v: Tensor, grid: Tensor | None) -> list[float]:
    w, v = w.double(), v.double()
    d = v - w
    found = [(d * d).sum(), (w * w).sum(), (v * v).sum(), (w * v).sum(), d.abs().amax()]
    if grid is not None:
        found.append(in_steps(d, grid).amax())
    return torch.stack(found).tolist()


def _quick(w: Tensor, v: Tensor, grid: Tensor | None) -> list[Sums]:
    """Return `Sums` of bands with torch's order within a band."""
    sides = [as_matrix(side).split(BAND) for side in ((w, v) if grid is None else (w, v, grid))]
    if w.numel() == 0:
        return []
    grids = [None] * len(sides[0]) if grid is None else sides[2]
    return _listed(w, [_band(*side) for side in zip(*sides[:2], grids, strict=True)])


@typed
def bands(w: Tensor, v: Tensor) -> list[Sums]:
    """Return the error sums of each 128 rows of values `v` against the weight `w`, both `[*, rows,
    cols]`, any float dtype.

    Raises:
        ValueError: the shapes differ.
    """
    return _listed(w, figures_of_bands(w, v).tolist())


@typed
def figures_of_bands(w: Tensor, v: Tensor) -> Tensor:
    """Return `figures` in the way that is quickest where `w` is: fp64 `[bands, 6]`.

    Raises:
        ValueError: the shapes differ.
    """
    check_shapes(w, v)
    if w.device.type == "cpu" and not use_kernel(w):
        return cpu_figures.figures(as_matrix(w), as_matrix(v))
    return figures(w, v)


@typed
def total_of_bands(found: Tensor, count: int) -> Sums:
    """Return the sums over `count` elements whose bands have the figures `found`, fp64 `[bands, 6]`
    in memory of the CPU: those of the first band to the last, as `Sums.plus` adds them.

    Raises:
        ValueError: the figures have another shape or dtype, or the count is below 0.
    """
    if found.dim() != 2 or found.shape[1] != 6 or found.dtype != torch.float64:
        raise ValueError(f"figures are fp64 [bands, 6], these {found.dtype} {list(found.shape)}")
    if count < 0:
        raise ValueError(f"there are no {count} elements")
    if not len(found):
        return Sums(count)
    # torch adds up a column from its first number to its last.
    added, largest = found[:, :4].cumsum(0)[-1], found[:, 4:].amax(0)
    return Sums(count, *torch.cat((added, largest)).tolist())


@typed
def bands_of_stack(w: Tensor, v: Tensor) -> list[list[Sums]]:
    """Return `bands` of each matrix of a stack `w` and its values `v`, both `[n, rows, cols]`.

    Raises:
        ValueError: the shapes differ, or there is no stack.
    """
    check_shapes(w, v)
    if w.dim() != 3:
        raise ValueError(f"a stack has the shape [n, rows, cols], this {list(w.shape)}")
    if w.device.type == "cpu" and not use_kernel(w):
        found = cpu_figures.figures_of_stack(w, v).tolist()
        return [_listed(one, rows) for one, rows in zip(w, found, strict=True)]
    return [bands(one, of) for one, of in zip(w, v, strict=True)]


@typed
def bands_of_parts(
    w: Tensor,
    parts: Mapping[str, Tensor],
    element: Format,
    block: tuple[int | None, int | None],
) -> list[Sums]:
    """Return the error sums, with steps, of each 128 rows of `w` against its parts, see
    `figures_of_parts`.

    Raises:
        ValueError: the parts do not belong to `w`, or there is no data or scale.
    """
    if not {"data", "scale"} <= parts.keys() <= {"data", "scale", "global_scale"}:
        raise ValueError(f"parts are data, scale and global_scale, these are {list(parts)}")
    if use_kernel(w):
        return _listed(w, figures_of_parts(w, parts, element, block).tolist())
    return _quick(w, *decoded(w, placed(w, parts, element, block)))


def _total(found: Sequence[Sums]) -> Sums:
    total = Sums()
    for one in found:
        total = total.plus(one)
    return total


@typed
def sums(w: Tensor, v: Tensor) -> Sums:
    """Return the error sums of values `v` against the weight `w`, both `[*, rows, cols]`, any float
    dtype.

    Raises:
        ValueError: the shapes differ.
    """
    return _total(bands(w, v))


@typed
def sums_of_parts(
    w: Tensor,
    parts: Mapping[str, Tensor],
    element: Format,
    block: tuple[int | None, int | None],
) -> Sums:
    """Return the error sums, with steps, of `w` against its parts, see `figures_of_parts`.

    Raises:
        ValueError: the parts do not belong to `w`.
    """
    return _total(bands_of_parts(w, parts, element, block))


__all__ = [
    "BAND",
    "Sums",
    "bands",
    "bands_of_parts",
    "figures",
    "figures_of_bands",
    "figures_of_parts",
    "sums",
    "sums_of_parts",
    "total_of_bands",
]
