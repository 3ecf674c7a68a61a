"""Headers of safetensors files made wrong: by bytes, by words, and by what their JSON says."""

import copy
import json
import random
from typing import Any

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -0.0, -1, 1, 2, 7, 8, 1.5, 1e300, 2**31, 2**53),
    *(2**63 - 1, 2**63, 2**64 - 1, 2**64, "", "a", "F32", "f32", "U8", "F4", "BOOL"),
    *("\ud800", "\0", "é" * 40, [], [0], [1, 2], {}, {"a": 1}, [[]], [0, 0], [0, 8]),
    *([8, 0], [2**64, 2**64], ["0", "8"]),
)
WORDS = (
    *(b"0", b"-0", b"1e1", b"[", b"]", b"{}", b"}", b'"', b",", b":", b"null", b"true"),
    *(b"F16", b"\\ud83d", b"\\u0061", b"\\/", b"9" * 20, b"9" * 50, b"1e999", b"NaN"),
    *(b"Infinity", b" ", b"\t", b"\0", b"\xff", b"\xef\xbb\xbf", b"\xc0\x80", b'"a":'),
    *(b'"__metadata__":{},', b'"__metadata__":null,'),
)
DTYPES = ("BOOL", "U8", "F8_E4M3", "BF16", "F32", "F64", "F4", "F8_E8M0")
BYTES = {"BOOL": 1, "U8": 1, "F8_E4M3": 1, "BF16": 2, "F32": 4, "F64": 8, "F8_E8M0": 1, "F4": 0.5}


def packed(document: Any, size: int, draw: random.Random) -> bytes:
    """Return a file with this header, and `size` bytes after it."""
    text = json.dumps(document, separators=draw.choice(((",", ":"), (", ", ": "))))
    return with_length(text.encode("utf-8", "surrogatepass") + b" " * draw.randrange(3), size)


def with_length(text: bytes, size: int) -> bytes:
    return len(text).to_bytes(8, "little") + text + bytes(i % 251 for i in range(size))


def flawless(draw: random.Random) -> tuple[dict[str, Any], int]:
    """Return the JSON of a header, and how many bytes its tensors have."""
    document: dict[str, Any] = {}
    if draw.random() < 0.4:
        document["__metadata__"] = {"format": "pt", "é": ""}
    stop = 0
    for number in range(draw.randrange(4)):
        dtype = draw.choice(DTYPES)
        shape = [draw.choice((0, 1, 2, 2, 4)) for _ in range(draw.randrange(3))] + [2]
        numel = 1
        for length in shape:
            numel *= length
        start, stop = stop, stop + int(numel * BYTES[dtype])
        name = draw.choice(("a", "b", "model.layers.0.weight", "")) + str(number)
        document[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}
    return document, stop


def _somewhere(value: Any, draw: random.Random) -> tuple[Any, Any] | None:
    """Return a container in a document, and a key of it."""
    places = []
    level = [value]
    while level:
        inner = []
        for item in level:
            keys = list(item) if isinstance(item, dict) else list(range(len(item)))
            places += [(item, key) for key in keys]
            inner += [item[key] for key in keys if isinstance(item[key], dict | list)]
        level = inner
    return draw.choice(places) if places else None


def _by_meaning(draw: random.Random) -> bytes:
    document, size = flawless(draw)
    for _ in range(draw.randint(1, 2)):
        found = _somewhere(document, draw)
        if found is None:
            break
        item, key = found
        choice = draw.randrange(4)
        if choice == 0:
            del item[key]
        elif choice == 1 and isinstance(item[key], int) and not isinstance(item[key], bool):
            item[key] += draw.choice((-8, -1, 1, 2, 8, 2**32, 2**63, 2**64))
        elif choice == 2 and isinstance(item, dict):
            item[str(draw.choice(ODD))] = item.pop(key)
        else:
            item[key] = copy.deepcopy(draw.choice(ODD))
    if draw.random() < 0.2:
        size = max(0, size + draw.choice((-1, 1, 8)))
    return packed(document, size, draw)


def _by_bytes(draw: random.Random) -> bytes:
    document, size = flawless(draw)
    blob = bytearray(packed(document, size, draw))
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(8, len(blob)) if draw.random() < 0.95 else draw.randrange(8)
        choice = draw.randrange(5)
        if choice == 0:
            blob[at] = draw.randrange(256)
        elif choice == 1 and len(blob) > 12:
            del blob[at : at + draw.randint(1, 4)]
        elif choice == 2:
            blob[at:at] = draw.choice(WORDS)
        elif choice == 3:
            start = draw.randrange(8, len(blob))
            blob[at:at] = blob[start : start + draw.randrange(60)]  # a key twice, a tensor twice
        else:
            blob += bytes(draw.randint(1, 3))
        if len(blob) <= 8:
            break
    if draw.random() < 0.7:
        end = blob.rfind(b"}") + 1
        blob[:8] = max(end - 8, 0).to_bytes(8, "little")
    return bytes(blob)


def mutated(draw: random.Random) -> bytes:
    """Return a file that was flawless before something happened to its header."""
    return _by_meaning(draw) if draw.random() < 0.5 else _by_bytes(draw)
