"""`Checkpoint`: a safetensors file or a directory of them, opened by headers, read by slices.

All headers are read and checked when it is opened; tensors only when asked for, straight from the
file with `pread`, so any number of threads may read at once. A file that is not the one whose
header was read is noticed at every read.
"""

import os
import stat
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from lowbitcli.checkpoint import directory, strict_json
from lowbitcli.checkpoint.header import Header, read_from
from lowbitcli.checkpoint.runs import Span, fill, neighbours
from lowbitcli.checkpoint.unread import unread
from lowbitcli.errors import CheckpointError, UsageError
from lowbitcli.tensors import TensorSpec, safe

_RUN = 1 << 30  # bytes of one call: it takes no more than 2 GiB


class StoredTensor(NamedTuple):
    """A tensor, the file that holds it (a name in the checkpoint's root), and where in it."""

    spec: TensorSpec
    file: str
    start: int
    stop: int


@dataclass(frozen=True)
class _Identity:
    """What must stay the same of a file between its header and its last byte."""

    device: int
    inode: int
    size: int
    changed: int

    @classmethod
    def of(cls, fd: int) -> "_Identity":
        found = os.fstat(fd)
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


class Checkpoint:
    """A checkpoint to read from; use it in a `with`, or `close` it."""

    path: Path  # what was asked for
    root: Path  # the directory that holds the files
    is_directory: bool
    files: tuple[str, ...]
    headers: Mapping[str, Header]
    tensors: Mapping[str, StoredTensor]  # by name, in order
    metadata: Mapping[str, Mapping[str, str]]  # of each file's header
    config: Mapping[str, Any] | None  # config.json; None for a single file
    quant_config: Mapping[str, Any] | None  # hf_quant_config.json
    manifest: Mapping[str, Any] | None  # lowbit.json
    index: Mapping[str, Any] | None
    index_name: str | None  # the file that it is in
    components: Mapping[str, "Checkpoint"]  # of a diffusers pipeline, which is all of them together
    sidecars: tuple[str, ...]  # other files that belong to it
    notes: tuple[str, ...]  # what a user should be told

    def __init__(self, path: Path) -> None:
        """Prepare for `open`, which is what callers use."""
        self.path = path
        self.config = self.quant_config = self.manifest = self.index = self.index_name = None
        self.components = {}
        self.sidecars = self.notes = ()
        self._paths: dict[str, str] = {}
        self._identities: dict[str, _Identity] = {}
        self._fds: dict[str, int] = {}
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, strict: bool = False) -> "Checkpoint":
        """Open a file or a directory; `strict` refuses tensors that the index does not name.

        Raises:
            CheckpointError: there is nothing there, or nothing that can be trusted.
            OutputError: there is no permission to read it.
            UsageError: the path is an address.
        """
        text = os.fspath(path)
        if "://" in text:
            _refuse_address(text)
        checkpoint = cls(Path(text))
        try:
            mode = os.stat(text).st_mode
        except ValueError as error:
            raise CheckpointError(f"{safe(text)}: not a path") from error
        except OSError as error:
            raise unread(safe(text), error) from error
        checkpoint.is_directory = stat.S_ISDIR(mode)
        if checkpoint.is_directory:
            checkpoint._open_directory(strict)
        else:
            checkpoint._open_file()
        return checkpoint

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytearray:
        """Return bytes `start` to `stop` of a tensor.

        Raises:
            CheckpointError: the file changed or cannot be read.
        """
        stored = self.tensors[name]
        stop = stored.stop - stored.start if stop is None else stop
        buffer = bytearray(max(0, stop - start))
        self.read_into(name, memoryview(buffer), start)
        return buffer

    def read_into(self, name: str, buffer: memoryview, start: int = 0) -> None:
        """Fill `buffer` with a tensor's bytes from `start` on.

        Raises:
            CheckpointError: the file changed or cannot be read.
            ValueError: the tensor has not that many bytes.
        """
        file, offset = self._placed(name, buffer, start)
        self._fill(file, offset, [buffer])

    def read_all(self, wanted: Iterable[tuple[str, int, memoryview]]) -> None:
        """Fill many buffers, each with a tensor's bytes from a place on; bytes that follow each
        other in a file are read by one call.

        Raises:
            CheckpointError: a file changed or cannot be read.
            ValueError: a tensor has not that many bytes.
        """
        spans: dict[str, list[Span[memoryview]]] = {}
        for name, start, buffer in wanted:
            file, offset = self._placed(name, buffer, start)
            spans.setdefault(file, []).append((offset, offset + buffer.nbytes, buffer))
        for file, found in spans.items():
            for run in neighbours(found, _RUN):
                self._fill(file, run[0][0], [buffer for _, _, buffer in run])

    def _placed(self, name: str, buffer: memoryview, start: int) -> tuple[str, int]:
        """Return the file, and where in it a tensor's bytes from `start` on are."""
        stored = self.tensors[name]
        offset = stored.start + start
        if start < 0 or offset + buffer.nbytes > stored.stop:
            raise ValueError(
                f'tensor "{safe(name)}" has no bytes {start} to {start + buffer.nbytes}'
            )
        return stored.file, offset

    def _fill(self, file: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill buffers, one after the other, with the bytes of a file from `offset` on."""
        where = safe(self._paths[file])
        fd = self._fd(file)
        try:
            fill(fd, offset, buffers)
        except EOFError:
            raise _changed(where) from None
        except OSError as error:
            raise unread(where, error, "cannot be read") from error
        if _Identity.of(fd) != self._identities[file]:
            raise _changed(where)

    def close(self) -> None:
        """Close the files; reading again opens them again."""
        with self._lock:
            while self._fds:
                os.close(self._fds.popitem()[1])

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_directory(self, strict: bool) -> None:
        self.root = self.path
        try:
            names = [entry.name for entry in os.scandir(self.root) if not entry.is_dir()]
        except OSError as error:
            raise unread(safe(str(self.root)), error) from error
        self.manifest = directory.document(
            self.root, names, directory.MANIFEST, strict_json.MAX_LISTING
        )
        if directory.PIPELINE in names:
            self._open_components(strict)
            return
        choice = directory.choose(self.root, names)
        self.index, self.index_name = choice.index, choice.index_name
        self.config = directory.document(self.root, names, directory.CONFIG, strict_json.MAX_CONFIG)
        self.quant_config = directory.document(
            self.root, names, directory.QUANT_CONFIG, strict_json.MAX_CONFIG
        )
        self.sidecars, not_copied = directory.sidecars(self.root, names)
        self._read_headers({file: directory.inside(self.root, file) for file in choice.files})
        weight_map = self.index["weight_map"] if self.index is not None else None
        unlisted = self._compare(weight_map, strict) if weight_map is not None else ()
        self.notes = (*unlisted, *choice.notes, *not_copied)

    def _open_components(self, strict: bool) -> None:
        """Open a diffusers pipeline: every component by itself, and all of them as this one, in
        which tensors and files have the name of their component in front."""
        parts = directory.components(self.root)
        self.components = {x: Checkpoint.open(self.root / x, strict=strict) for x in parts}
        headers: dict[str, Header] = {}
        tensors: dict[str, StoredTensor] = {}
        for part, component in self.components.items():
            if component.components:
                raise CheckpointError(f"{safe(str(component.path))}: a pipeline within a pipeline")
            for file, header in component.headers.items():
                entries = {
                    f"{part}/{name}": entry._replace(spec=entry.spec.named(f"{part}/{name}"))
                    for name, entry in header.entries.items()
                }
                name = f"{part}/{file}"
                headers[name] = replace(header, entries=entries)
                self._paths[name] = component._paths[file]
                self._identities[name] = component._identities[file]
                tensors |= {
                    x: StoredTensor(y.spec, name, y.start, y.stop) for x, y in entries.items()
                }
        self._take(headers, tensors)
        others, notes = directory.around(self.root, parts)
        own = [f"{x}/{y}" for x, one in self.components.items() for y in one.sidecars]
        self.sidecars = (*others, *own)
        told = [f"{x}: {note}" for x, one in self.components.items() for note in one.notes]
        self.notes = (*notes, *told)

    def _open_file(self) -> None:
        where = safe(str(self.path))
        if self.path.name.lower().endswith(directory.PICKLED):
            raise CheckpointError(
                f"{where}: not a safetensors file",
                hint="pickled weights can run code and are never loaded; convert them first",
            )
        if self.path.name.endswith(".json"):
            raise CheckpointError(
                f"{where}: not a safetensors file",
                hint=f"name its directory, {safe(str(self.path.parent))}",
            )
        self.root = self.path.parent
        self._read_headers({self.path.name: os.path.realpath(self.path)})
        if (self.root / directory.CONFIG).is_file():
            self.notes = (
                f"{safe(self.path.name)} is taken alone: {directory.CONFIG} beside it is not read; "
                f"name the directory {safe(str(self.root))} to take the whole model",
            )

    def _read_headers(self, paths: Mapping[str, str]) -> None:
        headers: dict[str, Header] = {}
        tensors: dict[str, StoredTensor] = {}
        for file, path in sorted(paths.items()):
            where = safe(str(self.root / file))
            fd = _open(path, where)
            try:
                identity = _Identity.of(fd)
                headers[file] = read_from(fd, identity.size, where)
            finally:
                os.close(fd)
            self._paths[file], self._identities[file] = path, identity
            entries = headers[file].entries
            if not tensors.keys().isdisjoint(entries):
                name = next(name for name in entries if name in tensors)
                raise CheckpointError(
                    f'tensor "{safe(name)}" is in {tensors[name].file} and in {file}',
                    hint="shards of two checkpoints in one directory?",
                )
            for name, (spec, start, stop) in entries.items():
                tensors[name] = StoredTensor(spec, file, start, stop)
        self._take(headers, tensors)

    def _take(self, headers: Mapping[str, Header], tensors: Mapping[str, StoredTensor]) -> None:
        self.files = tuple(headers)
        self.headers = MappingProxyType(headers)
        self.metadata = MappingProxyType({file: x.metadata for file, x in headers.items()})
        self.tensors = MappingProxyType(dict(sorted(tensors.items())))

    def _compare(self, weight_map: Mapping[str, str], strict: bool) -> tuple[str, ...]:
        """Refuse tensors that only the index knows; return notes on those that it does not name."""
        if weight_map == {name: stored.file for name, stored in self.tensors.items()}:
            return ()
        for name, file in weight_map.items():
            stored = self.tensors.get(name)
            if stored is None or stored.file != file:
                found = f"it is in {stored.file}" if stored else "no shard holds it"
                raise CheckpointError(
                    f'{safe(str(self.root))}: the index says that tensor "{safe(name)}" '
                    f"is in {file}; the header of {file} does not name it; {found}",
                    hint="index and shards of different versions, or an incomplete download?",
                )
        unlisted = [name for name in self.tensors if name not in weight_map]
        if not unlisted:
            return ()
        message = f"in a shard but not in the index: {directory.listed(unlisted)}"
        if strict:
            raise CheckpointError(
                f"{safe(str(self.root))}: {message}", hint="without --strict they are kept"
            )
        return (f"{message}; kept",)

    def _fd(self, file: str) -> int:
        with self._lock:
            if file not in self._fds:
                self._fds[file] = _open(self._paths[file], safe(self._paths[file]))
            return self._fds[file]


def _open(path: str, where: str) -> int:
    """Open a regular file; a link put in the place of a real path, or a pipe, does not get past."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        raise unread(where, error, "cannot be opened") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CheckpointError(f"{where}: not a regular file")
    return fd


def _changed(where: str) -> CheckpointError:
    return CheckpointError(
        f"{where}: changed while being read", hint="wait until it is complete, then run again"
    )


def _refuse_address(text: str) -> None:
    hint = "download it first and name the file or directory"
    if text.startswith("hf://"):
        hint = f"hf download {safe(text.removeprefix('hf://'))} --local-dir DIR, then name DIR"
    raise UsageError(f"{safe(text)}: addresses are not read", hint=hint)
