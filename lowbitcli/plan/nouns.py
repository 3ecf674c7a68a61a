"""The nouns of a plan: every read and every write of a run, known before a byte of weight is
read."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from lowbitcli.checkpoint.header import Entry
from lowbitcli.checkpoint.made import Made
from lowbitcli.containers.container import Stored
from lowbitcli.containers.layouts import Layout
from lowbitcli.containers.stacks import View
from lowbitcli.schemes import Scheme
from lowbitcli.tensors import DATA, Shape, TensorSpec

PathLike = str | os.PathLike[str]


class Part(NamedTuple):
    """One tensor of a file that holds a part of a weight, or all of it (`stored` None: as it
    is).

    Where the weight is one expert of a stack, `spec` is the stack's, `view` says which rows of it,
    and `span` which of its bytes they are in (None: all of them).
    """

    spec: TensorSpec
    file: str
    stored: Stored | None = None
    view: View | None = None
    span: tuple[int, int] | None = None

    @property
    def nbytes(self) -> int:
        """The bytes that are read of it, or written."""
        return self.spec.nbytes if self.span is None else self.span[1] - self.span[0]

    @property
    def begin(self) -> int:
        """The first of the tensor's bytes that are the part's."""
        return 0 if self.span is None else self.span[0]

    @property
    def key(self) -> str:
        """What the checksum of these bytes is kept under."""
        if self.span is None:
            return self.spec.name
        return f"{self.spec.name}[{self.span[0]}:{self.span[1]}]"


class Weight(NamedTuple):  # which is made in an eighth of the time of a frozen dataclass
    """One tensor of the model, quantized or not: where it comes from, what becomes of it.

    `shape` and `dtype` are those of the unquantized tensor. What happens follows from the schemes:
    none/none copies bytes, none/S quantizes, S/none dequantizes to `dtype`, S/S changes layouts
    only, S/T dequantizes and quantizes. `fake` quantizes and stores the dequantized value.
    `kept` says why a tensor is not quantized, "" where it is. `plain` is how a stack of experts
    lies where it is not quantized. `importance` has an exponent for each column, of each matrix
    where they differ, where errors are weighed: see `importance`. `input_scale` is a constant for
    the scale of its inputs, `beside` are the scales of activations that are stored: see
    `activations`.
    """

    name: str
    shape: Shape
    dtype: str
    source: Scheme | None
    target: Scheme | None
    reads: Mapping[str, Part]
    writes: Mapping[str, Part]
    rule: str = "amax"
    activations: str = "none"
    fake: bool = False
    kept: str = ""
    group: str = ""
    plain: Layout | None = None
    importance: bytes = b""
    input_scale: float | None = None
    beside: tuple[tuple[TensorSpec, bytes], ...] = ()

    @property
    def bytes_in(self) -> int:
        return sum(part.nbytes for part in self.reads.values())

    @property
    def bytes_out(self) -> int:
        return sum(part.spec.nbytes for part in self.writes.values())

    @property
    def numel(self) -> int:
        return TensorSpec("", "U8", self.shape).numel

    @property
    def recodes(self) -> bool:
        """Does it stay in its scheme, so that only layouts change and nothing is rounded?"""
        return self.source is not None and self.source == self.target and not self.fake

    @property
    def picks(self) -> bool:
        """Is it numbers out of a stack, which stay as they are?"""
        alone = self.source is None and self.target is None
        read = self.reads[DATA]
        return alone and read.view is not None and read.spec.dtype == self.writes[DATA].spec.dtype

    @property
    def copies(self) -> bool:
        """Are the bytes written the bytes read?"""
        if any(part.view is not None for part in self.reads.values()):
            return False
        if self.source is None and self.target is None:
            return self.reads[DATA].spec.dtype == self.writes[DATA].spec.dtype
        return self.recodes and all(
            part in self.writes
            and self.writes[part].stored == read.stored
            and self.writes[part].spec.dtype == read.spec.dtype
            for part, read in self.reads.items()
        )


def made_of(weights: Iterable[Weight]) -> Made:
    """Return what a manifest says of the weights."""
    rounded: dict[str, str] = {}
    kept: dict[str, str] = {}
    for weight in weights:
        if weight.kept:
            kept[weight.name] = weight.kept
        elif weight.target is not None and not weight.recodes:
            rounded[weight.name] = weight.rule
    return Made(rounded, kept)


class Choice(NamedTuple):
    """What a recipe makes of one weight: `target` None and `kept` why, or a scheme and its rule."""

    target: Scheme | None
    rule: str = "amax"
    activations: str = "none"
    kept: str = ""
    group: str = ""
    input_scale: float | None = None

    @classmethod
    def to_keep(cls, scheme: Scheme | None, reason: str) -> "Choice":
        """Keep a weight as the source has it, which may be quantized already."""
        if scheme is None:
            return cls(None, kept=reason)
        return cls(scheme, kept=f"{reason}; it stays {scheme.name}")


@dataclass(frozen=True, slots=True)
class Job:
    """What must be computed together: one weight, or weights that share a scale over all of
    them."""

    weights: tuple[Weight, ...]
    shared: bool = False

    @property
    def bytes_in(self) -> int:
        return sum(weight.bytes_in for weight in self.weights)


@dataclass(frozen=True)
class OutputFile:
    """A file on paper: its header, where each tensor lies, and how long it is."""

    name: str
    header: bytes
    entries: Mapping[str, Entry]
    size: int


@dataclass(frozen=True)
class Constant:
    """A tensor of an output file whose bytes are known when the plan is made."""

    spec: TensorSpec
    file: str
    data: bytes


@dataclass(frozen=True)
class Plan:
    """Everything a run will do. `directory` is whether the output is one; `output` may be unset.

    `config` is the text of the new config.json (None: there is none), `documents` that of further
    files beside it, `sidecars` are files that are copied, `constants` small tensors that are known
    on paper, `size_in` the bytes of the source's safetensors files, `chosen` why it is this
    container where nobody asked for one, `notes` what the user should be told, `digest` names this
    plan: equal digests mean equal output bytes.
    """

    source: Path
    output: Path | None
    directory: bool
    container: str
    source_container: str
    recipe: Mapping[str, Any]
    weights: tuple[Weight, ...]
    jobs: tuple[Job, ...]
    files: tuple[OutputFile, ...]
    config: bytes | None
    index: bytes | None
    index_name: str
    sidecars: tuple[str, ...]
    notes: tuple[str, ...]
    digest: str
    dropped: Mapping[str, str] = field(default_factory=dict)
    documents: Mapping[str, bytes] = field(default_factory=dict)
    constants: tuple[Constant, ...] = ()
    size_in: int = 0
    chosen: str = ""

    @cached_property
    def bytes_in(self) -> int:
        return sum(weight.bytes_in for weight in self.weights)

    @cached_property
    def bytes_out(self) -> int:
        return sum(file.size for file in self.files)

    @cached_property
    def quantized(self) -> tuple[Weight, ...]:
        return tuple(weight for weight in self.weights if weight.target is not None)

    @property
    def bits_per_weight(self) -> float:
        """Bits that an element takes on average, scales counted, over the quantized weights."""
        elements = sum(weight.numel for weight in self.quantized)
        return 8 * sum(weight.bytes_out for weight in self.quantized) / elements if elements else 0

    @cached_property
    def counts(self) -> dict[str, tuple[int, int]]:
        """Return scheme -> (number of tensors, bytes written); what has none is `kept`, or
        `dequantized` where it had one, and what a dequantization leaves is `copied`."""
        left = "copied" if "dequantize" in self.recipe else "kept"
        counts: dict[str, tuple[int, int]] = {}
        for weight in self.weights:
            label = weight.target.name if weight.target is not None else left
            computed = weight.source is not None or (left == "copied" and not weight.kept)
            if weight.target is None and computed:
                label = "dequantized"
            number, size = counts.get(label, (0, 0))
            counts[label] = (number + 1, size + weight.bytes_out)
        return dict(sorted(counts.items()))
