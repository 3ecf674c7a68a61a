"""What was written, so that it can be proved later: a hash per tensor, a digest per file.

    tensor   xxh3_128 of its bytes, 32 hexadecimal digits
    file     sha256 over (u64 LE length of the name, name in UTF-8, 16 bytes of hash), by name:
             a tree, so that a digest of 100 GB does not have to be computed in sequence
    header   sha256 of the file's first bytes, length and JSON

A directory has it in `lowbit.json`. A single file has it in its own `__metadata__`, in values whose
width is known before the hashes are, so that the header is laid out first and filled in last:

| key | value |
|---|---|
| `lowbit.digest` | the file's digest |
| `lowbit.header` | that of the header, with zeros in this value and in the two beside it |
| `lowbit.xxh3` | the hashes of all tensors, names in order, one after the other |
| `lowbit.source` | the digest of the source's tensors that were read, over all of its files |
| `lowbit.made` | what became of the weights: names by rule where rounded, by reason where kept |

`lowbit.json` also has the sha256 of every file that was written beside the weights (`beside`), and
its own (`digest`: of the document without it, keys sorted, no spaces). Neither says when, where, or
with which libraries it was written: equal plans give equal bytes.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from lowbitcli.checkpoint.header import Header
from lowbitcli.checkpoint.made import Made, made_from
from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.errors import CheckpointError
from lowbitcli.tensors import safe

MANIFEST = "lowbit.json"
FORMAT = 1
DIGEST, HEADER, HASHES = "lowbit.digest", "lowbit.header", "lowbit.xxh3"
PLAN, RECIPE, VERSION = "lowbit.plan", "lowbit.recipe", "lowbit.version"
SOURCE, MADE = "lowbit.source", "lowbit.made"
HASH_DIGITS, DIGEST_DIGITS = 32, 64

_SLICE = 8 << 20
_PROOF = frozenset((DIGEST, HEADER, HASHES, SOURCE))


class TensorHash:
    """The hash of a tensor whose bytes come piece by piece, in order."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, data: bytes | bytearray | memoryview) -> None:
        self._state.update(data)

    def hexdigest(self) -> str:
        return self._state.hexdigest()


@dataclass(frozen=True)
class FileProof:
    """What a manifest says of one file; `header` is "" where it does not say."""

    digest: str
    tensors: Mapping[str, str]
    header: str = ""


@dataclass(frozen=True)
class Manifest:
    """What was written (file -> proof), by which version and recipe, of which plan and source;
    `source` is "", and `made` None, where it does not say. `beside` has the sha256 of other files;
    `intact` is whether the manifest is as it was written.
    """

    files: Mapping[str, FileProof]
    recipe: Mapping[str, Any] = field(default_factory=dict)
    version: str = ""
    plan_digest: str = ""
    source: str = ""
    made: Made | None = None
    beside: Mapping[str, str] = field(default_factory=dict)
    intact: bool = True


@dataclass(frozen=True)
class Difference:
    """Where a checkpoint is not what its manifest says; `tensor` is "" for a whole file."""

    file: str
    tensor: str
    message: str


def digest_of(parts: Mapping[str, str]) -> str:
    """Return the digest of a file from its tensors' hashes (name -> hexadecimal)."""
    digest = hashlib.sha256()
    for name in sorted(parts):
        encoded = name.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded + bytes.fromhex(parts[name]))
    return digest.hexdigest()


def header_digest(first: bytes) -> str:
    """Return the digest of a file's first bytes, length and JSON, as `lay_out` returns them."""
    return hashlib.sha256(first).hexdigest()


def build(
    files: Mapping[str, Mapping[str, str]],
    *,
    recipe: Mapping[str, Any],
    version: str,
    plan_digest: str,
    headers: Mapping[str, str] | None = None,
    source: str = "",
    made: Made | None = None,
    beside: Mapping[str, str] | None = None,
) -> bytes:
    """Return `lowbit.json` for files (name -> tensor -> hash), the digests of their headers, that
    of the source and those of files `beside` the weights, and what became of the weights."""
    document: dict[str, Any] = {
        "format": FORMAT,
        "version": version,
        "plan": plan_digest,
        "source": source,
        "recipe": dict(recipe),
        "made": (made or Made()).document(),
        "files": {
            file: {
                "digest": digest_of(tensors),
                "header": (headers or {}).get(file, ""),
                "tensors": dict(tensors),
            }
            for file, tensors in files.items()
        },
        "beside": dict(beside or {}),
    }
    document["digest"] = _own_digest(document)
    return (json.dumps(document, ensure_ascii=False, sort_keys=True, indent=1) + "\n").encode()


