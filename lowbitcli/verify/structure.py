"""What can be found wrong from headers, the index and the manifest, before any number."""

from collections.abc import Callable, Collection, Iterator, Mapping

from lowbitcli.checkpoint import around
from lowbitcli.checkpoint import manifest as manifests
from lowbitcli.checkpoint.manifest import Manifest
from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.errors import CheckpointError
from lowbitcli.plan.source import Source, SourceWeight
from lowbitcli.tensors import DATA, FLOATING, Shape, safe
from lowbitcli.verify.nouns import FAIL, WARN, Problem, Step

# Dtypes that are codes rather than numbers when a matrix is stored in them.
CODES = ("U8", "I8", "F4", "F6_E2M3", "F6_E3M2", "F8_E4M3", "F8_E5M2", "F8_E8M0")
INDEX_KEY = "total_size"


def declared(
    target: Source, checkpoint: Checkpoint, source: Source | None, kept: Mapping[str, str]
) -> Step:
    """Report parts that are missing, alone, of the wrong kind or not understood; `kept` are weights
    that the manifest says were left as the source had them.
    """
    problems = []
    for finding in target.findings:
        stored = checkpoint.tensors.get(finding.tensor)
        file = stored.file if stored is not None else ""
        problems.append(Problem(finding.kind, finding.tensor, finding.message, file))
    told = {_module(one.tensor) for one in target.findings if one.kind != "unknown"}
    problems += [
        Problem(
            "unknown",
            weight.name,
            f"a matrix stored as {weight.dtype}, and nothing says what its codes mean",
            weight.file,
        )
        for weight in target.weights.values()
        if _is_unexplained(weight)
        and _module(weight.name) not in told
        and not _is_in(weight, source)
        and weight.name not in kept
    ]
    return Step("tensors agree with what is declared", len(checkpoint.tensors), tuple(problems))


def _is_unexplained(weight: SourceWeight) -> bool:
    return (
        weight.scheme is None
        and weight.dtype in CODES
        and len(weight.shape) >= 2
        and weight.name.endswith(".weight")
    )


def _is_in(weight: SourceWeight, source: Source | None) -> bool:
    """Does the source hold the same tensor, of the same dtype, unexplained as well?"""
    other = source.weights.get(weight.name) if source is not None else None
    return other is not None and other.scheme is None and other.dtype == weight.dtype


def any_quantized(target: Source) -> Step:
    """Warn where no weight is quantized, so that nobody takes silence for a result."""
    count = sum(weight.scheme is not None for weight in target.weights.values())
    problems = ()
    if not count:
        message = "no weight is quantized: there is no scale and no code to check"
        problems = (Problem("nothing", "", message, severity=WARN),)
    return Step("quantized weights found", count, problems)


def index(checkpoint: Checkpoint) -> Step:
    """Hold the index against the shards' headers."""
    what = "the index names every tensor, and its total size"
    parts = checkpoint.components or {"": checkpoint}
    indexed = {part: one for part, one in parts.items() if one.index is not None}
    if not indexed:
        return Step(what, skipped="there is no index")
    problems = tuple(x for part, one in indexed.items() for x in _of_index(one, part))
    count = sum(len((one.index or {})["weight_map"]) for one in indexed.values())
    return Step(what, count, problems)


def _of_index(checkpoint: Checkpoint, part: str) -> Iterator[Problem]:
    """Yield what is wrong with the index of a checkpoint, or of the component `part` of one."""
    index, under = checkpoint.index or {}, f"{part}/" if part else ""
    for name, stored in checkpoint.tensors.items():
        if name not in index["weight_map"]:
            message = "in a shard but not in the index"
            yield Problem("index", under + name, message, under + stored.file)
    total = sum(stored.stop - stored.start for stored in checkpoint.tensors.values())
    said = (index.get("metadata") or {}).get(INDEX_KEY)
    where = f"the index of {safe(part)}" if part else "the index"
    if said is None:
        message = f"{where} has no {INDEX_KEY}; it would be {total}"
        yield Problem("index", "", message, severity=WARN)
    elif said != total:
        message = f"{where} says {INDEX_KEY} {safe(repr(said))}, the tensors have {total} bytes"
        yield Problem("index", "", message)


def manifest_of(checkpoint: Checkpoint) -> tuple[Manifest | None, tuple[Problem, ...]]:
    """Return the manifest and, where there is one that cannot be read, None and the problem."""
    try:
        return manifests.of(checkpoint), ()
    except CheckpointError as error:
        return None, (Problem("manifest", "", error.message),)


def manifest(checkpoint: Checkpoint, said: Manifest | None) -> Step:
    """Hold names, headers and digests against the manifest; no tensor is read."""
    what = "the manifest names every tensor, and its digests agree"
    if said is None:
        return Step(what, skipped="there is no manifest")
    problems = tuple(
        Problem("manifest", found.tensor, found.message, found.file)
        for found in manifests.check(checkpoint, said)
    )
    beside = tuple(
        Problem("manifest", "", f"{safe(x.file)}: {x.message}", x.file, FAIL if x.matters else WARN)
        for x in around.check(checkpoint, said.beside)
    )
    return Step(what, len(checkpoint.tensors), (*problems, *beside))


