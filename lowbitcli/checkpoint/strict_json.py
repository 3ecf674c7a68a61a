"""JSON from strangers, with one meaning only: no duplicate keys, no deep nesting, bounded size.

| reader | numbers | duplicate keys | used for |
|---|---|---|---|
| `parse_exact` | as the library's serde_json: no `-0`, NaN, 1e999 | refused | headers |
| `parse` | as Python, Infinity too (some configs) | refused where they differ | the rest |
"""

import json
import math
import os
import stat
from pathlib import Path
from typing import Any

from lowbitcli.checkpoint.unread import unread
from lowbitcli.errors import CheckpointError
from lowbitcli.tensors import safe

MAX_DEPTH = 64
MAX_CONFIG = 16 << 20
# The index and the manifest name every tensor: 100,000 names of 200 characters take 30 MB.
MAX_LISTING = 256 << 20

_ZEROS, _LONG = bytes.maketrans(b"123456789", b"000000000"), b"0" * 20
_LONGEST_NUMBER = 40


class _RefusedError(ValueError):
    pass


def parse_exact(raw: bytes, where: str) -> Any:
    """Return the value of a header's JSON; every integer in it is an `int` from 0 to 2^64 - 1.

    Negative and larger integers come back as floats, which no field of a header takes.

    Raises:
        CheckpointError: not UTF-8, not JSON, a key twice in one object, or nested too deep.
    """
    plain = b"-" not in raw and _LONG not in raw.translate(_ZEROS)
    return _decode(raw, where, _EXACT_AT_ONCE if plain else _EXACT)


def parse(raw: bytes, where: str) -> Any:
    """Return the value of any other JSON document.

    Raises:
        CheckpointError: not UTF-8, not JSON, not Unicode, a key twice with different values, or
            nested too deep.
    """
    value = _decode(raw, where, _PLAIN)
    refuse_depth(value, where)
    if b"\\ud" in raw or b"\\uD" in raw:
        _refuse_halves(value, where)
    return value


def parse_object(raw: bytes, where: str) -> dict[str, Any]:
    """Return the object that a JSON document holds.

    Raises:
        CheckpointError: as `parse`, and where the document is not an object.
    """
    value = parse(raw, where)
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value


def read_bytes(path: str | Path, where: str, limit: int) -> bytes:
    """Return the bytes of a regular file of at most `limit` bytes.

    Raises:
        CheckpointError: it cannot be opened, is no regular file, or is longer.
        OutputError: there is no permission to read it.
    """
    try:
        # Without O_NONBLOCK a named pipe would wait for a writer for ever.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise unread(where, error, "cannot be opened") from error
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        os.close(fd)
        raise CheckpointError(f"{where}: not a regular file")
    with os.fdopen(fd, "rb") as file:
        if found.st_size > limit:
            raise CheckpointError(f"{where}: {found.st_size} bytes; at most {limit} are read")
        try:
            return file.read(limit)
        except OSError as error:
            raise unread(where, error, "cannot be read") from error


def refuse_depth(value: Any, where: str) -> None:
    """Raise CheckpointError where `value` is nested deeper than `MAX_DEPTH`."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = [item for item in level if isinstance(item, dict | list)]
        if not inner:
            return
        level = [x for item in inner for x in (item.values() if isinstance(item, dict) else item)]
    raise CheckpointError(f"{where}: JSON nested deeper than {MAX_DEPTH} levels")


def _refuse_halves(value: Any, where: str) -> None:
    """Refuse half a surrogate pair: it is no text, and cannot be written to a file again."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"{where}: not Unicode: half a surrogate pair") from error


def _decode(raw: bytes, where: str, decoder: json.JSONDecoder) -> Any:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}: not UTF-8 at byte {error.start}") from error
    try:
        return decoder.decode(text)
    except _RefusedError as error:
        raise CheckpointError(f"{where}: {error}") from error
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{where}: not JSON: {error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise CheckpointError(f"{where}: JSON nested too deep") from error
    except ValueError as error:
        raise CheckpointError(f"{where}: not JSON: a number is too long") from error


def _pairs_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _RefusedError(f'key "{safe(key[:200])}" appears twice')
            seen.add(key)
    return found


def _pairs_agreeing(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        for key, value in pairs:
            if found[key] != value:
                raise _RefusedError(f'key "{safe(key[:200])}" appears twice with different values')
    return found


def _exact_integer(text: str) -> int | float:
    if len(text) > _LONGEST_NUMBER:
        raise _RefusedError(f"a number of {len(text)} digits")
    if text[0] == "-":
        return float(text)
    value = int(text)
    return value if value < 1 << 64 else float(value)


def _exact_float(text: str) -> float:
    # serde_json is a few ulps off and refuses what overflows: stay well away from its border.
    value = float(text) if len(text) <= _LONGEST_NUMBER else math.inf
    if abs(value) > 1e300:
        raise _RefusedError("a number out of range")
    return value


def _no_constant(text: str) -> None:
    raise _RefusedError(f"{text} is not JSON")


_EXACT = json.JSONDecoder(
    object_pairs_hook=_pairs_once,
    parse_int=_exact_integer,
    parse_float=_exact_float,
    parse_constant=_no_constant,
)
# For a text without a minus and without a number that may not fit in 64 bits.
_EXACT_AT_ONCE = json.JSONDecoder(
    object_pairs_hook=_pairs_once, parse_float=_exact_float, parse_constant=_no_constant
)
_PLAIN = json.JSONDecoder(object_pairs_hook=_pairs_agreeing)
