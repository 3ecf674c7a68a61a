"""What an ecosystem calls the parts of a quantized weight, how it lays them out and what it says
of them.

A container opens nothing: it is shown a `Listing` (names, dtypes and shapes from the headers, the
config dictionary, the header metadata) and answers with what it found, or with what a writer has
to say.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from lowbitcli.containers.inputs import Cache, Static
from lowbitcli.containers.layouts import Layout
from lowbitcli.schemes import Scheme
from lowbitcli.tensors import Shape, TensorSpec

# Endings of the names of marker tensors: they are read with the headers, where they are this small.
MARKERS = (".comfy_quant", ".weight_shape")
MARKER_DTYPES = ("U8", "I32", "I64")
MARKER_BYTES = 64 << 10


@dataclass(frozen=True)
class Listing:
    """A checkpoint on paper. `metadata` is the header metadata of each of its files, `config`
    is config.json, `quant_config` hf_quant_config.json.

    `markers` are the bytes of small tensors that say how others are to be read (see MARKERS).
    `raw_fp8` asks for FP8 tensors without a scale to be taken for numbers as they are, `nibbles`
    (`low` or `high`) for NVFP4 to be read with the even column there, whatever the container says.
    """

    tensors: Mapping[str, TensorSpec]
    config: Mapping[str, Any] | None = None
    metadata: tuple[Mapping[str, str], ...] = ()
    quant_config: Mapping[str, Any] | None = None
    markers: Mapping[str, bytes] = field(default_factory=dict)
    raw_fp8: bool = False
    nibbles: str = ""


@dataclass(frozen=True)
class Stored:
    """How a part is stored: the suffix that takes the place of `.weight`, the dtype, the layout.

    `reads` are further dtypes that other writers use for the same part and that are taken by value.
    """

    suffix: str
    dtype: str
    layout: Layout
    reads: tuple[str, ...] = ()

    def at(self, shape: Shape) -> "Stored":
        """Return how a part is stored whose canonical tensor has `shape`."""
        layout = self.layout.at(shape)
        return self if layout is self.layout else replace(self, layout=layout)


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight that a checkpoint holds in quantized form.

    `name` is what the unquantized weight is called, `parts` the tensors that hold it (part ->
    tensor name), `shape` and `dtype` those of the unquantized weight (`dtype` "" where nothing
    says). `plain` is how the unquantized tensor lies, where it is a stack of experts.
    """

    name: str
    scheme: Scheme
    shape: Shape
    dtype: str
    parts: Mapping[str, str]
    stored: Mapping[str, Stored]
    plain: Layout | None = None


@dataclass(frozen=True)
class Finding:
    """Something wrong or not understood: `kind` one of missing, orphan, mismatch, unknown,
    duplicate; `tensor` is a name."""

    kind: str
    tensor: str
    message: str


@dataclass(frozen=True)
class Examination:
    """What a container makes of a checkpoint: quantized weights by name, and findings.

    `activations` are tensors that only say how activations are scaled (name -> what it is): no
    weight needs them, and they mean nothing once the weights are no longer quantized. A tensor
    that is neither a part of a weight nor one of those nor named in a finding is plain.
    `markers` are tensors that only say how others are stored; `notes` is what a user should know.
    """

    weights: Mapping[str, QuantizedWeight]
    findings: tuple[Finding, ...] = ()
    activations: Mapping[str, str] = field(default_factory=dict)
    markers: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


class Declaration(NamedTuple):
    """One weight as the writer of a checkpoint declares it: what it is called, its scheme
    (None: kept) and options. `rule` is "" where scales are as the source has them, `scales` is the
    dtype that they are stored in. `cache` is whether the keys or values that it makes have a
    scale."""

    name: str
    scheme: Scheme | None
    shape: Shape
    dtype: str
    activations: str = "none"
    rule: str = "amax"
    plain: Layout | None = None
    scales: str = ""
    cache: bool = False


@dataclass(frozen=True)
class Declared:
    """What a container adds so that readers understand: the new config.json, header metadata,
    further JSON `files` beside config.json, small U8 tensors (`constants`, name -> bytes), and
    I64 ones (`shapes`, name -> numbers), and what a user should know of the programs that read
    this (`notes`)."""

    config: dict[str, Any] | None
    metadata: Mapping[str, str]
    files: Mapping[str, Any] = field(default_factory=dict)
    constants: Mapping[str, bytes] = field(default_factory=dict)
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Container:
    """One ecosystem's way of writing quantized weights.

    bindings: scheme name -> part -> how it is stored.
    detect(listing): is this a checkpoint of this container?
    examine(listing): which weights it holds and what is wrong with it. Raises CheckpointError
        where what it declares cannot be read at all.
    declare(declarations, config): what a writer says of these weights, from what the source's
        config said. It is asked once about all weights, for the config, and once about those of
        each file, for its metadata.
    activations: scheme name -> the activation options that its consumers take, the first is the
    default. needs_config: can only be written beside a config.json. unwritten: schemes that are
    read, and not written: their readers need what weights alone do not give. fuses: its readers
    serve some weights as one matrix (q/k/v), so that these share a scale. pads: its readers know
    weights that are padded to whole blocks of columns. stacks: does it hold
    experts that are stacked in one tensor, and perhaps nothing else, or are stacks to be split into
    single experts? static: scheme name -> where the scale of static activations is stored; cache:
    where those of keys and values are.
    """

    name: str
    bindings: Mapping[str, Mapping[str, Stored]]
    detect: Callable[[Listing], bool]
    examine: Callable[[Listing], Examination]
    declare: Callable[[Sequence[Declaration], Mapping[str, Any] | None], Declared]
    activations: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    needs_config: bool = False
    unwritten: frozenset[str] = frozenset()
    fuses: bool = True
    pads: bool = False
    stacks: Literal["no", "also", "only", "split"] = "no"
    static: Mapping[str, Static] = field(default_factory=dict)
    cache: Cache | None = None

    @cached_property
    def writes(self) -> tuple[str, ...]:
        """The schemes that can be written."""
        return tuple(name for name in self.bindings if name not in self.unwritten)

    def stem(self, weight: str) -> str:
        """Return what the names of all parts of `weight` begin with."""
        return weight.removesuffix(".weight")