def _own_digest(document: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in document.items() if key != "digest"}
    text = json.dumps(rest, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def reserve(
    count: int,
    metadata: Mapping[str, str],
    *,
    recipe: Mapping[str, Any],
    version: str,
    plan_digest: str,
    made: Made | None = None,
) -> dict[str, str]:
    """Return header metadata for a single file of `count` tensors, with room for its proof."""
    return {
        **metadata,
        DIGEST: "0" * DIGEST_DIGITS,
        HEADER: "0" * DIGEST_DIGITS,
        HASHES: "0" * (HASH_DIGITS * count),
        SOURCE: "0" * DIGEST_DIGITS,
        PLAN: plan_digest,
        RECIPE: json.dumps(dict(recipe), sort_keys=True, separators=(",", ":")),
        VERSION: version,
        MADE: json.dumps((made or Made()).document(), sort_keys=True, separators=(",", ":")),
    }


def seal(first: bytes, hashes: Mapping[str, str], source: str = "") -> bytes:
    """Return a file's first bytes, laid out with `reserve`d metadata, with the proof filled in.

    Raises:
        ValueError: there is no room for it, or not for that many tensors.
    """
    hashed = "".join(hashes[name] for name in sorted(hashes))
    if source:
        first = _filled(first, SOURCE, source)
    own = header_digest(first)
    for key, value in ((DIGEST, digest_of(hashes)), (HEADER, own), (HASHES, hashed)):
        first = _filled(first, key, value)
    return first


def _filled(first: bytes, key: str, value: str) -> bytes:
    filled = _fill(first, key, value)
    if len(filled) != len(first) or filled.count(value.encode()) == 0:
        raise ValueError(f"no room for {key} of {len(value)} characters")
    return filled


def of(checkpoint: Checkpoint) -> Manifest | None:
    """Return the manifest of a checkpoint, None where it has none.

    Raises:
        CheckpointError: what it has is no manifest.
    """
    if checkpoint.manifest is not None:
        return read(checkpoint.manifest, safe(str(checkpoint.root / MANIFEST)))
    file = checkpoint.files[0]
    if len(checkpoint.files) != 1 or not _PROOF.intersection(checkpoint.metadata[file]):
        return None
    return _from_header(checkpoint.headers[file], file, safe(str(checkpoint.root / file)))


def read(document: Mapping[str, Any], where: str) -> Manifest:
    """Return the manifest in the parsed `lowbit.json`.

    Raises:
        CheckpointError: it is none, or of a later format.
    """
    if document.get("format") != FORMAT:
        raise CheckpointError(
            f"{where}: manifest format {safe(repr(document.get('format')))}, expected {FORMAT}",
            hint="written by a later lowbit?",
        )
    files, recipe = document.get("files"), document.get("recipe", {})
    beside = document.get("beside", {})
    texts = [document.get(key, "") for key in ("version", "plan", "source")]
    if (
        not isinstance(files, dict)
        or not isinstance(recipe, dict)
        or not isinstance(beside, dict)
        or not all(isinstance(text, str) for text in texts)
    ):
        raise CheckpointError(f"{where}: not a manifest")
    proofs = {file: _proof(x, file, where) for file, x in files.items()}
    intact = document.get("digest") == _own_digest(document)
    said = made_from(document.get("made"), where)
    return Manifest(proofs, recipe, *texts, made=said, beside=beside, intact=intact)


def check(checkpoint: Checkpoint, manifest: Manifest) -> Iterator[Difference]:
    """Yield where names, headers and digests differ from the manifest; reads no tensor."""
    if not manifest.intact:
        yield Difference(MANIFEST, "", "it is not as it was written: its own digest differs")
    for file in sorted({*manifest.files, *checkpoint.files}):
        proof, header = manifest.files.get(file), checkpoint.headers.get(file)
        if proof is None or header is None:
            there = "in the manifest" if header is None else "in the checkpoint"
            yield Difference(file, "", f"only {there}")
            continue
        if digest_of(proof.tensors) != proof.digest:
            yield Difference(file, "", "the manifest's hashes do not give its digest")
        if proof.header and header_digest(_unsealed(header)) != proof.header:
            yield Difference(file, "", "the header is not the one that was written")
        for name in sorted({*proof.tensors, *header.entries}):
            if name not in header.entries:
                yield Difference(file, name, "only in the manifest")
            elif name not in proof.tensors:
                yield Difference(file, name, "not in the manifest")


def hash_of(checkpoint: Checkpoint, name: str) -> str:
    """Return the hash of a stored tensor, read slice by slice.

    Raises:
        CheckpointError: it cannot be read.
    """
    stored = checkpoint.tensors[name]
    size, found = stored.stop - stored.start, TensorHash()
    for start in range(0, size, _SLICE):
        found.update(checkpoint.read(name, start, min(start + _SLICE, size)))
    return found.hexdigest()


def check_tensor(checkpoint: Checkpoint, manifest: Manifest, name: str) -> Difference | None:
    """Return how a tensor's bytes differ from the manifest, None where they do not.

    Raises:
        CheckpointError: they cannot be read.
    """
    file = checkpoint.tensors[name].file
    expected = manifest.files[file].tensors[name]
    found = hash_of(checkpoint, name)
    if found == expected:
        return None
    return Difference(file, name, f"expected xxh3 {expected}, found {found}")


def _proof(found: Any, file: str, where: str) -> FileProof:
    at = f'{where}: file "{safe(file)}"'
    if not isinstance(found, dict) or not isinstance(found.get("tensors"), dict):
        raise CheckpointError(f"{at}: no tensors")
    header = found.get("header", "")
    if not _is_hex(found.get("digest"), DIGEST_DIGITS):
        raise CheckpointError(f"{at}: no digest")
    if header != "" and not _is_hex(header, DIGEST_DIGITS):
        raise CheckpointError(f"{at}: no digest of the header")
    for name, value in found["tensors"].items():
        if not _is_hex(value, HASH_DIGITS):
            raise CheckpointError(f'{at}: no hash of tensor "{safe(name)}"')
    return FileProof(found["digest"], found["tensors"], header)


def _from_header(header: Header, file: str, where: str) -> Manifest:
    found, names = header.metadata, sorted(header.entries)
    hashes = found.get(HASHES)
    if not isinstance(hashes, str) or not _is_hex(hashes, HASH_DIGITS * len(names)):
        raise CheckpointError(f"{where}: {HASHES} does not hold {len(names)} hashes")
    if not all(_is_hex(found.get(key), DIGEST_DIGITS) for key in (DIGEST, HEADER)):
        raise CheckpointError(f"{where}: {DIGEST} or {HEADER} is missing or no digest")
    tensors = {
        name: hashes[i * HASH_DIGITS : (i + 1) * HASH_DIGITS] for i, name in enumerate(names)
    }
    recipe = _object(found, RECIPE, where) or {}
    proof = FileProof(found[DIGEST], tensors, found[HEADER])
    texts = [found.get(key, "") for key in (VERSION, PLAN, SOURCE)]
    return Manifest(
        {file: proof}, recipe, *texts, made=made_from(_object(found, MADE, where), where)
    )


def _object(metadata: Mapping[str, str], key: str, where: str) -> dict[str, Any] | None:
    """Return the JSON object under a key of a header's metadata, None where it is not there."""
    if key not in metadata:
        return None
    try:
        found = json.loads(metadata[key])
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: {key} is not JSON") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{where}: {key} is not an object")
    return found


def _unsealed(header: Header) -> bytes:
    """Return a header's first bytes as they were before the proof was filled in."""
    first = len(header.raw).to_bytes(8, "little") + header.raw
    for key in (DIGEST, HEADER, HASHES):
        if key in header.metadata:
            first = _fill(first, key, "0" * len(header.metadata[key]))
    return first


def _fill(first: bytes, key: str, value: str) -> bytes:
    """Replace the hexadecimal value of a metadata key; `__metadata__` is first in our headers."""
    pattern = re.compile(b'("%s":")[0-9a-f]*(?=")' % re.escape(key.encode()))
    return pattern.sub(lambda match: match[1] + value.encode(), first, count=1)


def _is_hex(value: Any, digits: int) -> bool:
    if not isinstance(value, str) or len(value) != digits:
        return False
    return re.fullmatch("[0-9a-f]*", value) is not None
