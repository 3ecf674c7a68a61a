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
Leaving the `with` without having published, by an exception or not, removes what was staged.
"""

import errno
import os
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from lowbitcli.checkpoint import atomic
from lowbitcli.checkpoint.atomic import os_errors
from lowbitcli.checkpoint.directory import MANIFEST
from lowbitcli.checkpoint.shard_index import SUFFIX
from lowbitcli.errors import OutputError, UsageError
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
    ) -> None:
        """Check and lock the target and make a clean place to write in.

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
        self._fds: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        self._lock: int | None = None
        self._published = False
        atomic.refuse_sources(self.target, sources)
        self._check_target()
        self._made = atomic.make_parents(self.target)
        try:
            self._lock = atomic.take_lock(self._beside("lock"), self.target)
            self._restore()
            self._check_target()
            with os_errors(self.staging):
                atomic.remove(self.staging)
                if directory:
                    os.mkdir(self.staging)
        except BaseException:
            self._release()
            raise

    def check_space(self, needed: int) -> None:
        """Raise OutputError where the file system has less than `needed` bytes free."""
        atomic.check_space(self.target, needed)

    def create(self, name: str, size: int) -> None:
        """Make the file `name` (of a directory also `folder/name`) of exactly `size` bytes, its
        space taken.

        Raises:
            OutputError: there is no room or no permission.
        """
        self.check_space(size)
        path = self._path(name)
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
            self._release()

    def abort(self) -> None:
        """Remove what was staged; does nothing after `publish` or a second time."""
        self._close()
        if self._lock is not None:
            try:
                with os_errors(self.staging):
                    atomic.remove(self.staging)
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

    def _check_target(self) -> None:
        """Refuse what is there already, unless it may be replaced and is of the same kind."""
        where = safe(str(self.target))
        try:
            mode = os.lstat(self.target).st_mode
        except FileNotFoundError:
            return
        except OSError as error:
            raise atomic.output_error(self.target, error) from error
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise OutputError(
                f"{where}: neither a file nor a directory",
                hint="a pipe or a device holds no checkpoint",
            )
        if not self.force:
            raise OutputError(f"{where}: exists", hint="--force replaces it")
        if stat.S_ISDIR(mode) != self.directory:
            due, found = ("directory", "file") if self.directory else ("file", "directory")
            raise OutputError(f"{where}: is a {found}, the output is a {due}", hint="name another")
        if self.directory:
            self._refuse_to_replace(where)

    def _refuse_to_replace(self, where: str) -> None:
        """Refuse to replace what is no checkpoint: a slip in a path must not cost a home."""
        with os_errors(self.target):
            names = os.listdir(self.target)
        if names and not any(name == MANIFEST or name.endswith(SUFFIX) for name in names):
            raise OutputError(
                f"{where}: holds no checkpoint, and --force replaces nothing else",
                hint="remove it first, if it is meant to go",
            )

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
