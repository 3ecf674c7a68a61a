"""What an ecosystem calls the parts of a quantized weight, how it lays them out and what it says
of them.

A container opens nothing: it is shown a `Listing` (names, dtypes and shapes from the headers, the
config dictionary, the header metadata) and answers with what it found, or with what a writer has
to say.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lowbitcli.containers.layouts import Layout
from lowbitcli.schemes import Scheme
from lowbitcli.tensors import Shape, TensorSpec


@dataclass(frozen=True)
class Listing:
    """A checkpoint on paper. `metadata` is the header metadata of each of its files, `config`
    is config.json."""

    tensors: Mapping[str, TensorSpec]
    config: Mapping[str, Any] | None = None
    metadata: tuple[Mapping[str, str], ...] = ()


@dataclass(frozen=True)
class Stored:
    """How a part is stored: the suffix that takes the place of `.weight`, the dtype, the layout.

    `reads` are further dtypes that other writers use for the same part and that are taken by value.
    """

    suffix: str
    dtype: str
    layout: Layout
    reads: tuple[str, ...] = ()


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight that a checkpoint holds in quantized form.

    `name` is what the unquantized weight is called, `parts` the tensors that hold it (part ->
    tensor name), `shape` and `dtype` those of the unquantized weight (`dtype` "" where nothing
    says).
    """

    name: str
    scheme: Scheme
    shape: Shape
    dtype: str
    parts: Mapping[str, str]
    stored: Mapping[str, Stored]


@dataclass(frozen=True)
class Finding:
    """Something wrong or not understood: `kind` one of missing, orphan, mismatch, unknown;
    `tensor` is a name."""

    kind: str
    tensor: str
    message: str


@dataclass(frozen=True)
class Examination:
    """What a container makes of a checkpoint: quantized weights by name, and findings.

    `activations` are tensors that only say how activations are scaled (name -> what it is): no
    weight needs them, and they mean nothing once the weights are no longer quantized. A tensor
    that is neither a part of a weight nor one of those nor named in a finding is plain.
    """

    weights: Mapping[str, QuantizedWeight]
    findings: tuple[Finding, ...] = ()
    activations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Declaration:
    """One weight as the writer of a checkpoint declares it: what it is called, its scheme
    (None: kept) and options."""

    name: str
    scheme: Scheme | None
    shape: Shape
    dtype: str
    activations: str = "none"
    rule: str = "amax"


@dataclass(frozen=True)
class Declared:
    """What a container adds so that readers understand: the new config.json, and header
    metadata."""

    config: dict[str, Any] | None
    metadata: Mapping[str, str]


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
    default. needs_config: can only be written beside a config.json.
    """

    name: str
    bindings: Mapping[str, Mapping[str, Stored]]
    detect: Callable[[Listing], bool]
    examine: Callable[[Listing], Examination]
    declare: Callable[[Sequence[Declaration], Mapping[str, Any] | None], Declared]
    activations: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    needs_config: bool = False

    def part_name(self, weight: str, stored: Stored) -> str:
        """Return the tensor that holds a part of `weight` (a name that ends in `.weight`, or
        any other)."""
        stem = weight.removesuffix(".weight")
        return stem + stored.suffix
