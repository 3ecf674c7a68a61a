"""Stacks of experts taken apart: one weight for each expert's matrix, gate and up as two, where
the readers of a container want them one by one.

The bytes stay where they are: each weight is a view of the stack, its tensor, the expert, and the
rows; what a part of the view reads is a span of the tensor's bytes:

    rows that follow each other    these rows
    every other row, or columns    the matrix of that expert
    a scale for each matrix        all of them
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from lowbitcli.containers.layouts import IDENTITY, SIXTEENS, TRANSPOSED
from lowbitcli.containers.stacks import BIASES, Expert, experts_of
from lowbitcli.plan.nouns import Part
from lowbitcli.plan.source import Source, SourceWeight
from lowbitcli.schemes import Scheme
from lowbitcli.tensors import DATA, FLOATING, SCALE, Shape, TensorSpec


def experts(weight: SourceWeight) -> tuple[SourceWeight, ...]:
    """Return the experts of a stack as weights of their own; none where it cannot be taken apart:
    it is no stack, no reader has names for them, or rows that share a scale are not one's own."""
    if weight.plain is None or len(weight.shape) != 3:
        return ()
    found = experts_of(weight.name, weight.shape, weight.rows, weight.called)
    if not all(_is_apart(weight.scheme, expert) for expert in found):
        return ()
    return tuple(_expert(weight, expert) for expert in found)


def _is_apart(scheme: Scheme | None, expert: Expert) -> bool:
    """Do the scales of a quantized stack belong to this expert's rows alone?"""
    high = 1 if scheme is None else scheme.block[0]
    if high is None or high == 1:
        return True
    return expert.view.step == 1 and expert.view.first % high == 0


def _expert(weight: SourceWeight, expert: Expert) -> SourceWeight:
    shape = (expert.rows, weight.shape[-1])
    reads = {
        name: _seen(part, _height(weight.scheme, name), weight.shape, expert)
        for name, part in weight.reads.items()
    }
    return SourceWeight(expert.name, shape, weight.dtype, weight.scheme, reads)


def _height(scheme: Scheme | None, part: str) -> int | None:
    """Return how many rows of the weight a row of the part is for, None for all of a matrix."""
    if part == DATA:
        return 1
    return scheme.block[0] if part == SCALE and scheme is not None else None


def _seen(part: Part, high: int | None, stack: Shape, expert: Expert) -> Part:
    """Return a part of a stack as that of one expert."""
    if high is None:
        return part._replace(view=expert.view)
    matrix = part.spec.nbytes // stack[0]
    start = expert.view.matrix * matrix
    layout = IDENTITY if part.stored is None else part.stored.layout
    if layout == TRANSPOSED or expert.view.step > 1:
        return part._replace(view=expert.view, span=(start, start + matrix))
    if layout not in (IDENTITY, SIXTEENS):
        raise ValueError(f"a stack is not stored as {layout.name}")
    row = matrix // -(-stack[1] // high)
    first = start + expert.view.first // high * row
    return part._replace(view=expert.view, span=(first, first + -(-expert.rows // high) * row))


def biases(weight: SourceWeight, weights: Mapping[str, SourceWeight]) -> dict[str, SourceWeight]:
    """Return the tensor that holds the biases of a stack, by name, if there is one that fits."""
    stem = weight.name.removesuffix(".weight")
    found = (weights.get(stem + ending) for ending in BIASES)
    return {
        one.name: one
        for one in found
        if one is not None and one.shape == weight.shape[:2] and one.dtype in FLOATING
    }


def biases_of_experts(bias: SourceWeight, weight: SourceWeight) -> tuple[SourceWeight, ...]:
    """Return the biases of a stack, one for each of its experts' matrices."""
    size = TensorSpec("", bias.dtype, (1,)).nbytes
    return tuple(
        _bias(bias, expert, size)
        for expert in experts_of(weight.name, weight.shape, weight.rows, weight.called)
    )


def _bias(bias: SourceWeight, expert: Expert, size: int) -> SourceWeight:
    view, wide = expert.view, bias.shape[1]
    first = view.matrix * wide
    span = (first, first + wide)
    if view.step == 1:
        span = (first + view.first, first + view.first + expert.rows)
    read = bias.reads[DATA]._replace(view=view, span=(span[0] * size, span[1] * size))
    name = f"{expert.name.removesuffix('.weight')}.bias"
    return SourceWeight(name, (expert.rows,), bias.dtype, None, {DATA: read})


def modules_of(names: Iterable[str], weights: Mapping[str, SourceWeight]) -> frozenset[str]:
    """Return the names with those of single experts replaced by the stacks beside theirs: readers
    take all experts of a layer for one thing."""
    found: set[str] = set()
    stacks = [name for name, weight in weights.items() if weight.plain is not None]
    for name in names:
        if name in weights:
            found.add(name)
            continue
        module = f"{name.rsplit('.', 3)[0]}."
        found.update(stack for stack in stacks if stack.startswith(module))
    return frozenset(found)


def aligned(source: Source, names: Iterable[str]) -> Source:
    """Return a source whose stacks are taken apart where `names`, those of another checkpoint, are
    of single experts."""
    wanted = set(names)
    weights = dict(source.weights)
    for name, weight in source.weights.items():
        if weight.plain is None or name in wanted:
            continue
        apart = experts(weight)
        if wanted.isdisjoint(one.name for one in apart):
            continue
        del weights[name]
        weights.update((one.name, one) for one in apart)
        for known, bias in biases(weight, source.weights).items():
            if known not in wanted:
                del weights[known]
                weights.update((one.name, one) for one in biases_of_experts(bias, weight))
    return replace(source, weights=dict(sorted(weights.items())))
