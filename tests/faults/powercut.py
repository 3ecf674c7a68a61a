"""A model of a disk that loses power: what a run did to its files is recorded, and afterwards any
tree is made that the disk might hold.

    a write, a new size     may be lost until fsync or fdatasync of the file; each by itself, and a
                            write also in part, by sectors
    a name                  may be lost until fsync of its folder: made, removed or renamed; each by
                            itself, a rename as one
    what came before        a sync keeps; nothing else keeps anything, not even the order

This is weaker than any file system in use, which keeps more than it has to.
"""

import os
import pickle
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowbitcli.checkpoint import atomic

SECTOR = 512
ROOT = 0  # the number of the folder that is watched; those of its files follow


@dataclass(frozen=True)
class Step:
    """A thing that was done: to a file (write, size, sync) or to the names of a folder.

    `names` is ((folder, name, number of what it is then or None), ...).
    """

    kind: str  # write, size, names, sync
    number: int = ROOT
    offset: int = 0
    data: bytes = b""
    names: tuple[tuple[int, str, int | None], ...] = ()


@dataclass
class Log:
    """Everything a run did, which numbers are folders, and at which step it began: what was there
    before is told first."""

    steps: list[Step] = field(default_factory=list)
    folders: set[int] = field(default_factory=lambda: {ROOT})
    began: int = 0


class Recorder:
    """Puts itself between a process and its files below a folder."""

    def __init__(self, root: Path) -> None:
        self.log = Log()
        self._root = os.path.realpath(root)
        self._lock = threading.RLock()
        self._numbers: dict[tuple[int, int], int] = {}
        self._next = 1

    def install(self) -> None:
        """Replace the calls of `os` for the rest of this process."""
        self._real: dict[str, Callable[..., Any]] = {}
        for name in ("open", "mkdir", "unlink", "rmdir", "rename", "link"):
            self._wrap(os, name, getattr(self, f"_{name}"))
        for name in ("pwrite", "posix_fallocate", "ftruncate", "fsync", "fdatasync"):
            self._wrap(os, name, getattr(self, f"_{name}"))
        self._wrap(atomic, "_renameat2", self._renameat2)
        self._scan(self._root, ROOT)
        self.log.began = len(self.log.steps)

    def save(self, path: Path) -> None:
        path.write_bytes(pickle.dumps(self.log))

    def _wrap(self, module: Any, name: str, recording: Callable[..., Any]) -> None:
        self._real[name] = getattr(module, name)

        def call(*args: Any, **options: Any) -> Any:
            with self._lock:
                return recording(*args, **options)

        setattr(module, name, call)

    def _scan(self, folder: str, number: int) -> None:
        """Take in what is there already, as durable."""
        self._numbers[_identity(folder)] = number
        for entry in os.scandir(folder):
            own = self._number(entry.path)
            self._add(Step("names", names=((number, entry.name, own),)))
            if entry.is_dir(follow_symlinks=False):
                self.log.folders.add(own)
                self._scan(entry.path, own)
            else:
                self._add(Step("write", own, 0, Path(entry.path).read_bytes()))
                self._add(Step("sync", own))
        self._add(Step("sync", number))

    def _add(self, step: Step) -> None:
        self.log.steps.append(step)

    def _number(self, path: str) -> int:
        return self._numbers.setdefault(_identity(path), self._fresh())

    def _fresh(self) -> int:
        self._next += 1
        return self._next

    def _place(self, path: Any, dir_fd: int | None = None) -> tuple[int, str] | None:
        """Return the folder's number and the name that a path stands for; None outside of ours."""
        text = os.fspath(path)
        if isinstance(text, bytes):
            text = os.fsdecode(text)
        if dir_fd is not None and not os.path.isabs(text):
            text = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), text)
        folder, name = os.path.split(os.path.abspath(text))
        if not (folder == self._root or folder.startswith(self._root + os.sep)):
            return None
        return self._numbers[_identity(folder)], name

    def _open(self, path: Any, flags: int, *more: Any, dir_fd: int | None = None) -> int:
        place = self._place(path, dir_fd) if not isinstance(path, int) else None
        options = {} if dir_fd is None else {"dir_fd": dir_fd}
        if place is None or not flags & os.O_CREAT:
            return self._real["open"](path, flags, *more, **options)
        try:
            before = os.stat(path, follow_symlinks=False, **options)
        except FileNotFoundError:
            before = None
        fd = self._real["open"](path, flags, *more, **options)
        found = os.fstat(fd)
        if before is None:
            # A number that a removed file had is one again: it is another file now.
            own = self._numbers[found.st_dev, found.st_ino] = self._fresh()
            self._add(Step("names", names=((*place, own),)))
        elif flags & os.O_TRUNC:
            self._add(Step("size", self._numbers[found.st_dev, found.st_ino], 0))
        return fd

    def _mkdir(self, path: Any, *more: Any, **options: Any) -> None:
        self._real["mkdir"](path, *more, **options)
        place = self._place(path, options.get("dir_fd"))
        if place is not None:
            own = self._numbers[_identity(path)] = self._fresh()
            self.log.folders.add(own)
            self._add(Step("names", names=((*place, own),)))

    def _gone(self, name: str, path: Any, dir_fd: int | None) -> None:
        place = self._place(path, dir_fd)
        options = {} if dir_fd is None else {"dir_fd": dir_fd}
        self._real[name](path, **options)
        if place is not None:
            self._add(Step("names", names=((*place, None),)))

    def _unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._gone("unlink", path, dir_fd)

    def _rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._gone("rmdir", path, dir_fd)

    def _rename(self, source: Any, target: Any) -> None:
        own = self._number(os.fspath(source))
        self._real["rename"](source, target)
        self._moved(source, target, own, None)

    def _link(self, source: Any, target: Any) -> None:
        own = self._number(os.fspath(source))
        self._real["link"](source, target)
        place = self._place(target)
        if place is not None:
            self._add(Step("names", names=((*place, own),)))

    def _renameat2(self, source: Any, target: Any, flag: int) -> bool:
        own = self._number(os.fspath(source))
        other = self._number(os.fspath(target)) if os.path.lexists(target) else None
        done = self._real["_renameat2"](source, target, flag)
        if done:
            self._moved(source, target, own, other)
        return done

    def _moved(self, source: Any, target: Any, own: int, other: int | None) -> None:
        pairs = ((self._place(target), own), (self._place(source), other))
        names = tuple((*place, number) for place, number in pairs if place is not None)
        self._add(Step("names", names=names))

    def _of(self, fd: int) -> int | None:
        found = os.fstat(fd)
        return self._numbers.get((found.st_dev, found.st_ino))

    def _pwrite(self, fd: int, data: Any, offset: int) -> int:
        count = self._real["pwrite"](fd, data, offset)
        own = self._of(fd)
        if own is not None:
            self._add(Step("write", own, offset, bytes(memoryview(data)[:count])))
        return count

    def _posix_fallocate(self, fd: int, offset: int, size: int) -> None:
        self._real["posix_fallocate"](fd, offset, size)
        self._sized(fd)

    def _ftruncate(self, fd: int, size: int) -> None:
        self._real["ftruncate"](fd, size)
        self._sized(fd)

    def _sized(self, fd: int) -> None:
        own = self._of(fd)
        if own is not None:
            self._add(Step("size", own, os.fstat(fd).st_size))

    def _fsync(self, fd: int) -> None:
        self._real["fsync"](fd)
        self._synced(fd)

    def _fdatasync(self, fd: int) -> None:
        self._real["fdatasync"](fd)
        self._synced(fd)

    def _synced(self, fd: int) -> None:
        own = self._of(fd)
        if own is not None:
            self._add(Step("sync", own))


