"""Checkpoints of names and shapes alone: those of tests/golden/families, as files of holes."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests import checkpoints

FOLDER = Path(__file__).parent / "golden" / "families"
FAMILIES = tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def document(family: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{family}.json").read_text())


def expanded(name: str) -> Iterator[str]:
    """Yield the names that one with ranges stands for."""
    found = re.search(r"\{([\d,-]+)\}", name)
    if found is None:
        yield name
        return
    first, dash, last = found[1].partition("-")
    numbers = range(int(first), int(last) + 1) if dash else map(int, found[1].split(","))
    for number in numbers:
        yield from expanded(f"{name[: found.start()]}{number}{name[found.end() :]}")


def tensors(family: str) -> dict[str, list[int]]:
    return {
        name: shape
        for written, shape in document(family)["tensors"].items()
        for name in expanded(written)
    }


def make(root: Path, family: str, shapes: Mapping[str, list[int]] | None = None) -> Path:
    """Make the directory, or the lone file, of a family; its weights are holes."""
    config = document(family)["config"]
    header: dict[str, Any] = {}
    stop = 0
    for name, shape in (shapes or tensors(family)).items():
        start, size = stop, 2
        for side in shape:
            size *= side
        stop = start + size
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, stop]}
    root.mkdir(parents=True, exist_ok=True)
    path = root / "model.safetensors"
    checkpoints.write_raw(path, header)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + stop)
    if config is None:
        return path
    (root / "config.json").write_text(json.dumps(config))
    return root
