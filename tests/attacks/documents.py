"""What a checkpoint says of itself, made wrong: config.json, hf_quant_config.json, the index, the
manifest, a pipeline's model_index.json, the metadata of headers, and what headers say of tensors.

Every mutation is drawn from tables: a place in a document, and what is done there.
"""

import copy
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.checkpoints import header_of

DEEP = 40  # levels that are read
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 4, 8, 16, 128, 2**63, 2**70, 1.5, -0.0, 1e300, float("nan")),
    *(float("inf"), "", "x", "4", "None", "fp8", "float8_e4m3fn", "Linear", "re:.*", "re:(", "\0"),
    *("\ud800", "\x1b[2J", "../../etc/passwd", "/etc/passwd", "x" * 70_000, "é" * 300),
    *(
        [],
        [None],
        [0],
        [1, 16],
        [128, 128],
        ["Linear"],
        ["re:" + "(a*)*" * 20],
        [[]],
        list(range(999)),
    ),
    *({}, {"a": {}}, {"": None}, {"quant_method": "fp8"}, {"weights": None}, {"x" * 9000: 1}),
)


def nested(depth: int) -> Any:
    value: Any = {}
    for number in range(depth):
        value = [value] if number % 2 else {"weights": value}
    return value


def places(document: Any) -> list[tuple[Any, Any]]:
    """Return every container in a document, with each of its keys."""
    found, level = [], [document]
    while level:
        inner = []
        for item in level:
            keys = list(item) if isinstance(item, dict) else list(range(len(item)))
            found += [(item, key) for key in keys]
            inner += [item[key] for key in keys if isinstance(item[key], dict | list)]
        level = inner
    return found


def remove(item, key, draw):
    del item[key]


def replace(item, key, draw):
    item[key] = copy.deepcopy(draw.choice(ODD))


def nest(item, key, draw):
    item[key] = nested(draw.choice((3, DEEP, 200)))


def wrap(item, key, draw):
    item[key] = draw.choice(([item[key]], {"a": item[key]}, str(item[key])))


def rename(item, key, draw):
    if isinstance(item, dict):
        item[draw.choice(("", "x", key.upper(), key + " ", "weights", "\x1b]0;x\x07"))] = item.pop(
            key
        )
    else:
        item.append(item[key])


def exchange(item, key, draw):
    """Let two places say what the other said: types that are right, and a contradiction."""
    other = draw.choice(list(item) if isinstance(item, dict) else range(len(item)))
    item[key], item[other] = item[other], item[key]


