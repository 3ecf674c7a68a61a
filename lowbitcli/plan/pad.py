"""Matrices whose last block of columns is incomplete: in a container that pads they are seen with
columns of zeros up to a whole block, and lie without them where they are not quantized."""

from dataclasses import replace

from lowbitcli.containers import Container
from lowbitcli.containers.container import Stored
from lowbitcli.containers.layouts import cropped, is_cropped
from lowbitcli.plan.source import Source, SourceWeight
from lowbitcli.schemes import Scheme
from lowbitcli.tensors import DATA, FLOATING, Shape


def can_pad(weight: SourceWeight, scheme: Scheme, container: Container) -> bool:
    """Can this matrix be quantized once its columns are padded, where its readers know padding?"""
    if not container.pads or weight.scheme is not None or weight.plain is not None:
        return False
    return len(weight.shape) == 2 and weight.dtype in FLOATING and scheme.block[1] is not None


def padded(weight: SourceWeight, scheme: Scheme | None) -> SourceWeight:
    """Return a matrix with whole blocks of columns; as it is where it has them."""
    block = scheme.block[1] if scheme is not None and not scheme.ragged else None
    if block is None or weight.scheme is not None or weight.shape[-1] % block == 0:
        return weight
    return _widened(weight, (*weight.shape[:-1], -(-weight.shape[-1] // block) * block))


def _widened(weight: SourceWeight, shape: Shape) -> SourceWeight:
    layout = cropped(weight.shape[-1], shape[-1])
    read = weight.reads[DATA]
    read = read._replace(stored=Stored("", read.spec.dtype, layout))
    return weight._replace(shape=shape, reads={DATA: read}, plain=layout)


def widened_like(source: Source, other: Source) -> Source:
    """Return a checkpoint whose plain matrices are seen as wide as their counterparts in another,
    where those are padded."""
    weights = dict(source.weights)
    for name, weight in source.weights.items():
        counterpart = other.weights.get(name)
        if counterpart is None or not is_cropped(counterpart.plain):
            continue
        if weight.scheme is not None or weight.plain is not None or weight.dtype not in FLOATING:
            continue
        if counterpart.plain == cropped(weight.shape[-1], counterpart.shape[-1]):
            weights[name] = _widened(weight, counterpart.shape)
    return replace(source, weights=weights)
