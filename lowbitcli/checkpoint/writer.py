"""`StagedOutput`: a file or a directory that appears under its name whole, or not at all.

    lock      `.<name>.lock`, flock, held to the end: a second run is refused
    stage     `.<name>.partial` beside the target, its space taken with posix_fallocate
    publish   fsync every file and the folder, one rename, fsync the parent folder

| target | how it is renamed |
|---|---|
| new | renameat2(RENAME_NOREPLACE), else link: overwrites nothing |
| a file, forced | rename |
| a directory, forced | renameat2(RENAME_EXCHANGE), else the old one moves to `.<name>.old` |

A crash between the last two renames is put right by the next run.
Leaving the `with` without having published removes what was staged, after an error too. Where a
`plan` is named there is also `.<name>.journal`; then an interruption leaves both, and so does a
crash, and the next run of the same plan goes on with what is there.
"""

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from lowbitcli.checkpoint import atomic
from lowbitcli.checkpoint.atomic import os_errors
from lowbitcli.checkpoint.journal import Journal
from lowbitcli.errors import OutputError, StoppedError, UsageError
from lowbitcli.tensors import safe

_COPY = 8 << 20


class StagedOutput:
    """An output being written; use it in a `with`, and `publish` at its end."""

    def __init__(
        self,
        target: str | os.PathLike[str],
        *,
        directory: bool,
        force: bool = False,
        sources: Iterable[str | os.PathLike[str]] = (),
        plan: str | None = None,
        resume: bool = True,
    ) -> None:
        """Check and lock the target and make a place to write in: a clean one, or with `resume`
        what an earlier run of the same `plan` left.

        Raises:
            UsageError: the target is, holds, or is a part of one of `sources`.
            OutputError: there is something already, or it cannot be written to.
            BusyError: another run writes it.
        """
        asked = Path(target)
        if asked.name in ("", "..") or "\0" in str(asked):
            raise UsageError(f"{safe(str(asked))}: not a name for an output")
        if os.path.islink(asked) and not os.path.exists(asked):
            raise OutputError(f"{safe(str(asked))}: a link to nothing", hint="remove it first")
        # Through links: what they lead to is replaced, the link stays.
        self.target = Path(os.path.realpath(asked))
        self.directory = directory
        self.force = force
        self.staging = self._beside("partial")
        self._old = self._beside("old")
        self.journal: Journal | None = None
        self.goes_on = False  # is there what an earlier run left?
        self.proofs: list[dict[str, Any]] = []  # of that
        self._fds: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        self._lock: int | None = None
        self._published = False
        atomic.refuse_sources(self.target, sources)
        atomic.check_target(self.target, directory=directory, force=force)
        self._made = atomic.make_parents(self.target)
        try:
            self._lock = atomic.take_lock(self._beside("lock"), self.target)
            self._restore()
            atomic.check_target(self.target, directory=directory, force=force)
            if plan is None or not resume or not self._goes_on(plan):
                self._start(plan)
        except BaseException:
            self._close()
            self._release()
            raise

    def _goes_on(self, plan: str) -> bool:
        """Open what an earlier run of this plan left, if it did and it is ours."""
        try:
            found = os.lstat(self.staging)
        except OSError:
            return False
        kind = stat.S_ISDIR if self.directory else stat.S_ISREG
        if not kind(found.st_mode) or found.st_uid != os.geteuid():
            return False
        resumed = Journal.resume(self._beside("journal"), plan)
        if resumed is None:
            return False
        self.journal, self.proofs = resumed
        self.goes_on = True
        return True

    def _start(self, plan: str | None) -> None:
        with os_errors(self.staging):
            atomic.remove(self._beside("journal"))
            atomic.remove(self.staging)
            if self.directory:
                os.mkdir(self.staging)
        if plan is not None:
            self.journal = Journal.begin(self._beside("journal"), plan)

    def check_space(self, needed: int) -> None:
        """Raise OutputError where the file system has less than `needed` bytes free."""
        atomic.check_space(self.target, needed)

    def create(self, name: str, size: int) -> None:
        """Make the file `name` (of a directory also `folder/name`) of exactly `size` bytes, its
        space taken.

        Raises:
            OutputError: there is no room or no permission.
        """
        path = self._path(name)
        if self.journal is not None and self._reopen(name, path, size):
            return
        self.check_space(size)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os_errors(path, size):
            if "/" in name:
                path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, flags, 0o666)
            self._fds[name], self._sizes[name] = fd, size
            if not size:
                return
            try:
                os.posix_fallocate(fd, 0, size)
            except OSError as error:
                if error.errno not in atomic.UNSUPPORTED:
                    raise
                os.ftruncate(fd, size)

    def _reopen(self, name: str, path: Path, size: int) -> bool:
        """Take a file that an earlier run left, if it has this size; remove what is in the way."""
        with os_errors(path):
            try:
                found = os.lstat(path)
            except (FileNotFoundError, NotADirectoryError):
                return False
            if name in self._fds:
                return False  # twice in one run: O_EXCL refuses it
            if not stat.S_ISREG(found.st_mode) or found.st_size != size or found.st_nlink != 1:
                atomic.remove(path)
                return False
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            self._fds[name], self._sizes[name] = fd, size
        return True

    def write(self, name: str, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Write `data` at `offset` of a created file; any number of threads may.

        Raises:
            OutputError: the file system refuses.
            ValueError: it would not fit in the file.
        """
        view = memoryview(data).cast("B")
        if offset < 0 or offset + len(view) > self._sizes[name]:
            raise ValueError(f"{name} has no bytes {offset} to {offset + len(view)}")
        path = self._path(name)
        with os_errors(path, len(view)):
            while len(view):
                count = os.pwrite(self._fds[name], view, offset)
                if not count:
                    raise OSError(errno.EIO, "nothing was written")
                view, offset = view[count:], offset + count

    def read(self, name: str, offset: int, length: int) -> bytearray:
        """Return what was written to a created file.

        Raises:
            OutputError: it cannot be read back.
        """
        buffer = bytearray(length)
        view = memoryview(buffer)
        with os_errors(self._path(name), 0):
            while len(view):
                count = os.preadv(self._fds[name], [view], offset)
                if not count:
                    raise OSError(errno.EIO, "the file is shorter than what was written")
                view, offset = view[count:], offset + count
        return buffer

    def write_file(self, name: str, data: bytes) -> None:
        """Make the file `name` with `data` in it.

        Raises:
            OutputError: there is no room or no permission.
        """
        self.create(name, len(data))
        self.write(name, 0, data)

    def copy_file(self, name: str, source: str | os.PathLike[str]) -> None:
        """Make the file `name` with the bytes of the regular file `source`.

        Raises:
            OutputError: one cannot be read, changes meanwhile, or the other cannot be written.
        """
        with os_errors(Path(source)):
            fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, "rb", buffering=0) as file:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise OutputError(f"{safe(str(source))}: not a regular file, not copied")
            self.create(name, found.st_size)
            offset = 0
            while offset < found.st_size:
                with os_errors(Path(source)):
                    piece = file.read(min(_COPY, found.st_size - offset))
                if not piece:
                    raise OutputError(f"{safe(str(source))}: changed while being copied")
                self.write(name, offset, piece)
                offset += len(piece)

    def sync(self, name: str) -> None:
        """Wait until what was written to a created file is on the disk.

        Raises:
            OutputError: it is not, and never will be.
        """
        with os_errors(self._path(name), 0):
            os.fdatasync(self._fds[name])

    def forget(self, name: str) -> None:
        """Make the next `read` of a synced file come from the disk, where the system can."""
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._fds[name], 0, 0, os.POSIX_FADV_DONTNEED)

    def publish(self) -> None:
        """Make everything durable and give it its name.

        Raises:
            OutputError: it could not be; what had the name before still has it.
        """
        if not self.directory and list(self._fds) != [self.target.name]:
            raise ValueError(f"one file {self.target.name} is due, not {list(self._fds)}")
        for name, fd in self._fds.items():
            with os_errors(self._path(name)):
                os.fsync(fd)
        if self.journal is not None and self.directory:
            with os_errors(self.staging):
                atomic.prune(self.staging, self._fds)
        self._close()
        if self.directory:
            for folder, _, _ in os.walk(self.staging):
                atomic.sync_folder(Path(folder))
        with os_errors(self.target):
            self._rename()
        self._published = True
        try:
            atomic.sync_folder(self.target.parent)
            # Only now: until the new names are durable, a power cut may bring the old ones back.
            if self.directory and self.force:
                shutil.rmtree(self.staging, ignore_errors=True)
                shutil.rmtree(self._old, ignore_errors=True)
        finally:
            with contextlib.suppress(OSError):
                atomic.remove(self._beside("journal"))
            self._release()

    def suspend(self) -> None:
        """Leave what was staged and its journal for the next run."""
        self._close()
        self._release()

    def abort(self) -> None:
        """Remove what was staged; does nothing after `publish` or a second time."""
        self._close()
        if self._lock is not None:
            try:
                with os_errors(self.staging):
                    atomic.remove(self.staging)
                    atomic.remove(self._beside("journal"))
            finally:
                self._release()

    def __enter__(self) -> "StagedOutput":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.journal is not None and isinstance(error, KeyboardInterrupt | StoppedError):
            self.suspend()
        else:
            self.abort()

    def _beside(self, suffix: str) -> Path:
        return self.target.with_name(f".{self.target.name}.{suffix}")

    def _path(self, name: str) -> Path:
        if not self.directory:
            if name != self.target.name:
                raise ValueError(f"the one file of this output is {self.target.name}, not {name}")
            return self.staging
        if "\0" in name or any(step in ("", ".", "..") for step in name.split("/")):
            raise ValueError(f"{name!r} is not a path inside the output")
        return self.staging / name

    def _restore(self) -> None:
        """Put right what a crash in the middle of a replacement left."""
        with os_errors(self._old):
            if os.path.lexists(self.target):
                atomic.remove(self._old)
            elif os.path.lexists(self._old):
                os.rename(self._old, self.target)

    def _rename(self) -> None:
        if not self.force or not os.path.lexists(self.target):
            atomic.rename_new(self.staging, self.target)
        elif not self.directory:
            os.rename(self.staging, self.target)
        elif not atomic.exchange(self.staging, self.target):
            os.rename(self.target, self._old)
            try:
                os.rename(self.staging, self.target)
            except OSError:
                os.rename(self._old, self.target)
                raise

    def _close(self) -> None:
        if self.journal is not None:
            self.journal.close()
        while self._fds:
            os.close(self._fds.popitem()[1])

    def _release(self) -> None:
        if self._lock is not None:
            fd, self._lock = self._lock, None
            atomic.drop_lock(fd, self._beside("lock"))
        for folder in self._made if not self._published else ():
            try:
                os.rmdir(folder)
            except OSError:
                return
