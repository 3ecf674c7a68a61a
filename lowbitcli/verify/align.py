"""How weights that are not quantized lie, where their own checkpoint does not tell: as the output's
manifest says it of the source, and as the same weight lies where it is quantized."""

from collections.abc import Collection, Mapping
from dataclasses import replace

from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.containers.container import Stored
from lowbitcli.containers.layouts import IDENTITY, is_cropped
from lowbitcli.containers.stacks import Stacking
from lowbitcli.errors import CheckpointError
from lowbitcli.plan import source as sources
from lowbitcli.plan.source import Source, SourceWeight
from lowbitcli.recipe import Layouts
from lowbitcli.tensors import DATA, FLOATING
from lowbitcli.verify import structure


def nibbles_of(target: Checkpoint) -> str:
    """Return how the manifest says that the source's NVFP4 was read."""
    said, _ = structure.manifest_of(target)
    told = said.recipe.get("nibbles", "") if said is not None else ""
    return told if told in ("low", "high") else ""


def raw_fp8_of(target: Checkpoint) -> bool:
    """Say whether the manifest says that FP8 without a scale was taken for numbers."""
    said, _ = structure.manifest_of(target)
    return said is not None and said.recipe.get("raw_fp8") is True


def layouts_of(target: Checkpoint) -> sources.Layouts | None:
    """Return how weights of the source lie, where the manifest says that a recipe said it: of a
    pipeline `component/name`."""
    said, _ = structure.manifest_of(target)
    told = said.recipe.get("layout") if said is not None else None
    try:
        if isinstance(told, Mapping):
            return _of_components({part: Layouts.read(one) for part, one in told.items()})
        return None if told is None else Layouts.read(told).of
    except CheckpointError:
        return None  # the source is then held against the output as if nothing had been said


def _of_components(said: Mapping[str, Layouts]) -> sources.Layouts:
    def of(name: str) -> Stacking | None:
        part, _, own = name.partition("/")
        return said[part].of(own) if part in said else None

    return of


def dequantized(target: Checkpoint, ours: Source) -> frozenset[str]:
    """Return the weights that the manifest says were dequantized by this run: they lie as the
    source's codes say, whatever is known of the model."""
    said, _ = structure.manifest_of(target)
    if said is None or said.made is None or "dequantize" not in said.recipe:
        return frozenset()
    return frozenset(ours.weights.keys() - said.made.kept.keys())


def lying_like(source: Source, other: Source, made_of_it: Collection[str] = ()) -> Source:
    """Return a checkpoint whose stacks and matrices that are not quantized, and of which nothing
    says how they lie, are seen to lie as `other` says of its quantized ones, where their shape
    allows it; those that were `made_of_it` do so in any case."""
    weights = dict(source.weights)
    for name, weight in source.weights.items():
        counterpart = other.weights.get(name)
        if counterpart is None or weight.scheme is not None:
            continue
        if (weight.plain is None and not weight.told) or name in made_of_it:
            weights[name] = _lying_like(weight, counterpart)
    return replace(source, weights=weights)


def _lying_like(weight: SourceWeight, other: SourceWeight) -> SourceWeight:
    part, layout = weight.reads[DATA], other.plain
    if other.scheme is None or layout is None or is_cropped(layout) or part.view is not None:
        return weight
    if part.spec.dtype not in FLOATING or layout.spec(part.spec).shape != other.shape:
        return weight  # of a layout that is its own inverse
    stored = None if layout == IDENTITY else Stored("", part.spec.dtype, layout)
    return weight._replace(
        shape=other.shape,
        reads={DATA: part._replace(stored=stored)},
        plain=layout,
        rows=other.rows,
        called=other.called,
    )