def hashes(
    checkpoint: Checkpoint,
    said: Manifest | None,
    tell: Callable[[str, int], None],
    names: Collection[str] | None = None,
) -> Step:
    """Hold the bytes of every tensor against the manifest's hashes, or of those that are named;
    without names this reads the whole output."""
    what = "stored bytes agree with the manifest's hashes"
    if said is None:
        return Step(what, skipped="there is no manifest")
    problems, count = [], 0
    for name in _hashed(checkpoint, said):
        if names is not None and name not in names:
            continue
        stored = checkpoint.tensors[name]
        tell(name, stored.stop - stored.start)
        try:
            found = manifests.check_tensor(checkpoint, said, name)
        except CheckpointError as error:
            problems.append(Problem("unreadable", name, error.message, stored.file))
            continue
        count += 1
        if found is not None:
            problems.append(Problem("manifest", name, found.message, found.file))
    return Step(what, count, tuple(problems))


def _hashed(checkpoint: Checkpoint, said: Manifest) -> Iterator[str]:
    for name, stored in checkpoint.tensors.items():
        proof = said.files.get(stored.file)
        if proof is not None and name in proof.tensors:
            yield name


def restored(said: Manifest | None, target: Source, source: Source | None) -> frozenset[str]:
    """Return the weights that were dequantized, where the source that is named does not hold the
    codes: it is the original, and they differ from it by what was rounded before."""
    if said is None or said.made is None or source is None or "dequantize" not in said.recipe:
        return frozenset()
    return frozenset(
        name
        for name, weight in target.weights.items()
        if weight.scheme is None
        and name not in said.made.kept
        and (other := source.weights.get(name)) is not None
        and other.scheme is None
        and other.dtype in FLOATING
    )


def told_of(names: frozenset[str]) -> str:
    """Return the note on weights that were dequantized from codes that the source does not hold."""
    if not names:
        return ""
    return (
        f"{len(names):,} were dequantized from a quantized checkpoint, and this is not that: "
        "their errors are measured, and nothing says how large they may be"
    )


def coverage(target: Source, source: Source | None, restored: frozenset[str] = frozenset()) -> Step:
    """Is every tensor of the source in the output, with its shape and dtype, and nothing else? A
    weight that was `restored` from codes has the dtype that was asked for."""
    what = "every tensor of the source is in the output, and nothing else"
    if source is None:
        return Step(what, skipped="no source was named")
    found = {_module(finding.tensor) for finding in target.findings}
    problems = []
    for name, weight in source.weights.items():
        if _module(name) in found:  # told of already
            continue
        other = target.weights.get(name)
        if other is None:
            problems.append(Problem("missing", name, "in the source, not in the output"))
        elif (shapes := _shapes(weight, other))[0] != shapes[1]:
            message = f"{list(shapes[0])} in the source, {list(shapes[1])} in the output"
            problems.append(Problem("shape", name, message, other.file))
        elif _dtype_differs(weight, other) and name not in restored:
            message = f"{weight.dtype} in the source, {other.dtype} in the output"
            problems.append(Problem("dtype", name, message, other.file))
    problems += [
        Problem("extra", name, "in the output, not in the source", weight.file)
        for name, weight in target.weights.items()
        if name not in source.weights and _module(name) not in found
    ]
    return Step(what, len(source.weights), tuple(problems))


def _shapes(weight: SourceWeight, other: SourceWeight) -> tuple[Shape, Shape]:
    """Return the shapes to compare: where neither is quantized as stored, whatever a recipe says of
    how the source's lies, but those of experts where the source has a stack of them."""
    parts = [one.reads[DATA] for one in (weight, other)]
    if weight.scheme is None and other.scheme is None and not any(part.view for part in parts):
        return parts[0].spec.shape, parts[1].spec.shape
    return weight.shape, other.shape


def _dtype_differs(weight: SourceWeight, other: SourceWeight) -> bool:
    if other.scheme is not None:
        return False
    if weight.scheme is not None:  # dequantized, to a dtype of the user's choice
        return other.dtype not in FLOATING
    return weight.dtype != other.dtype


def _module(name: str) -> str:
    """Return a tensor's name without its last component: what its parts have in common."""
    return name.rpartition(".")[0] or name


def schemes(target: Source) -> Mapping[str, tuple[int, int]]:
    """Return scheme (or `kept`) -> (number of tensors, bytes)."""
    counts: dict[str, tuple[int, int]] = {}
    for weight in target.weights.values():
        label = weight.scheme.name if weight.scheme is not None else "kept"
        number, size = counts.get(label, (0, 0))
        counts[label] = (number + 1, size + weight.nbytes)
    return dict(sorted(counts.items()))


def size_of(checkpoint: Checkpoint) -> int:
    """Return the bytes of the checkpoint's files."""
    return sum(header.size for header in checkpoint.headers.values())
