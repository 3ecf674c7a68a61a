"""What a checkpoint's directory holds, and which files of it are the checkpoint.

    an index                    its shards
    model.safetensors           that file; else diffusion_pytorch_model.safetensors
    <stem>-00001-of-0000N...    all N of one stem
    one safetensors file        that file
    anything else               refused, with the list

A directory with a `model_index.json` is a diffusers pipeline: each of its folders that holds
safetensors files is a component, a checkpoint of its own, and what else is there stands beside.
Only names are decided here; whether a file may be opened is decided by `inside`: its real path lies
in the directory's real path, or in the `blobs` folder of the hub cache whose `snapshots` folder the
directory is in.
"""

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowbitcli.checkpoint import shard_index, strict_json
from lowbitcli.checkpoint.shard_index import INDEX_SUFFIX, SUFFIX
from lowbitcli.errors import CheckpointError, OutputError
from lowbitcli.tensors import safe

CONFIG = "config.json"
QUANT_CONFIG = "hf_quant_config.json"
MANIFEST = "lowbit.json"
PIPELINE = "model_index.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_STEMS = ("model", "diffusion_pytorch_model")
# Weights in other formats: large, stale once the checkpoint is quantized, and not for this program
# to copy.
_NOT_COPIED = (*PICKLED, SUFFIX, ".gguf", ".onnx", ".onnx_data", ".h5", ".msgpack", ".ot", ".npz")
_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>[0-9]{1,9})-of-(?P<count>[0-9]{1,9})\.safetensors")
_SHOWN = 10
_UNREADABLE = "leads out of the directory or cannot be read"
# Modules beside the model keep small weights of their own (sentence-transformers' 2_Dense).
_SMALL_WEIGHTS = 64 << 20
_MOST_SIDECARS = 10_000


@dataclass(frozen=True)
class Choice:
    """The files of the checkpoint, the index that names them, and what a user should be told."""

    files: tuple[str, ...]
    index: Mapping[str, Any] | None
    notes: tuple[str, ...]
    index_name: str | None = None


def choose(root: Path, names: list[str]) -> Choice:
    """Return which of the files `names` of the directory `root` are its checkpoint.

    Raises:
        CheckpointError: there is none, or no telling which.
    """
    weights = sorted(name for name in names if name.endswith(SUFFIX))
    where = safe(str(root))
    index_name = _index_name([name for name in names if name.endswith(INDEX_SUFFIX)], where)
    index = None
    if index_name is not None:
        path = safe(str(root / index_name))
        raw = strict_json.read_bytes(inside(root, index_name), path, strict_json.MAX_LISTING)
        index = shard_index.parse(raw, path)
        files = _indexed(index["weight_map"], set(weights), path)
    else:
        files = _unindexed(weights, names, where)
    if unknown := [file for file in files if not shard_index.is_plain(file)]:
        raise CheckpointError(f"{where}: {safe(repr(unknown[0]))} is no usable file name")
    others = [name for name in weights if name not in set(files)]
    notes = (f"not part of the checkpoint and not copied: {listed(others)}",) if others else ()
    return Choice(tuple(files), index, notes, index_name)


