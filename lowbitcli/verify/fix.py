"""Write a checkpoint anew with what `verify --fix` can put right, each change told; never in place.

Tensors that do not change are copied and held against the manifest, where there is one, so that
what is damaged does not get a new proof. The output is staged, appears whole, and has a manifest of
its own, whose recipe names the weights whose scales were rounded again: what they stand for may
be half a step of an E4M3 scale off, and no code is known any more to be the nearest.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lowbitcli import __version__
from lowbitcli.checkpoint import around, manifest, shard_index
from lowbitcli.checkpoint.directory import CONFIG, QUANT_CONFIG
from lowbitcli.checkpoint.header import lay_out
from lowbitcli.checkpoint.made import Made
from lowbitcli.checkpoint.manifest import Manifest, TensorHash
from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.checkpoint.writer import StagedOutput
from lowbitcli.errors import CheckpointError, UnsupportedError
from lowbitcli.plan.consumers import Seen
from lowbitcli.plan.source import examine
from lowbitcli.tensors import safe
from lowbitcli.verify import mend_config, mend_scales
from lowbitcli.verify.mend_scales import RESCALED, Scales

COPY = 16 << 20
_PROOF = (
    *(manifest.DIGEST, manifest.HEADER, manifest.HASHES, manifest.SOURCE),
    *(manifest.PLAN, manifest.RECIPE, manifest.VERSION, manifest.MADE),
)
Tell = Callable[[str, int], None]


@dataclass(frozen=True)
class Fixed:
    """What was changed, in words, and what could not be put right; `output` None where nothing was
    to be changed, and nothing was written."""

    output: Path | None
    changes: tuple[str, ...]
    left: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Work:
    """A checkpoint and what it becomes."""

    checkpoint: Checkpoint
    scales: Scales
    files: Mapping[str, bytes]  # beside the weights
    said: Manifest | None
    tell: Tell | None


def fix(
    checkpoint: Checkpoint,
    output: str | os.PathLike[str],
    *,
    force: bool = False,
    tell: Tell | None = None,
) -> Fixed:
    """Write to `output` what `checkpoint` should be, where anything can be put right.

    Raises:
        CheckpointError: it cannot be read or understood, or is not what its manifest says.
        OutputError, UsageError, BusyError: see `StagedOutput`.
    """
    if checkpoint.components:
        raise UnsupportedError(
            "a diffusers pipeline is not fixed as a whole", hint="name one of its components"
        )
    seen = Seen(checkpoint, examine(checkpoint))
    scales = mend_scales.mended(seen)
    config, beside, told = mend_config.mended(seen)
    changes = (*scales.told, *told)
    if not changes:
        return Fixed(None, (), tuple(scales.left))
    files = {CONFIG: config, QUANT_CONFIG: beside}
    texts = {name: _text(one) for name, one in files.items() if one is not None}
    work = _Work(checkpoint, scales, texts, manifest.of(checkpoint), tell)
    target = Path(output)
    is_directory = checkpoint.is_directory
    with StagedOutput(
        target, directory=is_directory, force=force, sources=[checkpoint.path]
    ) as staged:
        _write(work, staged, changes)
        staged.publish()
    return Fixed(target, changes, tuple(scales.left))


def _text(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


def _write(work: _Work, staged: StagedOutput, changes: tuple[str, ...]) -> None:
    checkpoint, said = work.checkpoint, work.said
    recipe = {**(dict(said.recipe) if said is not None else {}), "fixed": list(changes)}
    if work.scales.rounded:
        recipe[RESCALED] = sorted(work.scales.rounded)
    digest = hashlib.sha256(json.dumps([*changes, __version__]).encode()).hexdigest()
    made = said.made if said is not None and said.made is not None else Made()
    made = Made({x: y for x, y in made.rounded.items() if x not in work.scales.rounded}, made.kept)
    hashes: dict[str, dict[str, str]] = {}
    headers: dict[str, bytes] = {}
    entries = {}
    for file, header in checkpoint.headers.items():
        specs = [work.scales.specs.get(name, one.spec) for name, one in header.entries.items()]
        metadata = {key: x for key, x in header.metadata.items() if key not in _PROOF}
        if not checkpoint.is_directory:
            metadata = manifest.reserve(
                len(specs),
                metadata,
                recipe=recipe,
                version=__version__,
                plan_digest=digest,
                made=made,
            )
        headers[file], entries[file] = lay_out(specs, metadata)
        name = file if checkpoint.is_directory else staged.target.name
        size = max([len(headers[file]), *(one.stop for one in entries[file].values())])
        staged.create(name, size)
        hashes[file] = {
            tensor: _copy(work, staged, name, tensor, entry.start)
            for tensor, entry in entries[file].items()
        }
        source = said.source if said is not None else ""
        first = headers[file]
        if not checkpoint.is_directory:
            first = manifest.seal(first, hashes[file], source)
        staged.write(name, 0, first)
    if not checkpoint.is_directory:
        return
    beside = _beside(work, staged, entries)
    text = manifest.build(
        hashes,
        recipe=recipe,
        version=__version__,
        plan_digest=digest,
        headers={file: manifest.header_digest(first) for file, first in headers.items()},
        source=said.source if said is not None else "",
        made=made,
        beside=beside,
    )
    staged.write_file(manifest.MANIFEST, text)


def _beside(work: _Work, staged: StagedOutput, entries: Mapping[str, Any]) -> dict[str, str]:
    """Write what stands beside the weights; return the digest of each file."""
    checkpoint = work.checkpoint
    made = dict(work.files)
    if checkpoint.index is not None and checkpoint.index_name is not None:
        made[checkpoint.index_name] = shard_index.index(entries, checkpoint.index)
    copied = [name for name in checkpoint.sidecars if name not in made]
    for name in copied:
        staged.copy_file(name, checkpoint.root / name)
    for name, text in made.items():
        staged.write_file(name, text)
    return {
        name: around.digest(staged.size(name), partial(staged.read, name))
        for name in (*copied, *made)
    }


def _copy(work: _Work, staged: StagedOutput, file: str, tensor: str, start: int) -> str:
    """Write a tensor, read slice by slice, and return its hash."""
    checkpoint = work.checkpoint
    stored = checkpoint.tensors[tensor]
    size, found = stored.stop - stored.start, TensorHash()
    if work.tell is not None:
        work.tell(tensor, size)
    raw = work.scales.raw.get(tensor)
    for begin in range(0, size, COPY):
        piece = checkpoint.read(tensor, begin, min(begin + COPY, size))
        found.update(piece)
        if raw is None:
            staged.write(file, start + begin, piece)
    _hold(work, stored.file, tensor, found.hexdigest())
    if raw is None:
        return found.hexdigest()
    staged.write(file, start, raw)
    found = TensorHash()
    found.update(raw)
    return found.hexdigest()


def _hold(work: _Work, file: str, tensor: str, found: str) -> None:
    """Refuse a tensor that is not what the manifest says: a new proof would hide it."""
    proof = work.said.files.get(file) if work.said is not None else None
    expected = proof.tensors.get(tensor, found) if proof is not None else found
    if found != expected:
        raise CheckpointError(
            f"{safe(file)}: {safe(tensor)} is not the bytes that were written: nothing is fixed",
            hint="write or fetch it again",
        )
