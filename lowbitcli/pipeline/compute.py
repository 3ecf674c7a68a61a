"""One job's arithmetic: from the weights as they are read to the parts that are written."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit_kernels.error import Sums, sums
from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.errors import NonFiniteError, UnsupportedError
from lowbitcli.pipeline.arithmetic import ops_of, torch_dtype
from lowbitcli.pipeline.read import load
from lowbitcli.plan.nouns import Job, Weight
from lowbitcli.schemes import Scheme
from lowbitcli.tensors import DATA, GLOBAL_SCALE, SCALE, safe


@dataclass(frozen=True)
class Computed:
    """What one weight became: the stored tensors by part, and the error where something was
    rounded.

    `moved` counts scales that could not be stored exactly: a reciprocal that does not come back.
    """

    weight: Weight
    parts: Mapping[str, Tensor]
    error: Sums | None = None
    moved: int = 0


def compute(job: Job, checkpoint: Checkpoint, device: torch.device) -> list[Computed]:
    """Compute a job whose weights are not merely copied.

    Raises:
        NonFiniteError: a weight holds NaN or Inf, or dequantizes to one.
        UnsupportedError: the arithmetic refuses a weight.
    """
    if len(job.weights) == 1:
        weight = job.weights[0]
        if weight.recodes:
            return [_recode(weight, checkpoint, device)]
        if weight.target is None:
            return [_dequantize(weight, checkpoint, device)]
    values = [value_of(weight, checkpoint, device) for weight in job.weights]
    amax = [_measure(weight, w) for weight, w in zip(job.weights, values, strict=True)]
    whole = torch.stack(amax).amax(0)
    return [
        _quantize(weight, w, whole if job.shared else own)
        for weight, w, own in zip(job.weights, values, amax, strict=True)
    ]


def value_of(weight: Weight, checkpoint: Checkpoint, device: torch.device) -> Tensor:
    """Return a weight's numbers: as stored, or dequantized to fp32 where it is quantized."""
    parts = {name: load(checkpoint, part, device) for name, part in weight.reads.items()}
    if weight.source is None:
        return parts[DATA]
    return ops_of(weight.source).dequantize(parts, torch.float32)


def _measure(weight: Weight, w: Tensor) -> Tensor:
    if weight.target is None:
        raise ValueError("only a weight that is quantized is measured")
    amax = ops_of(weight.target).measure(w)
    if not bool(torch.isfinite(amax).all()):
        raise non_finite(weight.name, w)
    return amax


def non_finite(name: str, w: Tensor) -> NonFiniteError:
    """Return the error that says how many NaN and Inf `w` holds, and where the first one is."""
    bad = ~torch.isfinite(w)
    first = tuple(bad.nonzero()[0].tolist())
    nans, infs = int(torch.isnan(w).sum()), int(torch.isinf(w).sum())
    return NonFiniteError(
        f"{safe(name)} holds {nans} NaN and {infs} Inf, the first at {first}",
        hint="--nonfinite keep leaves such weights as they are",
    )


def _quantize(weight: Weight, w: Tensor, amax: Tensor) -> Computed:
    """Quantize one weight for the shared scale that a reader of the file will see."""
    scheme = weight.target
    if scheme is None:
        raise ValueError("no scheme to quantize to")
    ops = ops_of(scheme)
    shared = ops.shared(amax, weight.rule)
    shared = _as_read(weight, scheme, shared)
    try:
        parts = ops.quantize(w, shared, weight.rule)
    except ValueError as error:
        raise UnsupportedError(f"{safe(weight.name)}: {error}") from error
    value = ops.dequantize(parts, torch.float32)
    error = sums(w, value)
    if not error.is_finite:
        raise UnsupportedError(
            f"{safe(weight.name)} has values that {scheme.name} rounds up beyond the range of fp32",
            hint="keep this weight: no reader could decode it",
        )
    if weight.fake:
        return Computed(weight, {DATA: _cast(weight, value)}, error)
    return Computed(weight, _encode(weight, parts), error)


def _as_read(weight: Weight, scheme: Scheme, shared: Tensor | None) -> Tensor | None:
    """Return the shared scale after a round trip through the layout it is stored in."""
    if shared is None or weight.fake:
        return shared
    stored = weight.writes[GLOBAL_SCALE if scheme.global_scale is not None else SCALE].stored
    if stored is None:
        return shared
    return stored.layout.decode(stored.layout.encode(shared))


def _encode(weight: Weight, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    encoded = {}
    for name, part in weight.writes.items():
        stored = part.stored
        encoded[name] = parts[name] if stored is None else stored.layout.encode(parts[name])
    return encoded


def _recode(weight: Weight, checkpoint: Checkpoint, device: torch.device) -> Computed:
    """Store the same codes in another layout; count scales that do not come back to the bit."""
    parts = {name: load(checkpoint, part, device) for name, part in weight.reads.items()}
    encoded = _encode(weight, parts)
    moved = 0
    for name, part in weight.writes.items():
        if part.stored is not None and parts[name].dtype == torch.float32:
            back = part.stored.layout.decode(encoded[name])
            moved += int((back.view(torch.int32) != parts[name].view(torch.int32)).sum())
    return Computed(weight, encoded, moved=moved)


def _dequantize(weight: Weight, checkpoint: Checkpoint, device: torch.device) -> Computed:
    value = value_of(weight, checkpoint, device)
    if not bool(torch.isfinite(value).all()):
        raise non_finite(weight.name, value)
    return Computed(weight, {DATA: _cast(weight, value)})


def _cast(weight: Weight, value: Tensor) -> Tensor:
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
