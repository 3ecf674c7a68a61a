"""The header of a safetensors file: read one and distrust it, lay one out.

    u64 little endian N | N bytes of JSON | tensors, end to end
    N <= 100,000,000        the JSON starts with `{` and may end in spaces
    {"__metadata__": {str: str}, name: {"dtype": str, "shape": [int], "data_offsets": [start,
    stop]},
     ...}

Offsets count from the end of the JSON, and the tensors cover what follows exactly: no hole, no
overlap, the last stop is the end of the file. Source: safetensors 0.8, `safetensors/src/tensor.rs`.
Refused beyond that: a key twice, and a shape whose bits overflow 63 bits even where a dimension of
0 makes it empty.
"""

import json
import os
import stat
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from json.encoder import encode_basestring
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from lowbitcli.checkpoint import strict_json
from lowbitcli.checkpoint.unread import unread
from lowbitcli.errors import CheckpointError, UnsupportedError
from lowbitcli.tensors import DTYPES, Shape, TensorSpec, nbytes, safe

MAX_HEADER = 100_000_000
METADATA = "__metadata__"

_WIDEST_FIRST = {dtype: -bits for dtype, (bits, _) in DTYPES.items()}
_INTEGER = {int}  # and not bool, which is an int
_FIELDS = {"dtype", "shape", "data_offsets"}
_ALIGNMENT = 8
_LENGTH = 8  # bytes of the u64 in front
_INCOMPLETE = "incomplete download? compare its size with the one its source gives"
_BROKEN = "the file is damaged, or was written by a broken tool"


class Entry(NamedTuple):
    """A tensor of a file and where its bytes are; offsets are absolute."""

    spec: TensorSpec
    start: int
    stop: int


@dataclass(frozen=True)
class Header:
    """What a header says: entries in the order of their bytes, the file's size, the raw JSON."""

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]
    size: int
    raw: bytes


def read(path: Path) -> Header:
    """Return the header of the file at `path`.

    Raises:
        CheckpointError: no regular file, unreadable, or not a flawless safetensors file.
        OutputError: there is no permission to read it.
    """
    where = safe(str(path))
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise unread(where, error, "cannot be opened") from error
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"{where}: not a regular file")
        return read_from(fd, found.st_size, where)
    finally:
        os.close(fd)


def read_from(fd: int, size: int, where: str) -> Header:
    """Return the header of an open file of `size` bytes; `where` names it in messages.

    Raises:
        CheckpointError: see `read`.
    """
    length = json_length(_pread(fd, min(_LENGTH, size), 0, where), size, where)
    return parse(_pread(fd, length, _LENGTH, where), size, where)


def json_length(first: bytes, size: int, where: str) -> int:
    """Return the length of the JSON from the first 8 bytes of a file of `size` bytes.

    Raises:
        CheckpointError: the length is larger than allowed or than the file.
    """
    if len(first) < _LENGTH:
        raise CheckpointError(
            f"{where}: {size} bytes; a safetensors file has at least 8", hint=_INCOMPLETE
        )
    length = int.from_bytes(first, "little")
    if length > MAX_HEADER:
        raise CheckpointError(
            f"{where}: the header would be {length} bytes; at most {MAX_HEADER} are allowed",
            hint="not a safetensors file, or a damaged one",
        )
    if length > size - _LENGTH:
        raise CheckpointError(
            f"{where}: expected a header of {length} bytes, found {size - _LENGTH}",
            hint=_INCOMPLETE,
        )
    return length


def parse(raw_json: bytes, file_size: int, where: str) -> Header:
    """Return what the JSON of a header says, checked against the size of the file that holds it.

    Raises:
        CheckpointError: anything is not as the module's first lines say.
    """
    if raw_json[:1] != b"{":
        raise CheckpointError(f"{where}: the header does not start with {{", hint=_BROKEN)
    document = strict_json.parse_exact(raw_json, where)
    metadata = _metadata(document.pop(METADATA, None), where)
    base = _LENGTH + len(raw_json)
    entries = [_entry(name, value, base, where) for name, value in document.items()]
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    _check_cover(entries, base, file_size, where)
    return Header({entry.spec.name: entry for entry in entries}, metadata, file_size, raw_json)


def lay_out(
    specs: Iterable[TensorSpec], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, Entry]]:
    """Return the first bytes of a file that holds `specs` (length, JSON), and where each goes.

    Wide dtypes come first, then names in order, so that every tensor starts at a multiple of its
    element's size; equal arguments give equal bytes.

    Raises:
        ValueError: two tensors share a name, or one is not a whole number of bytes.
        UnsupportedError: the header would be longer than readers take.
    """
    ordered = sorted(specs, key=attrgetter("name"))
    ordered.sort(key=lambda spec: _WIDEST_FIRST[spec[1]])
    items = [f'"{METADATA}":{_json(dict(sorted(metadata.items())))}'] if metadata else []
    ends = [0]
    stop = 0
    for name, dtype, shape in ordered:
        size, kind = _kind(dtype, shape)
        start, stop = stop, stop + size
        ends.append(stop)
        items.append(f"{encode_basestring(name)}:{kind}[{start},{stop}]}}")
    text = f"{{{','.join(items)}}}".encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > MAX_HEADER:
        raise UnsupportedError(
            f"a header of {len(text)} bytes; readers take at most {MAX_HEADER}",
            hint="write more, smaller shards",
        )
    base = _LENGTH + len(text)
    starts = [base + end for end in ends]
    places = map(Entry, ordered, starts, starts[1:])
    entries = {place[0][0]: place for place in places}
    if len(entries) != len(ordered) or METADATA in entries:
        names = Counter(spec.name for spec in ordered)
        name = next((name for name, count in names.items() if count > 1), METADATA)
        raise ValueError(f'tensor "{safe(name)}" twice in one file')
    return len(text).to_bytes(_LENGTH, "little") + text, entries


