"""The files of an output that is being written: made or found, written and read at offsets by any
number of threads, synced.

    StagedFiles     what every output is made of
    AttachedFiles   those that another process of the run has made, to be written to here
"""

import contextlib
import errno
import os
import stat
from pathlib import Path
from types import TracebackType

from lowbitcli.checkpoint import atomic
from lowbitcli.checkpoint.atomic import os_errors
from lowbitcli.checkpoint.runs import fill
from lowbitcli.errors import OutputError
from lowbitcli.tensors import safe

_COPY = 8 << 20


class StagedFiles:
    """Files below `staging`, a directory, or `staging` itself where the output is one file."""

    def __init__(self, target: Path, staging: Path, *, directory: bool) -> None:
        self.target, self.staging, self.directory = target, staging, directory
        self.goes_on = False  # is there what an earlier run, or another process, made?
        self._fds: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        self._paths: dict[str, Path] = {}

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
        if self.goes_on and self._reopen(name, path, size):
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

    def size(self, name: str) -> int:
        """Return the bytes of a created file."""
        return self._sizes[name]

    def read(self, name: str, offset: int, length: int) -> bytearray:
        """Return what was written to a created file.

        Raises:
            OutputError: it cannot be read back.
        """
        buffer = bytearray(length)
        self.read_into(name, offset, memoryview(buffer))
        return buffer

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with what was written to a created file.

        Raises:
            OutputError: it cannot be read back.
        """
        with os_errors(self._path(name), 0):
            try:
                fill(self._fds[name], offset, [buffer])
            except EOFError:
                raise OSError(errno.EIO, "the file is shorter than what was written") from None

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

    def close_files(self) -> None:
        """Close what is open; it stays where it is."""
        while self._fds:
            os.close(self._fds.popitem()[1])

    def _path(self, name: str) -> Path:
        found = self._paths.get(name)
        if found is None:
            found = self._paths[name] = self._checked(name)
        return found

    def _checked(self, name: str) -> Path:
        if not self.directory:
            if name != self.target.name:
                raise ValueError(f"the one file of this output is {self.target.name}, not {name}")
            return self.staging
        if "\0" in name or any(step in ("", ".", "..") for step in name.split("/")):
            raise ValueError(f"{name!r} is not a path inside the output")
        return self.staging / name


class AttachedFiles(StagedFiles):
    """Files that exist already, all of the right size; use it in a `with`."""

    def __init__(self, target: Path, staging: Path, *, directory: bool) -> None:
        super().__init__(target, staging, directory=directory)
        self.goes_on = True

    def create(self, name: str, size: int) -> None:
        """Open the file `name`, which has `size` bytes.

        Raises:
            OutputError: it is not there, or another one.
        """
        path = self._path(name)
        if not self._reopen(name, path, size):
            raise OutputError(
                f"{safe(str(path))}: not there, or not of {size} bytes",
                hint="does every machine see the same file system under this path?",
            )

    def _reopen(self, name: str, path: Path, size: int) -> bool:
        """Open a file if it is the one that is meant; nothing is removed from here."""
        with os_errors(path):
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_size != size:
                os.close(fd)
                return False
        self._fds[name], self._sizes[name] = fd, size
        return True

    def __enter__(self) -> "AttachedFiles":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close_files()