def sidecars(root: Path, names: list[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the other files to copy along, in folders too (`1_Pooling/config.json`), and notes on
    those that are not copied.
    """
    found: list[str] = []
    below, notes = _below(root)
    for name in sorted([*names, *below]):
        lower = os.path.basename(name).lower()
        if lower.startswith(".") or name == MANIFEST or lower.endswith(INDEX_SUFFIX):
            continue
        small = "/" in name and lower.endswith(SUFFIX) and _size(root / name) <= _SMALL_WEIGHTS
        if not small and lower.endswith(SUFFIX) and "/" not in name:
            continue  # the checkpoint itself, or what `choose` has told of
        if not small and (lower.endswith(_NOT_COPIED) or lower.endswith(".bin.index.json")):
            notes.append(f"not copied: {safe(name)}")
            continue
        try:
            if stat.S_ISREG(os.stat(inside(root, name)).st_mode):
                found.append(name)
        except (CheckpointError, OSError):
            notes.append(f"not copied: {safe(name)} {_UNREADABLE}")
    return tuple(found), tuple(notes)


def components(root: Path) -> tuple[str, ...]:
    """Return the folders of a diffusers pipeline that hold a checkpoint.

    Raises:
        CheckpointError: there is none.
    """
    found = [
        entry.name
        for entry in os.scandir(root)
        if entry.is_dir(follow_symlinks=False)
        and not entry.name.startswith(".")
        and safe(entry.name) == entry.name
        and any(one.name.endswith(SUFFIX) for one in os.scandir(entry.path))
    ]
    if not found:
        raise CheckpointError(
            f"{safe(str(root))}: a diffusers pipeline, and no folder of it holds a safetensors file"
        )
    return tuple(sorted(found))


def around(root: Path, parts: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the files of a diffusers pipeline that stand beside its components `parts`, and notes
    on those that are not copied: weights in the root, which no pipeline loads.

    A folder without a safetensors file is copied as it is: its component needs whatever is there.
    """
    found: list[str] = []
    notes: list[str] = []
    for folder, folders, files in os.walk(root):
        at_root = Path(folder) == root
        kept = [x for x in folders if not x.startswith(".") and not (at_root and x in parts)]
        folders[:] = sorted(x for x in kept if not (Path(folder) / x).is_symlink())
        links = [str((Path(folder) / x).relative_to(root)) for x in kept if x not in folders]
        notes += [_of_link(root, name) for name in links]
        for file in sorted(files):
            name = str((Path(folder) / file).relative_to(root))
            if file.startswith(".") or name == MANIFEST:
                continue
            if at_root and file.lower().endswith((*_NOT_COPIED, INDEX_SUFFIX)):
                notes.append(f"not copied: {safe(name)}")
            elif _is_regular(root, name):
                found.append(name)
            else:
                notes.append(f"not copied: {safe(name)} {_UNREADABLE}")
        if len(found) > _MOST_SIDECARS:
            raise CheckpointError(f"{safe(str(root))}: more than {_MOST_SIDECARS} files beside it")
    return tuple(found), tuple(notes)


def _is_regular(root: Path, name: str) -> bool:
    """Is this a file that may be read?"""
    try:
        return stat.S_ISREG(os.stat(inside(root, name)).st_mode)
    except (CheckpointError, OSError):
        return False


def _below(root: Path) -> tuple[list[str], list[str]]:
    """Return the files in folders of `root`, by path from it, and notes on the folders that are
    not entered: links, and those that hold a checkpoint of their own. Of hidden ones nothing is
    said.
    """
    found: list[str] = []
    notes: list[str] = []
    unread: list[OSError] = []
    for folder, folders, files in os.walk(root, onerror=unread.append):
        path = Path(folder)
        inner = path.relative_to(root)
        if path != root and any(_is_of_a_checkpoint(name) for name in files):
            notes.append(f"not copied: {safe(str(inner))} holds another checkpoint")
            folders.clear()
            continue
        seen = sorted(name for name in folders if not name.startswith("."))
        links = [name for name in seen if (path / name).is_symlink()]
        notes += [_of_link(root, str(inner / name)) for name in links]
        folders[:] = [name for name in seen if name not in links]
        if path != root:
            found += [str(inner / name) for name in files]
        if len(found) > _MOST_SIDECARS:
            raise CheckpointError(
                f"{safe(str(root))}: more than {_MOST_SIDECARS} files in its folders",
                hint="name the directory of the model itself",
            )
    for error in unread:
        where = Path(error.filename).relative_to(root)
        notes.append(f"not copied: {safe(str(where))} cannot be read")
    return found, notes


def _is_of_a_checkpoint(name: str) -> bool:
    """Is this a file of a checkpoint of several, or of one that was written here?"""
    return name == MANIFEST or name.endswith(INDEX_SUFFIX) or _SHARD.fullmatch(name) is not None


def _of_link(root: Path, name: str) -> str:
    """Return the note on a link to a folder."""
    try:
        inside(root, name)
    except CheckpointError:
        return f"not copied: {safe(name)} {_UNREADABLE}"
    return f"not copied: {safe(name)} is a link to a folder"


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def document(root: Path, names: list[str], name: str, limit: int) -> dict[str, Any] | None:
    """Return the JSON object in the file `name` of the directory; None where it is not there.

    Raises:
        CheckpointError: it is no such thing, or larger than `limit` bytes.
    """
    if name not in names and not (root / name).is_dir():  # which is none of `names`
        return None
    where = safe(str(root / name))
    return strict_json.parse_object(strict_json.read_bytes(inside(root, name), where, limit), where)


def beside(root: Path, name: str) -> dict[str, Any] | None:
    """Return the JSON object in the file `name` beside a file that is taken alone, to tell a user
    of; None where there is none that could be read."""
    try:
        present = [name] if (root / name).is_file() else []
        return document(root, present, name, strict_json.MAX_CONFIG)
    except (CheckpointError, OutputError, OSError):
        return None


def inside(root: Path, name: str) -> str:
    """Return the real path of the file `name` of `root`.

    Raises:
        CheckpointError: a link leads out of the directory, and not to the blobs of its hub cache.
    """
    real_root = Path(os.path.realpath(root))
    real = os.path.realpath(real_root / name)
    allowed = [real_root, *_blobs(real_root)]
    if not any(Path(real).is_relative_to(folder) for folder in allowed):
        raise CheckpointError(
            f"{safe(str(root / name))}: a link that leads out of the directory, to {safe(real)}",
            hint="copy the file into the directory if it is meant to be there",
        )
    return real


def listed(names: list[str]) -> str:
    """Return names for a message: escaped, in order, and not more than a reader will read."""
    shown = ", ".join(safe(name) for name in names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def _blobs(root: Path) -> list[Path]:
    """A hub cache is `models--x/{blobs,snapshots/<revision>}`, a revision may have folders."""
    return [
        folder.parent.parent / "blobs"
        for folder in (root, root.parent)
        if folder.parent.name == "snapshots"
    ]


def _index_name(found: list[str], where: str) -> str | None:
    for stem in _STEMS:
        if stem + INDEX_SUFFIX in found:
            return stem + INDEX_SUFFIX
    if len(found) > 1:
        raise CheckpointError(
            f"{where}: several indexes and no telling which: {listed(sorted(found))}",
            hint="keep the one that is meant in a directory of its own",
        )
    return found[0] if found else None


def _indexed(weight_map: Mapping[str, str], present: set[str], where: str) -> list[str]:
    counts: dict[str, int] = {}
    for file in weight_map.values():
        counts[file] = counts.get(file, 0) + 1
    for file in sorted(counts):
        if file not in present:
            missing = sum(name not in present for name in counts)
            raise CheckpointError(
                f"{where}: shard {file} is missing; it should hold {counts[file]} tensors "
                f"({missing} of {len(counts)} shards are missing)",
                hint="incomplete download? fetch the missing files and run again",
            )
    return sorted(counts)


def _unindexed(weights: list[str], names: list[str], where: str) -> list[str]:
    for stem in _STEMS:
        if stem + SUFFIX in weights:
            return [stem + SUFFIX]
    if numbered := {name: match for name in weights if (match := _SHARD.fullmatch(name))}:
        return _numbered(numbered, where)
    if len(weights) == 1:
        return weights
    if weights:
        raise CheckpointError(
            f"{where}: several safetensors files and no telling which: {listed(weights)}",
            hint="name one of the files",
        )
    pickled = sorted(name for name in names if name.lower().endswith(PICKLED))
    if pickled:
        raise CheckpointError(
            f"{where}: no safetensors file, only {listed(pickled)}",
            hint="pickled weights can run code and are never loaded; convert them first",
        )
    raise CheckpointError(f"{where}: no safetensors file in this directory")


def _numbered(shards: Mapping[str, "re.Match[str]"], where: str) -> list[str]:
    sets = {(match["stem"], match["count"]) for match in shards.values()}
    if len(sets) > 1:
        raise CheckpointError(
            f"{where}: several sets of shards and no index: {listed(sorted(shards))}",
            hint="name one of the files, or restore the index",
        )
    count = int(next(iter(shards.values()))["count"])
    numbers = sorted(int(match["number"]) for match in shards.values())
    if len(numbers) != count or numbers not in (
        list(range(1, len(numbers) + 1)),
        list(range(len(numbers))),
    ):
        raise CheckpointError(
            f"{where}: expected {count} shards, found {len(numbers)}: {listed(sorted(shards))}",
            hint="incomplete download? fetch the missing files and run again",
        )
    return sorted(shards)