def nudge(item, key, draw):
    value = item[key]
    if isinstance(value, bool) or value is None:
        item[key] = not value
    elif isinstance(value, int | float):
        item[key] = draw.choice(
            (value * 2, value + 1, -value, value // 2, str(value), float(value))
        )
    elif isinstance(value, str):
        item[key] = draw.choice((value[:-1], value.upper(), value * 2, value + "\n", [value]))
    else:
        item[key] = type(value)()


CHANGES: tuple[Callable[..., None], ...] = (remove, replace, nest, wrap, rename, exchange, nudge)


def changed(document: Any, draw: random.Random) -> str:
    """Change a document at one to three places, and say what was done."""
    said = []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        found = places(document)
        # What is said of quantization is a small part of a config, and most of what matters.
        near = [x for x in found if x[0] is not document] or found
        if not found:
            break
        item, key = draw.choice(near if draw.random() < 0.7 else found)
        change = draw.choice(CHANGES)
        change(item, key, draw)
        said.append(f"{change.__name__} {str(key)[:40]!r}")
    return ", ".join(said)


# Whole files: what stands in the place of the JSON.
TEXTS: dict[str, bytes] = {
    "empty": b"",
    "null": b"null",
    "a list": b"[]",
    "a number": b"3",
    "an empty object": b"{}",
    "cut off": b'{"quantization_config": {"quant_me',
    "not JSON": b"quantization_config: {}",
    "with a mark": b"\xef\xbb\xbf{}",
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "no text": bytes(range(256)),
    "deep lists": b'{"quantization_config": ' + b"[" * 99_999 + b"]" * 99_999 + b"}",
    "deep objects": b'{"quantization_config":' * 9_999 + b"1" + b"}" * 9_999,
    "a long number": b'{"quantization_config": ' + b"9" * 5_000 + b"}",
    "a key twice": b'{"quantization_config": {}, "quantization_config": {"quant_method": "fp8"}}',
    "many keys": b"{" + b", ".join(b'"k%d": {}' % n for n in range(20_000)) + b"}",
}


def write_json(path: Path, document: Any) -> None:
    path.write_bytes(json.dumps(document).encode("utf-8", "surrogatepass"))


def in_json(name: str) -> Callable[[Path, random.Random], str | None]:
    """Return a mutation of the JSON file `name` of a checkpoint; None where it has none."""

    def mutate(root: Path, draw: random.Random) -> str | None:
        found = sorted(root.rglob(name)) if root.is_dir() else []
        if not found:
            return None
        path = draw.choice(found)
        if draw.random() < 0.15:
            said = draw.choice(sorted(TEXTS))
            path.write_bytes(TEXTS[said])
        else:
            document = json.loads(path.read_text())
            said = changed(document, draw)
            write_json(path, document)
        return f"{path.relative_to(root)}: {said}"

    return mutate


def shard(root: Path, draw: random.Random) -> Path:
    return draw.choice(sorted(root.rglob("*.safetensors"))) if root.is_dir() else root


def rewrite(path: Path, header: Any, data: bytes) -> None:
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def data_of(path: Path) -> bytes:
    found = path.read_bytes()
    return found[8 + int.from_bytes(found[:8], "little") :]


def in_metadata(root: Path, draw: random.Random) -> str | None:
    """Change a header's metadata, and the JSON that some hide in its strings."""
    path = shard(root, draw)
    header, data = header_of(path), data_of(path)
    metadata = header.setdefault("__metadata__", {})
    hidden = {}
    for key, value in metadata.items():
        try:
            hidden[key] = json.loads(value)
        except ValueError:
            continue
    kept = {k: v for k, v in hidden.items() if isinstance(v, dict | list) and v}
    if kept and draw.random() < 0.7:
        key = draw.choice(sorted(kept))
        said = f"JSON in {key}: {changed(kept[key], draw)}"
        metadata[key] = json.dumps(kept[key])
    elif metadata:
        key = draw.choice(sorted(metadata))
        metadata[key] = draw.choice(
            (
                "",
                "x",
                "{",
                "[]",
                "null",
                "{}",
                "9" * 5000,
                "[" * 9_999,
                metadata[key] * 2,
                "\x1b[2J",
            )
        )
        said = f"{key} is {metadata[key][:20]!r}"
        if draw.random() < 0.3:
            del metadata[key]
            said = f"no {key}"
    else:
        metadata["_quantization_metadata"] = '{"layers": 3}'
        said = "metadata of another"
    rewrite(path, header, data)
    return f"metadata of {path.name}: {said}"


def in_tensors(root: Path, draw: random.Random) -> str | None:
    """Let a header say something else of a tensor that its bytes allow: other names, dtypes of the
    same size, shapes of the same number of elements, or no such tensor."""
    path = shard(root, draw)
    header, data = header_of(path), data_of(path)
    name = draw.choice(sorted(set(header) - {"__metadata__"}))
    entry = header[name]
    choice = draw.randrange(4)
    if choice == 0:
        suffix = draw.choice(
            ("_scale", "_scale_2", "_scale_inv", ".scale", "_packed", "x", "_zero_point")
        )
        header[name + suffix] = header.pop(name)
        said = f"{name} is called {suffix} more"
    elif choice == 1:
        sizes = (
            ("U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "BOOL"),
            ("F16", "BF16", "I16"),
            ("F32", "I32", "U32"),
        )
        same = next((group for group in sizes if entry["dtype"] in group), ("F64", "I64"))
        entry["dtype"] = draw.choice(same)
        said = f"{name} is {entry['dtype']}"
    elif choice == 2:
        numel = 1
        for length in entry["shape"]:
            numel *= length
        entry["shape"] = draw.choice(
            ([numel], [1, numel], [numel, 1], [1, *entry["shape"]], entry["shape"][::-1])
        )
        said = f"{name} is {entry['shape']}"
    else:
        start, stop = entry["data_offsets"]
        del header[name]
        data = data[:start] + data[stop:]
        for key, other in header.items():
            if key != "__metadata__" and other["data_offsets"][0] >= stop and stop > start:
                other["data_offsets"] = [x - (stop - start) for x in other["data_offsets"]]
        said = f"no {name}"
    rewrite(path, header, data)
    return f"{path.name}: {said}"


def in_markers(root: Path, draw: random.Random) -> str | None:
    """Change the bytes of a small tensor that says how others are stored."""
    path = shard(root, draw)
    header, data = header_of(path), bytearray(data_of(path))
    names = [x for x in header if x.endswith((".comfy_quant", ".weight_shape"))]
    if not names:
        return None
    name = draw.choice(sorted(names))
    start, stop = header[name]["data_offsets"]
    if draw.random() < 0.5:
        at = draw.randrange(start, stop)
        data[at] = draw.randrange(256)
        said = f"byte {at - start} of {name} is {data[at]}"
    else:
        data[start:stop] = draw.choice((b" ", b"{", b"\xff", b"[")) * (stop - start)
        said = f"{name} is {bytes(data[start : start + 4])!r}"
    rewrite(path, header, bytes(data))
    return said


def in_files(root: Path, draw: random.Random) -> str | None:
    """Put something else where a document is: a folder, a pipe, a link out, a link to itself."""
    if not root.is_dir():
        return None
    path = draw.choice(sorted(p for p in root.rglob("*") if p.suffix in (".json", ".safetensors")))
    path.unlink()
    said = draw.choice(
        ("gone", "a folder", "a pipe", "a link out", "a link to itself", "unreadable")
    )
    if said == "a folder":
        path.mkdir()
    elif said == "a pipe":
        os.mkfifo(path)
    elif said == "a link out":
        outside = root.parent / "outside"
        outside.mkdir(exist_ok=True)
        (outside / path.name).write_text("{}")
        path.symlink_to(outside / path.name)
    elif said == "a link to itself":
        path.symlink_to(path.name)
    elif said == "unreadable":
        path.symlink_to("/proc/1/mem" if draw.random() < 0.5 else "nothing")
    return f"{path.relative_to(root)} is {said}"


MUTATIONS: dict[str, Callable[[Path, random.Random], str | None]] = {
    "config.json": in_json("config.json"),
    "hf_quant_config.json": in_json("hf_quant_config.json"),
    "index": in_json("*.index.json"),
    "lowbit.json": in_json("lowbit.json"),
    "model_index.json": in_json("model_index.json"),
    "metadata": in_metadata,
    "tensors": in_tensors,
    "markers": in_markers,
    "files": in_files,
}
