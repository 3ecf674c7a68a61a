"""Find the weights that stored parts belong to, by suffix, and say what is missing, alone or of
the wrong kind."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from lowbitcli.containers.container import Finding, Listing, QuantizedWeight, Stored
from lowbitcli.containers.layouts import IDENTITY, VECTOR1, Layout
from lowbitcli.errors import LowbitError
from lowbitcli.schemes import Scheme
from lowbitcli.tensors import DATA, Shape, TensorSpec


def parts_of(stem: str, bound: Mapping[str, Stored]) -> dict[str, str]:
    """Return part -> tensor name for the module `stem`."""
    return {part: stem + stored.suffix for part, stored in bound.items()}


def weight_from(
    stem: str,
    scheme: Scheme,
    bound: Mapping[str, Stored],
    listing: Listing,
    dtype_of: Callable[[str], str],
    shape: Shape | None = None,
    name: str = "",
    plain: Layout | None = None,
) -> tuple[QuantizedWeight | None, list[Finding]]:
    """Build the quantized weight of module `stem` from its parts, or say why that cannot be
    done.

    `shape` and `name` are the weight's, where they do not follow from its data and the stem;
    `plain` is how it lies when it is not quantized.
    """
    names = parts_of(stem, bound)
    data_name = names[DATA]
    findings = [
        Finding("missing", data_name, f"{scheme.name} needs the tensor {name}, which is not there")
        for name in names.values()
        if name not in listing.tensors
    ]
    if findings:
        return None, findings
    if shape is None:
        shape = scheme.shape_of(listing.tensors[data_name].shape)
    try:
        specs = scheme.specs(shape)
    except LowbitError as error:
        return None, [Finding("mismatch", data_name, f"declared {scheme.name}: {error.message}")]
    if any(stored.layout.fitted is not None for stored in bound.values()):
        bound = {part: stored.at(specs[part].shape) for part, stored in bound.items()}
    flat = {}
    for part, stored in bound.items():
        want = stored.layout.spec(specs[part])
        have = listing.tensors[names[part]]
        problem = _mismatch(stored, want, have)
        if problem:
            findings.append(Finding("mismatch", have.name, f"{scheme.name} of {stem}: {problem}"))
        elif have.shape != want.shape and stored.layout is IDENTITY:
            flat[part] = replace(stored, layout=VECTOR1)  # a scalar is decoded to one
    if findings:
        return None, findings
    bound = {**bound, **flat} if flat else bound
    name = name or stem + ".weight"
    return QuantizedWeight(name, scheme, shape, dtype_of(name), names, bound, plain), []


def _mismatch(stored: Stored, want: TensorSpec, have: TensorSpec) -> str:
    if have.dtype != stored.dtype and have.dtype not in stored.reads:
        return f"{stored.dtype} is needed, {have.dtype} is stored"
    if have.shape != want.shape and not _same_but_for_ones(have.shape, want.shape):
        return f"the shape {list(want.shape)} is needed, {list(have.shape)} is stored"
    return ""


def _same_but_for_ones(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """A scalar may be stored as [] or [1]: consumers take both."""
    return a in ((), (1,)) and b in ((), (1,))


def orphans(listing: Listing, suffixes: Iterable[str], taken: set[str]) -> list[Finding]:
    """Return a finding for each tensor whose name says that it is a part of a weight which is
    not there."""
    endings = tuple(sorted(set(suffixes)))
    return [
        Finding("orphan", name, "a part of a quantized weight, but the weight is not there")
        for name in listing.tensors
        if name not in taken and name.endswith(endings)
    ]
