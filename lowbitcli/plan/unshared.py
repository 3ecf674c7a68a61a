"""Recoded weights that are served as one matrix and whose scales differ: a recode changes no bytes,
so the source's scales stay as they are, and its readers' error with them.

| scheme | what readers do where the scales of a matrix differ |
|---|---|
| nvfp4 | they take one for all of it, mostly the largest stored, and leave the scales of blocks |
| fp8 with one scale | they requantize all of it to the largest |

The scales are read when the plan is made, a few bytes each, and only those of groups of which two
members or more are recoded.
Source: vLLM 0.33 and SGLang 0.5.23; see `verify/rules_scales.py`.
"""

import struct
from collections.abc import Iterable, Iterator

from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.errors import UnsupportedError
from lowbitcli.plan.nouns import Part, Weight
from lowbitcli.tensors import GLOBAL_SCALE, SCALE, safe

NAMED = 5  # groups that are named
MENDED = ("compressed-tensors", "modelopt")  # containers whose NVFP4 `verify --fix` puts right
_CODES = {"F32": "<f", "F16": "<e", "F64": "<d"}


def unshared(
    checkpoint: Checkpoint, weights: Iterable[Weight], container: str, *, strict: bool
) -> list[str]:
    """Return what to tell of groups of recoded weights whose scales differ.

    Raises:
        UnsupportedError: there are some, and the plan is `strict`.
        CheckpointError: a scale cannot be read.
    """
    found: dict[str, list[str]] = {}
    for scheme, members, factor in _differing(checkpoint, weights):
        names = ", ".join(safe(name) for name in members)
        found.setdefault(scheme, []).append(f"{names}: by a factor of {factor:.3g}")
    notes = []
    for scheme, lines in sorted(found.items()):
        told, hint = _told(scheme, len(lines), container)
        shown = lines[:NAMED]
        if len(lines) > NAMED:
            shown.append(f"and {len(lines) - NAMED:,} more")
        if strict:
            hint = f"without --strict they are written as they are; {hint}"
            raise UnsupportedError("\n  ".join([told, *shown]), hint=hint)
        notes.append("\n".join([f"{told}; {hint}", *shown]))
    return notes


def _told(scheme: str, count: int, container: str) -> tuple[str, str]:
    """Return what readers do with groups of a scheme, and what to do about it."""
    groups = "1 group" if count == 1 else f"{count:,} groups"
    again = "dequantize and quantize again"
    if scheme == "nvfp4":
        told = (
            f"{groups} of recoded weights that are served as one matrix have different global "
            "scales, which a recode leaves: readers take one for all, mostly the largest that is "
            "stored, and values of the others are wrong by as much"
        )
        fix = "lowbit verify OUT --fix -o NEW gives them one"
        return told, f"{fix}, or {again}" if container in MENDED else again
    told = (
        f"{groups} of recoded weights that are served as one matrix have different scales, which a "
        "recode leaves: readers round the others to the largest once more"
    )
    return told, again


def _differing(
    checkpoint: Checkpoint, weights: Iterable[Weight]
) -> Iterator[tuple[str, list[str], float]]:
    """Yield scheme, names and the ratio of scales of each group that has different ones."""
    groups: dict[str, list[Weight]] = {}
    for weight in weights:
        if weight.group and weight.recodes:
            key = weight.group.rpartition("|")[0]  # whatever the rule: nothing is rounded
            groups.setdefault(key, []).append(weight)
    read: dict[str, bytes] = {}
    for members in groups.values():
        if len(members) < 2:
            continue
        scales = [_raw(checkpoint, weight, read) for weight in members]
        first = scales[0][0]
        if all(raw == first for raw, _ in scales):
            continue
        scheme = members[0].source
        names = sorted(weight.name for weight in members)
        yield scheme.name if scheme is not None else "", names, _factor(scales)


def _raw(checkpoint: Checkpoint, weight: Weight, read: dict[str, bytes]) -> tuple[bytes, str]:
    """Return the bytes of the one scale of a weight, or of a stack's, and their dtype."""
    part = _part(weight)
    name = part.spec.name
    if part.view is None:
        return bytes(checkpoint.read(name)), part.spec.dtype
    if name not in read:  # the scales of all experts are in it
        read[name] = bytes(checkpoint.read(name))
    size = len(read[name]) // max(1, part.spec.numel)
    start = part.view.matrix * size
    return read[name][start : start + size], part.spec.dtype


def _part(weight: Weight) -> Part:
    return weight.reads[GLOBAL_SCALE if GLOBAL_SCALE in weight.reads else SCALE]


def _factor(scales: Iterable[tuple[bytes, str]]) -> float:
    """Return the largest ratio of scales of a group, of stacks of the same expert's."""
    experts = zip(*(_numbers(raw, dtype) for raw, dtype in scales), strict=False)
    return max((_ratio(one) for one in experts), default=float("inf"))


def _ratio(numbers: Iterable[float]) -> float:
    sizes = [abs(number) for number in numbers]
    return max(sizes) / min(sizes) if min(sizes) else float("inf")


def _numbers(raw: bytes, dtype: str) -> list[float]:
    if dtype == "BF16":
        pairs = (raw[at : at + 2] for at in range(0, len(raw), 2))
        return [struct.unpack("<f", b"\0\0" + pair)[0] for pair in pairs]
    code = _CODES.get(dtype)
    return [number for (number,) in struct.iter_unpack(code, raw)] if code else []
