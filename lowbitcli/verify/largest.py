"""Is the scale that a whole matrix shares the one that its largest element makes? Asked of weights
that this version of lowbit rounded.

    scale of FP8 per tensor, global scale of NVFP4 = decode(encode(shared(max |w|, rule)))

Weights that are fused share the scale of the largest among them, so the weights that store one
scale are taken together, whatever they are called: the largest element in any of them must make
it. Nothing is said where some weight of the same kind was not looked at, as it may have been the
largest one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from lowbitcli.pipeline.arithmetic import ops_of
from lowbitcli.plan.source import SourceWeight
from lowbitcli.schemes import Scheme
from lowbitcli.tensors import GLOBAL_SCALE, SCALE
from lowbitcli.verify.nouns import Problem

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Seen(NamedTuple):
    """The largest magnitude of some rows of a matrix, and the scale that is stored for it, both
    fp32 `[]`."""

    matrix: int
    amax: Tensor
    scale: Tensor


def shared_by(scheme: Scheme) -> str:
    """Return the part that is the scale of a whole matrix, "" where a scheme has none."""
    if not scheme.shares:
        return ""
    return GLOBAL_SCALE if scheme.global_scale is not None else SCALE


def seen(
    scheme: Scheme, w: Tensor, parts: dict[str, Tensor], rule: str, matrix: int
) -> Seen | None:
    """Measure some rows `w [rows, cols]` of a matrix; None where it shares no scale, or the rule
    that made it is not known."""
    name = shared_by(scheme)
    if not name or not rule or w.dtype not in DTYPES:
        return None
    return Seen(matrix, ops_of(scheme).measure(w.contiguous()), parts[name].reshape(()))


@dataclass
class Largest:
    """What is known of all weights that share a scale of their whole matrix."""

    _of: dict[tuple[Scheme, str, float], list[tuple[float, SourceWeight]]] = field(
        default_factory=dict
    )
    _names: set[str] = field(default_factory=set)

    def add(self, weight: SourceWeight, rule: str, found: list[Seen]) -> None:
        """Take down what was seen of all rows of a weight that was rounded by `rule`."""
        if weight.scheme is None or not found:
            return
        self._names.add(weight.name)
        most: dict[int, Tensor] = {}
        for one in found:
            most[one.matrix] = torch.maximum(most.get(one.matrix, one.amax), one.amax)
        for matrix, scale in {one.matrix: one.scale for one in found}.items():
            key = (weight.scheme, rule, float(scale))
            self._of.setdefault(key, []).append((float(most[matrix]), weight))

    def problems(
        self, weights: Mapping[str, SourceWeight], rounded: Mapping[str, str]
    ) -> Iterator[Problem]:
        """Yield where a scale is not the one that the largest element makes, of all `weights` of
        which those in `rounded` (name -> rule) were rounded."""
        unknown = {
            (weights[name].scheme, rule)
            for name, rule in rounded.items()
            if name in weights and name not in self._names
        }
        for (scheme, rule, scale), members in self._of.items():
            if (scheme, rule) in unknown:
                continue
            amax, weight = max(members, key=lambda member: member[0])
            due = _due(weight, rule, amax)
            if due == scale:
                continue
            among = f" in any of the {len(members):,} that share it" if len(members) > 1 else ""
            message = f"its scale for the whole matrix is {scale:.9g}, and the largest element"
            message += f"{among}, {amax:.9g}, makes {due:.9g} by the rule {rule}"
            yield Problem("scale", weight.name, message, weight.file)


def _due(weight: SourceWeight, rule: str, amax: float) -> float:
    """Return the scale that a largest element makes, as a reader of the file sees it."""
    if weight.scheme is None:
        raise ValueError("only a quantized weight has a scale")
    scale = ops_of(weight.scheme).shared(torch.tensor(amax, dtype=torch.float32), rule)
    if scale is None:
        raise ValueError(f"{weight.scheme.name} has no scale for a whole matrix")
    stored = weight.reads[shared_by(weight.scheme)].stored
    return float(scale if stored is None else stored.layout.decode(stored.layout.encode(scale)))
