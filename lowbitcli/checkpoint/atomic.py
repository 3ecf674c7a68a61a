"""The operations of the file system that `StagedOutput` is made of: lock, rename, sync, and their
errors in words.

    lock         flock on a file that its owner removes; after flock the file must still have its
    name new          renameat2(RENAME_NOREPLACE), else link and unlink: never puts one thing over
    another exchange     renameat2(RENAME_EXCHANGE): two names swapped at once; False where
    unsupported
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Container, Iterable, Iterator
from pathlib import Path

from lowbitcli.checkpoint import header
from lowbitcli.checkpoint.directory import MANIFEST
from lowbitcli.checkpoint.shard_index import SUFFIX
from lowbitcli.errors import BusyError, CheckpointError, OutputError, UsageError
from lowbitcli.tensors import safe

_NOREPLACE, _EXCHANGE = 1, 2  # linux/fs.h
_AT_FDCWD = -100  # fcntl.h
_JOURNAL = r"(share-\d+-of-\d+\.)?journal"
UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_ADVICE = {
    errno.ENOSPC: "free some space or write elsewhere",
    errno.EDQUOT: "the quota is used up: free some space or write elsewhere",
    errno.EFBIG: "larger than the limit: see `ulimit -f`, or write smaller shards",
    errno.EACCES: "no permission: write elsewhere, or ask who owns the folder",
    errno.EPERM: "not permitted: write elsewhere, or ask who owns the folder",
    errno.EROFS: "the file system is read-only: write elsewhere",
    errno.ENAMETOOLONG: "choose a shorter name; until it is complete it carries 9 characters more",
    errno.ENOENT: "a part of the path is gone, or is where nothing can be made",
    errno.ENOTDIR: "a part of the path is a file",
    errno.EIO: "the disk or its connection fails: do not trust what is on it",
    errno.EMFILE: "too many open files: see `ulimit -n`, or write fewer shards",
}


def output_error(path: Path, error: OSError, needed: int = 0) -> OutputError:
    """Return the error for the user that an OSError on `path` amounts to."""
    message = f"{safe(str(path))}: {error.strerror or error}"
    if error.errno == errno.ENOSPC:
        with contextlib.suppress(OSError):
            message += f": {needed} bytes needed, {free_bytes(path.parent)} free"
    return OutputError(message, hint=_ADVICE.get(error.errno or 0, ""))


@contextlib.contextmanager
def os_errors(path: Path, needed: int = 0) -> Iterator[None]:
    """Turn an OSError on `path` into an OutputError."""
    try:
        yield
    except OSError as error:
        raise output_error(path, error, needed) from error


def free_bytes(folder: Path) -> int:
    """Return the bytes that this user may still write in the file system of `folder`."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def check_space(target: Path, needed: int) -> None:
    """Raise OutputError where less than `needed` bytes are free beside `target`."""
    with os_errors(target.parent):
        free = free_bytes(target.parent)
    if needed > free:
        raise OutputError(
            f"{safe(str(target))}: {needed} bytes are needed, {free} are free",
            hint=_ADVICE[errno.ENOSPC],
        )


def beside(target: Path, suffix: str) -> Path:
    """Return the path of what a run keeps beside its output."""
    return target.with_name(f".{target.name}.{suffix}")


def take_lock(path: Path, holder_of: Path, *, shared: bool = False, waits: bool = False) -> int:
    """Lock the file at `path`, made where there is none, and return its descriptor; a `shared` lock
    keeps away those that want it alone, one that `waits` is never busy.

    Raises:
        BusyError: another process holds it; `holder_of` is what it is said to be writing.
        OutputError: it cannot be made, or locks are not supported there.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if waits else fcntl.LOCK_NB)
    while True:
        with os_errors(path):
            fd = os.open(path, flags, 0o600)
        try:
            fcntl.flock(fd, kind)
            there = os.stat(path, follow_symlinks=False)
        except FileNotFoundError:
            there = None
        except BlockingIOError as error:
            os.close(fd)
            raise BusyError(
                f"{safe(str(holder_of))}: another run is writing it",
                hint="wait for it, or stop it",
            ) from error
        except OSError as error:
            os.close(fd)
            raise output_error(path, error) from error
        if there is not None and os.path.samestat(there, os.fstat(fd)):
            return fd
        # Its owner removed it between our open and our flock.
        os.close(fd)


def drop_lock(fd: int, path: Path) -> None:
    """Remove a lock's file while it is still held, then let go."""
    with contextlib.suppress(OSError):
        os.unlink(path)
    os.close(fd)


def drop_shared_lock(fd: int, path: Path) -> None:
    """Let go of a shared lock; the last of its holders removes the file."""
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd)):
            os.unlink(path)
    os.close(fd)


def rename_new(source: Path, target: Path) -> None:
    """Rename `source` to `target`; FileExistsError where there is something, which then stays."""
    if _renameat2(source, target, _NOREPLACE):
        return
    if stat.S_ISDIR(os.lstat(source).st_mode):
        # Replaces an empty directory at most.
        os.rename(source, target)
    else:
        os.link(source, target)
        os.unlink(source)


