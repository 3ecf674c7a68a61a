"""How far the values of a quantized weight lie from the weight: sums from which every figure of
error follows.

    error = sum (v - w)^2    signal = sum w^2    value = sum v^2    product = sum w v
    relative = sqrt(error / signal)    SQNR = 10 log10(signal / error)
    cosine = product / sqrt(signal value)

Sums are taken in fp64 over bands of 128 rows and the bands are added in index order, so that a
figure does not depend on how a weight was cut into slices.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

BAND = 128


@dataclass(frozen=True)
class Sums:
    """Sums over `count` elements; `largest` is the largest |v - w|."""

    count: int = 0
    error: float = 0.0
    signal: float = 0.0
    value: float = 0.0
    product: float = 0.0
    largest: float = 0.0

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
            max(self.largest, other.largest),
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


def sums(w: Tensor, v: Tensor) -> Sums:
    """Return the error sums of values `v` against the weight `w`, both `[*, rows, cols]`, any float
    dtype.

    Raises:
        ValueError: the shapes differ.
    """
    if w.shape != v.shape:
        raise ValueError(f"shapes differ: {tuple(w.shape)} and {tuple(v.shape)}")
    cols = w.shape[-1] if w.dim() else 1
    rows_w, rows_v = w.reshape(-1, max(cols, 1)), v.reshape(-1, max(cols, 1))
    total = Sums()
    for start in range(0, rows_w.shape[0], BAND):
        total = total.plus(_band(rows_w[start : start + BAND], rows_v[start : start + BAND]))
    return total


def _band(w: Tensor, v: Tensor) -> Sums:
    w, v = w.double(), v.double()
    d = v - w
    figures = torch.stack(
        [(d * d).sum(), (w * w).sum(), (v * v).sum(), (w * v).sum(), d.abs().amax()]
    ).tolist()
    return Sums(w.numel(), *figures)
