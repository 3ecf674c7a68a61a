"""What a checkpoint holds, weight by weight: its container's examination, turned into weights
to be read."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lowbitcli.checkpoint.reader import Checkpoint, StoredTensor
from lowbitcli.containers import Container, Listing, recognise
from lowbitcli.containers.container import (
    MARKER_BYTES,
    MARKERS,
    Finding,
    QuantizedWeight,
    Stored,
)
from lowbitcli.containers.ct_config import of as quantization_config
from lowbitcli.containers.layouts import Layout
from lowbitcli.containers.plain import PLAIN
from lowbitcli.containers.stacks import layout_of
from lowbitcli.errors import CheckpointError, UnsupportedError
from lowbitcli.plan.nouns import Part
from lowbitcli.schemes import Scheme
from lowbitcli.tensors import DATA, FLOATING, Shape, safe


@dataclass(frozen=True, slots=True)
class SourceWeight:
    """One tensor of the model as the source holds it: `scheme` None where it is not quantized.

    `plain` is how a stack of experts lies where it is not quantized, None for any other tensor; its
    `shape` is that of the stack of weights `[E, out, in]`.
    """

    name: str
    shape: Shape
    dtype: str
    scheme: Scheme | None
    reads: Mapping[str, Part]
    plain: Layout | None = None

    @property
    def file(self) -> str:
        """The file that its data is in, which is where the output keeps it."""
        return self.reads[DATA].file

    @property
    def nbytes(self) -> int:
        return sum(part.spec.nbytes for part in self.reads.values())

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Source:
    """A checkpoint understood: its container, its weights by name, and what is wrong with it."""

    container: Container
    weights: Mapping[str, SourceWeight]
    findings: tuple[Finding, ...]
    activations: Mapping[str, str]
    notes: tuple[str, ...] = ()


def listing(checkpoint: Checkpoint, *, raw_fp8: bool = False) -> Listing:
    """Return what a container is shown of a checkpoint; marker tensors are read for it."""
    tensors = {name: stored.spec for name, stored in checkpoint.tensors.items()}
    markers = {
        name: bytes(checkpoint.read(name))
        for name, spec in tensors.items()
        if name.endswith(MARKERS) and spec.dtype == "U8" and spec.numel <= MARKER_BYTES
    }
    metadata = tuple(checkpoint.metadata.values())
    return Listing(tensors, checkpoint.config, metadata, checkpoint.quant_config, markers, raw_fp8)


def examine(checkpoint: Checkpoint, *, raw_fp8: bool = False) -> Source:
    """Find the container of a checkpoint and every weight in it, without reading one.

    `raw_fp8` takes FP8 tensors without a scale for numbers as they are.

    Raises:
        UnsupportedError: its config declares a quantization that no container here reads.
        CheckpointError: what it declares cannot be understood.
    """
    seen = listing(checkpoint, raw_fp8=raw_fp8)
    container = recognise(seen)
    if container is PLAIN:
        _refuse_unread(checkpoint)
    found = container.examine(seen)
    weights: dict[str, SourceWeight] = {}
    parts: set[str] = set()
    twice: list[Finding] = []
    for weight in found.weights.values():
        weights[weight.name] = _quantized(weight, checkpoint)
        parts.update(weight.parts.values())
    for name, stored in checkpoint.tensors.items():
        if name in parts or name in found.activations or name in found.markers:
            continue
        if name in weights:
            twice.append(_twice(weights[name]))
            continue
        weights[name] = _plain(stored, checkpoint)
    weights = dict(sorted(weights.items()))
    findings = (*found.findings, *twice)
    return Source(container, weights, findings, found.activations, found.notes)


def _twice(weight: SourceWeight) -> Finding:
    """Report a tensor that has the name of a quantized weight and is no part of it."""
    scheme = weight.scheme.name if weight.scheme is not None else ""
    said = f"stored twice: as {scheme} in {safe(weight.reads[DATA].spec.name)}, and as it is"
    return Finding("duplicate", weight.name, said)


def _plain(stored: StoredTensor, checkpoint: Checkpoint) -> SourceWeight:
    """Return a tensor that is not quantized; one of stacked experts as a stack of weights."""
    spec = stored.spec
    layout = None
    if len(spec.shape) == 3 and spec.dtype in FLOATING:
        layout = layout_of(spec.name, checkpoint.config)
    if layout is None:
        read = Part(spec, stored.file)
        return SourceWeight(spec.name, spec.shape, spec.dtype, None, {DATA: read})
    read = Part(spec, stored.file, Stored("", spec.dtype, layout))
    shape = layout.spec(spec).shape  # of a layout that is its own inverse
    return SourceWeight(spec.name, shape, spec.dtype, None, {DATA: read}, layout)


def _quantized(weight: QuantizedWeight, checkpoint: Checkpoint) -> SourceWeight:
    reads = {}
    for part, name in weight.parts.items():
        stored = checkpoint.tensors[name]
        reads[part] = Part(stored.spec, stored.file, weight.stored[part])
    return SourceWeight(weight.name, weight.shape, weight.dtype, weight.scheme, reads, weight.plain)


def _refuse_unread(checkpoint: Checkpoint) -> None:
    declared = quantization_config(checkpoint.config)
    method = declared.get("quant_method") or ("of no quant_method" if declared else None)
    if method is None and checkpoint.quant_config is not None:
        method = "modelopt (hf_quant_config.json)"
    if method is not None:
        raise UnsupportedError(
            f"its config declares the quantization {safe(str(method)[:80])!r}, which is not read",
            hint="dequantize it with the tool that wrote it, or start from the unquantized model",
        )


def refuse_findings(source: Source) -> None:
    """Raise CheckpointError where the examination found something wrong: nothing is guessed."""
    if not source.findings:
        return
    shown = [f"{safe(f.tensor)}: {safe(f.message)}" for f in source.findings[:5]]
    if len(source.findings) > 5:
        shown.append(f"and {len(source.findings) - 5} more")
    raise CheckpointError(
        "the checkpoint disagrees with itself\n  " + "\n  ".join(shown),
        hint="lowbit verify lists all of it",
    )