def exchange(one: Path, other: Path) -> bool:
    """Swap two names at once; return False, with nothing done, where that is not supported."""
    return _renameat2(one, other, _EXCHANGE)


def remove(path: Path) -> None:
    """Remove a file, a link or a directory with what is in it; nothing there is well."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable.

    Raises:
        OutputError: the file system fails.
    """
    with os_errors(folder):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            # Some network file systems cannot sync a folder, and need not.
            if error.errno not in UNSUPPORTED:
                raise
        finally:
            os.close(fd)


def make_parents(target: Path) -> list[Path]:
    """Make the folders that `target` needs and return them, the innermost first."""
    made: list[Path] = []
    missing = target.parent
    while not os.path.lexists(missing):
        made.append(missing)
        missing = missing.parent
    with os_errors(target.parent):
        os.makedirs(target.parent, exist_ok=True)
    return made


def refuse_sources(target: Path, sources: Iterable[str | os.PathLike[str]]) -> None:
    """Raise UsageError where writing `target` would touch a source; `target` is a real path."""
    where = safe(str(target))
    for source in sources:
        real = Path(os.path.realpath(source))
        if target == real or _same(target, real):
            raise UsageError(f"{where}: is the source", hint="write to another place")
        if target in real.parents:
            raise UsageError(f"{where}: holds the source", hint="write to another place")
        if real.is_dir() and any(_same(target, Path(x.path)) for x in os.scandir(real)):
            raise UsageError(
                f"{where}: is a part of the source {safe(str(real))}", hint="write to another place"
            )
        if real.is_dir() and any(_same(folder, real) for folder in target.parents):
            raise UsageError(
                f"{where}: lies in the source {safe(str(real))}",
                hint="write beside it: what is in its folders is taken for a part of the model",
            )


def check_target(target: Path, *, directory: bool, force: bool) -> None:
    """Refuse what is there already, unless it may be replaced and is of the same kind.

    Raises:
        OutputError: it is refused.
    """
    where = safe(str(target))
    try:
        mode = os.lstat(target).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise output_error(target, error) from error
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OutputError(
            f"{where}: neither a file nor a directory",
            hint="a pipe or a device holds no checkpoint",
        )
    if not force:
        raise OutputError(f"{where}: exists", hint="--force replaces it")
    if stat.S_ISDIR(mode) != directory:
        due, found = ("directory", "file") if directory else ("file", "directory")
        raise OutputError(f"{where}: is a {found}, the output is a {due}", hint="name another")
    if directory:
        _refuse_to_replace(target, where)
    elif not _is_safetensors(target):
        raise OutputError(
            f"{where}: is no safetensors file, and --force replaces nothing else",
            hint="remove it first, if it is meant to go",
        )


def _is_safetensors(path: Path) -> bool:
    """Is a file one by its name or by its header? An empty one is nobody's loss."""
    if path.name.endswith(SUFFIX):
        return True
    with os_errors(path):
        if not os.stat(path).st_size:
            return True
    try:
        header.read(path)
    except CheckpointError:
        return False
    return True


def _refuse_to_replace(target: Path, where: str) -> None:
    """Refuse to replace what is no checkpoint: a slip in a path must not cost a home."""
    with os_errors(target):
        names = os.listdir(target)
    if names and not any(name == MANIFEST or name.endswith(SUFFIX) for name in names):
        raise OutputError(
            f"{where}: holds no checkpoint, and --force replaces nothing else",
            hint="remove it first, if it is meant to go",
        )


def prune(folder: Path, kept: Container[str]) -> None:
    """Remove the files of a folder and of those in it whose path from it is not in `kept`."""
    for inside, _, names in os.walk(folder):
        for name in names:
            path = Path(inside, name)
            if str(path.relative_to(folder)) not in kept:
                remove(path)


def journals(target: Path) -> list[Path]:
    """Return the journals beside an output: that of a run, and those of shares of one."""
    start = f".{target.name}."
    found = (name for name in os.listdir(target.parent) if name.startswith(start))
    kept = (name for name in found if re.fullmatch(_JOURNAL, name.removeprefix(start)))
    return [target.with_name(name) for name in sorted(kept)]


def remove_journals(target: Path) -> None:
    """Remove what is known of an output that was being written."""
    for path in journals(target):
        remove(path)


def tidy(target: Path) -> None:
    """Remove what a crash just after publishing left beside a complete output."""
    target = Path(os.path.realpath(target))
    partial, lock, setup = (beside(target, one) for one in ("partial", "lock", "setup"))
    try:
        there = (path for path in (partial, lock, setup) if os.path.lexists(path))
        left = [*journals(target), *there]
    except OSError:
        return
    if not left:
        return
    with contextlib.suppress(OSError, OutputError, BusyError):
        fd = take_lock(lock, target)
        try:
            remove_journals(target)
            remove(partial)
            remove(setup)
        finally:
            drop_lock(fd, lock)


def _same(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _renameat2(source: Path, target: Path, flag: int) -> bool:
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flag) == 0:
        return True
    code = ctypes.get_errno()
    if code in UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(target))