def _identity(path: Any) -> tuple[int, int]:
    found = os.stat(path, follow_symlinks=False)
    return found.st_dev, found.st_ino


def after_cut(log: Log, at: int, draw: random.Random) -> tuple[list[Step], int]:
    """Return what is on the disk of the first `at` steps, and how many of them are lost."""
    done = log.steps[:at]
    synced: dict[int, int] = {step.number: n for n, step in enumerate(done) if step.kind == "sync"}
    chance = draw.choice((0.1, 0.5, 0.9, 1.0))
    kept: list[Step] = []
    lost = 0
    for n, step in enumerate(done):
        if step.kind == "sync":
            continue
        numbers = [folder for folder, _, _ in step.names] or [step.number]
        if any(synced.get(number, -1) > n for number in numbers) or draw.random() >= chance:
            kept.append(step)
            continue
        lost += 1
        if step.kind == "write" and len(step.data) > SECTOR and draw.random() < 0.5:
            kept += _torn(step, draw)
    return kept, lost


def _torn(step: Step, draw: random.Random) -> list[Step]:
    return [
        Step("write", step.number, step.offset + start, step.data[start : start + SECTOR])
        for start in range(0, len(step.data), SECTOR)
        if draw.random() < 0.5
    ]


def materialise(steps: list[Step], folders: set[int], root: Path) -> None:
    """Make the tree that these steps amount to, in the empty folder `root`."""
    contents: dict[int, bytearray] = {}
    names: dict[int, dict[str, int]] = {}
    for step in steps:
        if step.kind == "write":
            held = contents.setdefault(step.number, bytearray())
            held.extend(bytes(max(0, step.offset - len(held))))
            held[step.offset : step.offset + len(step.data)] = step.data
        elif step.kind == "size":
            held = contents.setdefault(step.number, bytearray())
            del held[step.offset :]
            held.extend(bytes(step.offset - len(held)))
        for folder, name, number in step.names:
            if number is None:
                names.setdefault(folder, {}).pop(name, None)
            else:
                names.setdefault(folder, {})[name] = number
    _make(ROOT, root, contents, names, folders)


def _make(
    number: int,
    path: Path,
    contents: dict[int, bytearray],
    names: dict[int, dict[str, int]],
    folders: set[int],
) -> None:
    for name, own in names.get(number, {}).items():
        if own in folders:
            (path / name).mkdir()
            _make(own, path / name, contents, names, folders)
        else:
            (path / name).write_bytes(bytes(contents.get(own, b"")))
