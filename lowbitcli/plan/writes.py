"""The tensors that hold a weight in the output: their names, dtypes and shapes."""

from functools import lru_cache

from lowbitcli.containers import Container
from lowbitcli.containers import container as container_of
from lowbitcli.containers.container import Stored
from lowbitcli.plan.nouns import Part
from lowbitcli.plan.source import SourceWeight
from lowbitcli.schemes import BY_NAME, Scheme
from lowbitcli.tensors import DATA, SCALE, Shape, TensorSpec


def writes_of(
    weight: SourceWeight, scheme: Scheme | None, dtype: str, container: Container
) -> dict[str, Part]:
    """Return the tensors that hold `weight` in the output, in the file where the source has it."""
    if scheme is None:
        spec = TensorSpec(weight.name, dtype, weight.shape)
        if weight.plain is None:
            return {DATA: Part(spec, weight.file)}
        stored = Stored("", dtype, weight.plain)
        return {DATA: Part(weight.plain.spec(spec), weight.file, stored)}
    file, stem = weight.file, container.stem(weight.name)
    if weight.scheme == scheme and scheme.scale_dtypes:
        dtype = weight.reads[SCALE].spec.dtype  # scales stay as they are, and so does their dtype
    dtype = scheme.scale_dtype(dtype)
    return {
        part: Part(TensorSpec(stem + stored.suffix, dtype, shape), file, stored)
        for part, stored, dtype, shape in _stored(scheme.name, container.name, weight.shape, dtype)
    }


@lru_cache(maxsize=4096)
def _stored(
    scheme: str, container: str, shape: Shape, scales: str
) -> list[tuple[str, Stored, str, Shape]]:
    """Return part, how it is stored, dtype and shape: a model has few different shapes. `scales`
    is the dtype of scales in schemes that have several."""
    bound = container_of(container).bindings[scheme]
    specs = BY_NAME[scheme].specs(shape)
    several = bool(BY_NAME[scheme].scale_dtypes)
    return [
        (
            part,
            stored,
            scales if several and part == SCALE else stored.dtype,
            stored.layout.spec(spec).shape,
        )
        for part, spec in specs.items()
        for stored in (bound[part].at(spec.shape),)
    ]
