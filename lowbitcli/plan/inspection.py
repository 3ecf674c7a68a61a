"""What a checkpoint holds, read from its headers alone: what `lowbit inspect` shows."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.containers.container import Finding
from lowbitcli.plan.components import examine
from lowbitcli.plan.nibbles import nibbles_of, nibbles_told
from lowbitcli.plan.nouns import PathLike
from lowbitcli.plan.source import SourceWeight


@dataclass(frozen=True)
class Inspection:
    """A checkpoint on paper: its container, its weights (one per tensor of the model), findings."""

    path: Path
    container: str
    files: Mapping[str, int]
    weights: tuple[SourceWeight, ...]
    findings: tuple[Finding, ...]
    metadata: Mapping[str, Mapping[str, str]]
    notes: tuple[str, ...]

    @cached_property
    def bytes(self) -> int:
        return sum(self.files.values())

    @cached_property
    def schemes(self) -> dict[str, tuple[int, int, int]]:
        """Return scheme or dtype -> (number of tensors, elements, bytes)."""
        found: dict[str, tuple[int, int, int]] = {}
        for weight in self.weights:
            label = weight.scheme.name if weight.scheme else weight.dtype
            number, elements, size = found.get(label, (0, 0, 0))
            found[label] = (number + 1, elements + weight.numel, size + weight.nbytes)
        return dict(sorted(found.items()))


def inspect(source: PathLike, *, nibbles: str = "") -> Inspection:
    """Say what a checkpoint holds, with `nibbles` (low or high) as if its NVFP4 had the even column
    there; findings are reported, not raised.

    Raises:
        CheckpointError: it cannot be read as a checkpoint at all.
        UsageError: no nibble is called so.
    """
    with Checkpoint.open(source) as checkpoint:
        found = examine(checkpoint, nibbles=nibbles_of(nibbles))
        weights = tuple(found.weights.values())
        told = nibbles_told(((weight.scheme, weight.reads) for weight in weights), nibbles)
        return Inspection(
            path=checkpoint.path,
            container=found.container.name,
            files={name: header.size for name, header in checkpoint.headers.items()},
            weights=weights,
            findings=found.findings,
            metadata=checkpoint.metadata,
            notes=(
                *checkpoint.notes,
                *found.notes,
                *told,
            ),
        )
