"""One slice's arithmetic: from parts as they are read to parts as they are written."""

from collections.abc import Mapping

import torch
from torch import Tensor

from lowbit_kernels import importance
from lowbit_kernels.error import BAND, figures_of_bands, figures_of_parts
from lowbitcli.errors import NonFiniteError, UnsupportedError
from lowbitcli.pipeline import lossless
from lowbitcli.pipeline.arithmetic import ops_of, torch_dtype
from lowbitcli.pipeline.slices import rows_high
from lowbitcli.plan.nouns import Weight
from lowbitcli.schemes import Scheme
from lowbitcli.tensors import DATA, GLOBAL_SCALE, SCALE, safe


def values_of(weight: Weight, parts: Mapping[str, Tensor]) -> Tensor:
    """Return the numbers that parts stand for: as stored, or dequantized to fp32."""
    if weight.source is None:
        data = parts[DATA]
        return data.float() if data.element_size() == 1 else data  # FP8 that has no scale
    return ops_of(weight.source).dequantize(parts, torch.float32)


def measure(weight: Weight, w: Tensor) -> Tensor | None:
    """Return the largest magnitude of some rows, in memory of the CPU; None where they hold NaN or
    Inf."""
    if weight.target is None:
        raise ValueError("only a weight that is quantized is measured")
    amax = ops_of(weight.target).measure(w).cpu()
    return amax if bool(torch.isfinite(amax).all()) else None


def shared_scale(weight: Weight, amax: Tensor, *, keep: bool = False) -> Tensor | None:
    """Return the scale that the whole matrix shares, as a reader of the file will see it: after a
    round trip through the layout that it is stored in. With `keep` it is one under which codes of
    the source can stay, and `amax` is what `lossless.reach` says."""
    scheme = weight.target
    if scheme is None:
        raise ValueError("no scheme to quantize to")
    shared = lossless.shared(amax) if keep else ops_of(scheme).shared(amax, weight.rule)
    if shared is None or weight.fake:
        return shared
    stored = weight.writes[GLOBAL_SCALE if scheme.global_scale is not None else SCALE].stored
    if stored is None:
        return shared
    return stored.layout.decode(stored.layout.encode(shared))


