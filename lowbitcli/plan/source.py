"""What a checkpoint holds, weight by weight: its container's examination, turned into weights
to be read."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from lowbitcli.checkpoint import directory
from lowbitcli.checkpoint.reader import Checkpoint, StoredTensor
from lowbitcli.containers import Container, Listing, recognise, suffixes
from lowbitcli.containers.container import (
    MARKER_BYTES,
    MARKER_DTYPES,
    MARKERS,
    Examination,
    Finding,
    QuantizedWeight,
    Stored,
)
from lowbitcli.containers.ct_config import of as quantization_config
from lowbitcli.containers.layouts import IDENTITY, Layout
from lowbitcli.containers.plain import PLAIN
from lowbitcli.containers.stacks import Stacking, called_as, is_stack, stacking_of
from lowbitcli.errors import CheckpointError, UnsupportedError
from lowbitcli.plan.nibbles import nibble_of
from lowbitcli.plan.nouns import Part
from lowbitcli.schemes import Scheme
from lowbitcli.tensors import DATA, FLOATING, Shape, TensorSpec, safe

# What a recipe says of how the tensor of a name lies, None where it says nothing.
Layouts = Callable[[str], Stacking | None]


class SourceWeight(NamedTuple):
    """One tensor of the model as the source holds it: `scheme` None where it is not quantized.

    `plain` is how a stack of experts lies where it is not quantized, or a matrix that is `[in,
    out]`, None for any other tensor; its `shape` is that of the weights, `[E, out, in]`. `rows` is
    where a stack has its rows of gate and up, `called` what its experts are called one by one: see
    `stacks`. `told` is whether a recipe says how it lies.
    """

    name: str
    shape: Shape
    dtype: str
    scheme: Scheme | None
    reads: Mapping[str, Part]
    plain: Layout | None = None
    rows: str = ""
    told: bool = False
    called: str = ""

    @property
    def file(self) -> str:
        """The file that its data is in, which is where the output keeps it."""
        return self.reads[DATA].file

    @property
    def nibble(self) -> str:
        """Which nibble of a byte the even column of FP4 is in: low, high, "" of anything else."""
        return nibble_of(self.scheme, self.reads)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.reads.values())

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


def listing(checkpoint: Checkpoint, *, raw_fp8: bool = False, nibbles: str = "") -> Listing:
    """Return what a container is shown of a checkpoint; marker tensors are read for it."""
    tensors = {name: stored.spec for name, stored in checkpoint.tensors.items()}
    markers = {
        name: bytes(checkpoint.read(name))
        for name, spec in tensors.items()
        if name.endswith(MARKERS) and spec.dtype in MARKER_DTYPES and spec.nbytes <= MARKER_BYTES
    }
    metadata = tuple(checkpoint.metadata.values())
    return Listing(
        tensors, checkpoint.config, metadata, checkpoint.quant_config, markers, raw_fp8, nibbles
    )


def examine(
    checkpoint: Checkpoint,
    *,
    raw_fp8: bool = False,
    nibbles: str = "",
    layouts: Layouts | None = None,
) -> Source:
    """Find the container of a checkpoint and every weight in it, without reading one.

    `raw_fp8` takes FP8 tensors without a scale for numbers as they are; `nibbles` is where the even
    column of NVFP4 is, where the container is not to be believed; `layouts` says how weights lie,
    before what is known of the model.

    Raises:
        UnsupportedError: its config declares a quantization that no container here reads, or is
            in the directory of a file that is taken alone.
        CheckpointError: what it declares cannot be understood.
    """
    seen = listing(checkpoint, raw_fp8=raw_fp8, nibbles=nibbles)
    container = recognise(seen)
    if container is PLAIN:
        _refuse_unread(checkpoint)
    found = container.examine(seen)
    if container is PLAIN:
        _refuse_alone(checkpoint, seen, found)
    weights: dict[str, SourceWeight] = {}
    parts: set[str] = set()
    twice: list[Finding] = []
    for weight in found.weights.values():
        weights[weight.name] = _quantized(weight, checkpoint, layouts)
        parts.update(weight.parts.values())
    quantized = frozenset(weights)
    for name, stored in checkpoint.tensors.items():
        if name in parts or name in found.activations or name in found.markers:
            continue
        if name in quantized:
            twice.append(_twice(weights[name]))
            continue
        weights[name] = _plain(stored, checkpoint, layouts)
    weights = dict(sorted(weights.items()))
    others = [] if container is PLAIN else suffixes.foreign(seen, found)
    findings = (*found.findings, *others, *_otherwise(container, checkpoint), *twice)
    return Source(container, weights, findings, found.activations, found.notes)


def _otherwise(container: Container, checkpoint: Checkpoint) -> list[Finding]:
    """Report a config that declares another container than the one that the headers tell of."""
    said = quantization_config(checkpoint.config).get("quant_method")
    if container.needs_config or container is PLAIN or said in (None, container.name):
        return []
    message = f"it says quant_method {str(said)[:80]!r}, the headers say {container.name}"
    return [Finding("mismatch", "config.json", message)]


def _twice(weight: SourceWeight) -> Finding:
    """Report a tensor that has the name of a quantized weight and is no part of it."""
    scheme = weight.scheme.name if weight.scheme is not None else ""
    said = f"stored twice: as {scheme} in {safe(weight.reads[DATA].spec.name)}, and as it is"
    return Finding("duplicate", weight.name, said)


def _plain(stored: StoredTensor, checkpoint: Checkpoint, layouts: Layouts | None) -> SourceWeight:
    """Return a tensor that is not quantized; one of stacked experts as a stack of weights."""
    spec = stored.spec
    told = layouts(spec.name) if layouts is not None and _may_lie(spec) else None
    lies = told
    if lies is None and len(spec.shape) == 3 and spec.dtype in FLOATING:
        lies = stacking_of(spec.name, spec.shape, checkpoint.config)
    layout = None if lies is None else lies.layout
    if lies is None or layout is None or (len(spec.shape) == 2 and layout == IDENTITY):
        reads = {DATA: Part(spec, stored.file)}
        known = told is not None
        return SourceWeight(spec.name, spec.shape, spec.dtype, None, reads, told=known)
    read = Part(spec, stored.file, Stored("", spec.dtype, layout))
    shape = layout.spec(spec).shape  # of a layout that is its own inverse
    called = _called(checkpoint) if len(shape) == 3 else ""
    return SourceWeight(
        spec.name,
        shape,
        spec.dtype,
        None,
        {DATA: read},
        layout,
        lies.rows,
        told is not None,
        called,
    )


def _called(checkpoint: Checkpoint) -> str:
    return called_as(str((checkpoint.config or {}).get("model_type")))


def _may_lie(spec: TensorSpec) -> bool:
    """Is this a tensor of which a recipe can say how it lies: a stack of experts or a matrix?"""
    if spec.dtype not in FLOATING:
        return False
    return is_stack(spec.name, len(spec.shape)) or (
        len(spec.shape) == 2 and spec.name.endswith(".weight")
    )


def lying(source: "Source") -> list[str]:
    """Return the names of which a recipe can say how they lie."""
    return [
        name
        for name, weight in source.weights.items()
        if weight.plain is not None or (weight.scheme is None and _may_lie(weight.reads[DATA].spec))
    ]


def _rows_of(weight: QuantizedWeight, checkpoint: Checkpoint, layouts: Layouts | None) -> str:
    """Return where a quantized stack has its rows of gate and up."""
    if weight.plain is None or len(weight.shape) != 3:
        return ""
    lies = layouts(weight.name) if layouts is not None else None
    shape = weight.plain.spec(TensorSpec(weight.name, "U8", weight.shape)).shape
    lies = lies or stacking_of(weight.name, shape, checkpoint.config)
    return "" if lies is None else lies.rows


def _quantized(
    weight: QuantizedWeight, checkpoint: Checkpoint, layouts: Layouts | None
) -> SourceWeight:
    reads = {}
    for part, name in weight.parts.items():
        stored = checkpoint.tensors[name]
        reads[part] = Part(stored.spec, stored.file, weight.stored[part])
    rows = _rows_of(weight, checkpoint, layouts)
    return SourceWeight(
        weight.name,
        weight.shape,
        weight.dtype,
        weight.scheme,
        reads,
        weight.plain,
        rows,
        called=_called(checkpoint) if rows or weight.plain is not None else "",
    )


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


def _refuse_alone(checkpoint: Checkpoint, seen: Listing, found: Examination) -> None:
    """Raise UnsupportedError where a file holds quantized weights, and a config beside it, which is
    its directory's, says of which kind they are."""
    if checkpoint.is_directory:
        return
    config, quant_config = (
        directory.beside(checkpoint.root, name)
        for name in (directory.CONFIG, directory.QUANT_CONFIG)
    )
    more = replace(seen, config=config, quant_config=quant_config)
    if _is_declared(more) and (found.findings or _is_quantized(more)):
        said = directory.QUANT_CONFIG if quant_config is not None else directory.CONFIG
        raise UnsupportedError(
            f"{safe(str(checkpoint.path))}: holds parts of quantized weights, and {said} beside "
            "it, which says of which kind, is not read for a file that is taken alone",
            hint=f"name the directory {safe(str(checkpoint.root))}",
        )


def _is_declared(seen: Listing) -> bool:
    """Do the configs declare a quantization?"""
    try:
        return bool(quantization_config(seen.config)) or seen.quant_config is not None
    except CheckpointError:
        return False


def _is_quantized(seen: Listing) -> bool:
    """Does a container find quantized weights there?"""
    try:
        return bool(recognise(seen).examine(seen).weights)
    except CheckpointError:
        return False


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
