"""The largest magnitudes of activations that a calibration saw: `--activation-scales FILE`.

| in the file | is |
|---|---|
| `MODULE`, `MODULE.input_amax`, `MODULE.input_quantizer._amax` | the amax of a module's inputs |
| `ATTENTION.k_amax`, `ATTENTION.k_bmm_quantizer._amax` | the amax of the keys of an attention |
| `ATTENTION.v_amax`, `ATTENTION.v_bmm_quantizer._amax` | the amax of its values |

A JSON object of numbers, or safetensors with one number in each tensor (F32, BF16, F16 or F64).
MODULE is a weight's name without `.weight`, ATTENTION what has a k_proj and a v_proj. The names
with `_quantizer` are those of ModelOpt's state.
"""

import math
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowbitcli.checkpoint import strict_json
from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.containers.inputs import rounded
from lowbitcli.errors import CheckpointError
from lowbitcli.plan.nouns import PathLike
from lowbitcli.tensors import safe

INPUT, KEY, VALUE = "input", "k", "v"
SUFFIXES = {
    ".input_amax": INPUT,
    ".input_quantizer._amax": INPUT,
    ".k_amax": KEY,
    ".k_bmm_quantizer._amax": KEY,
    ".v_amax": VALUE,
    ".v_bmm_quantizer._amax": VALUE,
}
NAMED = 5  # entries that are named
_CODES = {"F64": "<d", "F32": "<f", "F16": "<e"}


@dataclass(frozen=True)
class Amaxes:
    """A file that was read: what it is called, and amax by module, for inputs, keys and values."""

    name: str
    inputs: Mapping[str, float] = field(default_factory=dict)
    keys: Mapping[str, float] = field(default_factory=dict)
    values: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def open(cls, path: PathLike) -> "Amaxes":
        """Read a file; every number is rounded to fp32.

        Raises:
            CheckpointError: it cannot be read, names something twice, or holds what is no amax: NaN
                or Inf, zero, a negative number.
        """
        name = safe(os.fspath(path))
        found: dict[str, dict[str, float]] = {INPUT: {}, KEY: {}, VALUE: {}}
        bad: list[str] = []
        for entry, number in _entries(Path(path), name):
            module, kind = _kind(entry)
            if not _is_amax(number):
                told = "beyond the range of fp32" if math.isinf(number) else f"{number:g}"
                bad.append(f"{safe(entry)} is {told}")
            elif module in found[kind]:
                raise CheckpointError(f"{name}: {safe(entry)} is the second of {safe(module)}")
            found[kind][module] = number
        if bad:
            raise CheckpointError(
                f"{name}: an amax is a finite number above zero, and {listed(bad)}",
                hint="a module that saw no numbers has no amax: leave it out, and give its rule "
                "an activation_scale",
            )
        if not any(found.values()):
            raise CheckpointError(f"{name}: it has no amax")
        return cls(Path(path).name, found[INPUT], found[KEY], found[VALUE])


def listed(what: list[str]) -> str:
    """Return the first of some things, and how many more there are."""
    more = f" and {len(what) - NAMED:,} more" if len(what) > NAMED else ""
    return ", ".join(what[:NAMED]) + more


def _kind(entry: str) -> tuple[str, str]:
    for suffix, kind in SUFFIXES.items():
        if entry.endswith(suffix):
            return entry.removesuffix(suffix), kind
    return entry.removesuffix(".weight"), INPUT


def _is_amax(number: float) -> bool:
    return math.isfinite(number) and number > 0


def _entries(path: Path, name: str) -> Iterator[tuple[str, float]]:
    if path.suffix == ".json":
        yield from _of_json(path, name)
        return
    if path.is_dir():
        raise CheckpointError(f"{name}: a directory, and no file of amaxes")
    with Checkpoint.open(path) as file:
        for entry, stored in file.tensors.items():
            spec = stored.spec
            if spec.numel != 1 or spec.dtype not in (*_CODES, "BF16"):
                raise CheckpointError(
                    f"{name}: {safe(entry)} is {spec.dtype} {list(spec.shape)}, and an amax is one "
                    "number: F32, BF16, F16 or F64"
                )
            yield entry, _number(bytes(file.read(entry)), spec.dtype)


def _number(raw: bytes, dtype: str) -> float:
    if dtype == "BF16":
        raw, dtype = b"\0\0" + raw, "F32"
    return rounded(struct.unpack(_CODES[dtype], raw)[0])


def _of_json(path: Path, name: str) -> Iterator[tuple[str, float]]:
    raw = strict_json.read_bytes(path, name, strict_json.MAX_LISTING)
    for entry, value in strict_json.parse_object(raw, name).items():
        yield entry, _of_value(value, entry, name)


def _of_value(value: Any, entry: str, name: str) -> float:
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"{name}: {safe(entry)} is no number")
    try:
        return rounded(float(value))
    except OverflowError:
        return math.inf