def quantize(
    weight: Weight,
    w: Tensor,
    shared: Tensor | None,
    unit: int = BAND,
    source: Mapping[str, Tensor] | None = None,
    matrix: int = 0,
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the parts of some rows of a `matrix`, and what was lost in them as `lost` has it; with
    `source` blocks keep the codes that they have there, wherever they can.

    Raises:
        UnsupportedError: the arithmetic refuses the weight, or no reader could decode it.
    """
    scheme = weight.target
    if scheme is None:
        raise ValueError("no scheme to quantize to")
    ops = ops_of(scheme, weight.dtype)
    given = (w, None if shared is None else shared.to(w.device), weight.rule)
    try:
        parts = ops.quantize(*given, *importance_of(weight, matrix, w.device))
    except ValueError as error:
        raise UnsupportedError(f"{safe(weight.name)}: {error}") from error
    if source is not None:
        parts = lossless.kept(source, parts)
    found = lost(weight, w, parts, unit)
    if not is_finite(found):
        raise UnsupportedError(
            f"{safe(weight.name)} has values that {scheme.name} rounds up beyond the range of fp32",
            hint="keep this weight: no reader could decode it",
        )
    return (_values(weight, parts) if weight.fake else parts), found


def importance_of(weight: Weight, matrix: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return how much each column of a matrix counts, fp32, where that is known."""
    if not weight.importance:
        return ()
    columns = weight.shape[-1]
    start = matrix * columns if len(weight.importance) > columns else 0
    own = bytearray(weight.importance[start : start + columns])
    return (importance.values_of(torch.frombuffer(own, dtype=torch.int8).to(device)),)


def _values(weight: Weight, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what is stored of a weight that keeps its dtype."""
    if weight.target is None:
        raise ValueError("no scheme to quantize to")
    return {DATA: cast(weight, ops_of(weight.target).dequantize(parts, torch.float32))}


def lost(weight: Weight, w: Tensor, parts: Mapping[str, Tensor], unit: int = BAND) -> Tensor:
    """Return the error figures of the bands of each `unit` rows that became `parts`, fp64
    `[bands, 6]` in memory of the CPU: on a GPU in one read, without making values of them."""
    scheme = weight.target
    if scheme is None:
        raise ValueError("no scheme to quantize to")
    if w.is_cuda:
        return _lost_of_parts(scheme, w, parts, unit)
    value = ops_of(scheme).dequantize(parts, torch.float32)
    if unit % BAND == 0:
        return figures_of_bands(w, value)
    cut = zip(w.split(unit), value.split(unit), strict=True)
    return torch.cat([figures_of_bands(some, of) for some, of in cut])


def is_finite(found: Tensor) -> bool:
    """Say whether the sums of error and of signal are finite in each band."""
    return bool(torch.isfinite(found[:, :2]).all())


def _lost_of_parts(scheme: Scheme, w: Tensor, parts: Mapping[str, Tensor], unit: int) -> Tensor:
    """Return error figures in one read of both; how far they are in steps is left out, which a CPU
    would take long for."""
    if unit % BAND == 0:
        found = figures_of_parts(w, parts, scheme.element, scheme.block)
    else:
        cut = []
        for start in range(0, w.shape[0], unit):
            of = {name: _rows(scheme, name, parts[name], start, unit) for name in parts}
            some = w[start : start + unit]
            cut.append(figures_of_parts(some, of, scheme.element, scheme.block))
        found = torch.cat(cut)
    return without_steps(found)


def without_steps(found: Tensor) -> Tensor:
    """Return figures `[*, 6]` in memory of the CPU, 0 for how far values are in steps."""
    found = found.cpu()
    found[..., 5] = 0.0
    return found


def _rows(scheme: Scheme, name: str, part: Tensor, start: int, count: int) -> Tensor:
    """Return what a part of a matrix has for some of its rows."""
    high = rows_high(scheme, name)
    return part if high is None else part[start // high : -(-(start + count) // high)]


def cast(weight: Weight, value: Tensor) -> Tensor:
    """Round fp32 values to the weight's dtype.

    Raises:
        UnsupportedError: a value is beyond what that dtype holds.
    """
    out = value.to(torch_dtype(weight.dtype))
    if not bool(torch.isfinite(out).all()):
        raise UnsupportedError(
            f"{safe(weight.name)} has values beyond the range of {weight.dtype}",
            hint="dequantize to bf16 or fp32",
        )
    return out


class NonFinite:
    """Counts the NaN and Inf of a weight, slice by slice, and keeps where the first one is."""

    def __init__(self, weight: Weight) -> None:
        self.nans = self.infs = 0
        self._name, self._dequantizes = weight.name, weight.target is None
        self._first: tuple[int, ...] = ()

    def look(self, w: Tensor, lead: tuple[int, ...], row: int) -> None:
        """Count those of some rows, the first of which is `row` of the matrix `lead`."""
        bad = ~torch.isfinite(w)
        if not bool(bad.any()):
            return
        if not self._first:
            at, column = bad.nonzero()[0].tolist()
            self._first = (*lead, row + at, column)
        self.nans += int(torch.isnan(w).sum())
        self.infs += int(torch.isinf(w).sum())

    @property
    def found(self) -> bool:
        return bool(self.nans or self.infs)

    def error(self) -> NonFiniteError:
        """Return the error that says how many there are, and where the first one is."""
        hint = "--nonfinite keep leaves such weights as they are"
        if self._dequantizes:
            hint = "its codes stand for no numbers: lowbit verify SRC lists all such weights"
        return NonFiniteError(
            f"{safe(self._name)} holds {self.nans} NaN and {self.infs} Inf, "
            f"the first at {self._first}",
            hint=hint,
        )