_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@lru_cache(maxsize=4096)  # a model has few different shapes
def _kind(dtype: str, shape: Shape) -> tuple[int, str]:
    """Return the bytes of a tensor, and its JSON up to the offsets."""
    said = _json({"dtype": dtype, "shape": list(shape), "data_offsets": []})
    return nbytes(dtype, shape), said.removesuffix("[]}")


def _pread(fd: int, count: int, offset: int, where: str) -> bytes:
    pieces = []
    try:
        while count:
            piece = os.pread(fd, count, offset)
            if not piece:
                raise CheckpointError(f"{where}: changed while being read: {count} bytes are gone")
            pieces.append(piece)
            count -= len(piece)
            offset += len(piece)
    except OSError as error:
        raise unread(where, error, "cannot be read") from error
    return b"".join(pieces)


def _metadata(found: Any, where: str) -> dict[str, str]:
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise CheckpointError(f"{where}: {METADATA} is not an object", hint=_BROKEN)
    for key, value in found.items():
        if not isinstance(value, str):
            raise CheckpointError(
                f'{where}: {METADATA} "{_short(key)}" is not a string', hint=_BROKEN
            )
        _refuse_surrogates(key, where)
        _refuse_surrogates(value, where)
    return found


def _entry(name: str, found: Any, base: int, where: str) -> Entry:
    if not name.isascii():
        _refuse_surrogates(name, where)
    if not isinstance(found, dict):
        raise CheckpointError(f"{_at(name, where)} is not an object", hint=_BROKEN)
    if found.keys() != _FIELDS:
        _check_fields(found, _at(name, where))
    dtype, shape, offsets = found.get("dtype"), found.get("shape"), found.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{_at(name, where)}: unknown dtype {_shown(dtype)}", hint=_BROKEN)
    if not isinstance(shape, list) or not _INTEGER.issuperset(map(type, shape)):
        raise CheckpointError(
            f"{_at(name, where)}: shape is not a list of integers from 0", hint=_BROKEN
        )
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or type(offsets[0]) is not int
        or type(offsets[1]) is not int
    ):
        raise CheckpointError(
            f"{_at(name, where)}: data_offsets is not two integers from 0", hint=_BROKEN
        )
    try:
        size, dims = _size(dtype, tuple(shape))
    except ValueError as error:
        raise CheckpointError(f"{_at(name, where)}: {error}", hint=_BROKEN) from error
    start, stop = offsets
    if stop - start != size:
        raise CheckpointError(
            f"{_at(name, where)}: expected {size} bytes for {dtype} {_shown(shape)}, "
            f"found data_offsets {_shown(offsets)}",
            hint=_BROKEN,
        )
    return Entry(TensorSpec(name, dtype, dims), base + start, base + stop)


def _at(name: str, where: str) -> str:
    return f'{where}: tensor "{_short(name)}"'


def _check_fields(found: dict[str, Any], at: str) -> None:
    """Refuse a tensor with a field missing; unknown ones are ignored, as the library does."""
    for field in ("dtype", "shape", "data_offsets"):
        if field not in found:
            raise CheckpointError(f"{at}: no {field}", hint=_BROKEN)
    strict_json.refuse_depth(found, at)
    _refuse_surrogates(json.dumps(found, ensure_ascii=False), at)


@lru_cache(maxsize=4096)
def _size(dtype: str, shape: Shape) -> tuple[int, Shape]:
    """Return the bytes of a tensor, and the one copy of its shape that all share; raise
    ValueError where there is no such size."""
    bits = DTYPES[dtype][0]
    whole = bits  # as if no dimension were 0
    for length in shape:
        whole *= length or 1
        # Stop here: multiplying on would make numbers of as many digits as the header has bytes.
        if whole >= 1 << 63:
            raise ValueError("shape overflows 63 bits")
    if 0 in shape:
        return 0, shape
    if whole % 8:
        raise ValueError(f"{dtype} {_shown(list(shape))} is not a whole number of bytes")
    return whole // 8, shape


def _check_cover(entries: list[Entry], base: int, size: int, where: str) -> None:
    end = base
    for entry in entries:
        if entry.start != end:
            problem = "overlaps the one before it" if entry.start < end else "leaves a hole"
            raise CheckpointError(
                f'{where}: tensor "{_short(entry.spec.name)}" {problem}: '
                f"expected to start at byte {end}, found {entry.start}",
                hint=_BROKEN,
            )
        end = entry.stop
    if size != end:
        hint = _INCOMPLETE if size < end else _BROKEN
        raise CheckpointError(f"{where}: expected {end} bytes, found {size}", hint=hint)


def _refuse_surrogates(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f'{where}: "{_short(text)}" is not Unicode', hint=_BROKEN) from error


def _short(name: str) -> str:
    return safe(name if len(name) <= 200 else name[:200] + "...")


def _shown(value: Any) -> str:
    if isinstance(value, list) and len(value) > 20:
        return f"a list of {len(value)}"
    return _short(repr(value)) if not isinstance(value, dict) else "an object"
