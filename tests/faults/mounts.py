"""File systems of a test's own: a small one, a read-only one; in a mount namespace, so that nobody
else sees them and they go with the process."""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

_NEWNS, _NEWUSER = 0x00020000, 0x10000000  # linux/sched.h
_RDONLY, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 32, 4096, 16384, 1 << 18  # linux/mount.h
_DETACH = 2
_libc = ctypes.CDLL(None, use_errno=True)


def isolate() -> bool:
    """Give this process mounts of its own; return whether it may make some."""
    user, group = os.getuid(), os.getgid()
    flags = _NEWNS if user == 0 else _NEWNS | _NEWUSER
    if _libc.unshare(flags):
        return False
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    return _mount("none", "/", "", _REC | _PRIVATE, "")


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[bool]:
    """Let `folder` be a file system of `size` bytes; yields False where that is not allowed."""
    with _mounted(folder, _mount("lowbit", str(folder), "tmpfs", 0, f"size={size}")) as done:
        yield done


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[bool]:
    """Let `folder` be read-only; yields False where that is not allowed."""
    done = _mount(str(folder), str(folder), "", _BIND, "")
    with _mounted(folder, done) as made:
        yield made and _mount("", str(folder), "", _BIND | _REMOUNT | _RDONLY, "")


@contextlib.contextmanager
def _mounted(folder: Path, done: bool) -> Iterator[bool]:
    try:
        yield done
    finally:
        if done:
            _libc.umount2(os.fsencode(folder), _DETACH)


def _mount(source: str, target: str, kind: str, flags: int, data: str) -> bool:
    words = [word.encode() or None for word in (source, target, kind)]
    return _libc.mount(*words, ctypes.c_ulong(flags), data.encode() or None) == 0
