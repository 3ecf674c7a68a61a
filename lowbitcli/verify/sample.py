"""A sample of a checkpoint: some tensors of each kind, spread over its layers, the same for a seed.

A kind is what a name is without its numbers, with its scheme: `model.layers.#.mlp.up_proj.weight`
in nvfp4. Of `n` of a kind, in the order of their numbers, `k = ceil(share n)` are taken, every
`n / k`-th from a place that the seed and the kind choose: no kind and no part of the depth is left
out.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import xxhash

from lowbitcli.errors import UsageError
from lowbitcli.plan.source import Source
from lowbitcli.verify.nouns import Step

_NUMBERS = re.compile(r"[0-9]{1,9}")
_TEXT = re.compile(r"(\d{1,3}(?:\.\d{1,6})?) ?%(?::(\d{1,9}))?")


@dataclass(frozen=True)
class Sample:
    """A share of the tensors, above 0 and at most 1, and the seed that chooses them."""

    share: float
    seed: int = 0

    @classmethod
    def of(cls, text: str) -> "Sample":
        """Return what `5%` says, or `5%:7` with a seed.

        Raises:
            UsageError: it is no share.
        """
        found = _TEXT.fullmatch(text.strip())
        share = float(found[1]) / 100 if found is not None else 0.0
        if found is None or not 0 < share <= 1:
            raise UsageError(
                f"{text!r} is no share of the tensors", hint="--sample 5%, or 5%:7 with a seed"
            )
        return cls(share, int(found[2] or 0))

    def of_source(self, source: Source) -> Source:
        """Return a checkpoint of which only the weights of the sample are seen."""
        names = self.names(source)
        return replace(source, weights={x: y for x, y in source.weights.items() if x in names})

    def names(self, source: Source) -> frozenset[str]:
        """Return the names of the weights that are looked at."""
        kinds: dict[str, list[str]] = {}
        for name, weight in source.weights.items():
            scheme = weight.scheme.name if weight.scheme is not None else ""
            kinds.setdefault(f"{scheme} {_NUMBERS.sub('#', name)}", []).append(name)
        return frozenset(x for kind, names in kinds.items() for x in self._some(kind, names))

    def _some(self, kind: str, names: list[str]) -> Iterable[str]:
        ordered = sorted(names, key=lambda name: [int(x) for x in _NUMBERS.findall(name)])
        count = math.ceil(round(self.share * len(ordered), 9))
        start = xxhash.xxh3_64_intdigest(kind.encode(), self.seed) / 2**64
        step = len(ordered) / count
        return [ordered[int((start + number) * step)] for number in range(count)]


def sampled(sample: Sample | None, looked: Source, ours: Source) -> list[Step]:
    """Say how many tensors are looked at, where it is not all of them; `document` has the names."""
    if sample is None:
        return []
    what = f"a sample is looked at: {sample.share:.4g} of each kind (tensors)"
    number = len(looked.weights)
    note = f"of {len(ours.weights):,}, seed {sample.seed}: {number:,} looked at"
    return [Step(what, number, note=note)]


def document(sample: Sample | None, looked: Source) -> dict[str, Any] | None:
    """Return what a report says of a sample, None where all was looked at."""
    if sample is None:
        return None
    return {"share": sample.share, "seed": sample.seed, "tensors": list(looked.weights)}
