"""`Journal`: proofs of what is finished, kept beside an output that is being written.

    line     16 digits of xxh3 over the rest, a space, JSON, a newline
    first    {"format": 1, "plan": digest}: whose proofs these are; of a share also what was asked
    further  one for each finished job: checksums of what was read and of what was written

A line is appended when the data that it speaks of is durable, so it is true whenever the machine
stops. The last one may be torn: reading ends at the first line that is not what it says, and
writing goes on there. Nobody is believed: a run that goes on hashes everything again.
"""

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from lowbitcli.checkpoint.atomic import journals, os_errors, output_error

FORMAT = 1
_MOST = 4 << 30  # a journal longer than this is not ours
_DIGITS = 16
_LONGEST = 64 << 20  # of a first line, which holds what was asked
_NONE_OF_OURS = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EACCES, errno.EPERM)


class Journal:
    """A journal that is open for appending."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd
        self._end = os.lseek(fd, 0, os.SEEK_END)

    @classmethod
    def begin(
        cls, path: Path, plan_digest: str, asked: Mapping[str, Any] | None = None
    ) -> "Journal":
        """Make a new journal for a plan; `asked` is from what it can be planned again.

        Raises:
            OutputError: it cannot be written.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with os_errors(path):
            journal = cls(path, os.open(path, flags, 0o600))
        said = {} if asked is None else {"asked": dict(asked)}
        journal.append([{"format": FORMAT, "plan": plan_digest, **said}])
        return journal

    @classmethod
    def resume(cls, path: Path, plan_digest: str) -> "tuple[Journal, list[dict[str, Any]]] | None":
        """Open the journal of a plan and return it with its proofs; None where there is none, or
        it is another plan's or another user's."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            found = os.fstat(fd)
            ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
            lines, end = _read(fd) if ours and found.st_size <= _MOST else ([], 0)
            if not lines or _plan_in(lines[0]) != plan_digest:
                os.close(fd)
                return None
            os.ftruncate(fd, end)
            return cls(path, fd), lines[1:]
        except OSError:
            os.close(fd)
            return None

    def append(self, proofs: Iterable[dict[str, Any]]) -> None:
        """Add lines, and wait until they are on the disk.

        Raises:
            OutputError: they are not.
        """
        data = b"".join(map(_line, proofs))
        with os_errors(self.path, len(data)):
            view = memoryview(data)
            while len(view):
                count = os.pwrite(self._fd, view, self._end)
                view, self._end = view[count:], self._end + count
            os.fdatasync(self._fd)

    def close(self) -> None:
        """Close it; it stays where it is."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def read(path: Path) -> tuple[str, dict[str, Any], list[dict[str, Any]]] | None:
    """Return the plan, what was asked, and the proofs of a journal that is there, whoever writes
    it; None where it is none or another user's.

    Raises:
        OutputError: the disk fails.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in _NONE_OF_OURS:
            return None
        raise output_error(path, error) from error
    try:
        with os_errors(path):
            found = os.fstat(fd)
            ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
            lines = _read(fd)[0] if ours and found.st_size <= _MOST else []
    finally:
        os.close(fd)
    plan = _plan_in(lines[0]) if lines else None
    if plan is None:
        return None
    asked = lines[0].get("asked")
    return plan, asked if isinstance(asked, dict) else {}, lines[1:]


def is_for(target: Path, plan: str) -> bool:
    """Is what is written beside `target` written for this plan, as its journals say?

    Raises:
        OutputError: the disk fails.
    """
    for path in journals(target):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            if error.errno in _NONE_OF_OURS:
                continue
            raise output_error(path, error) from error
        with os_errors(path), os.fdopen(fd, "rb") as file:
            digits, _, text = file.readline(_LONGEST).rstrip(b"\n").partition(b" ")
        with contextlib.suppress(ValueError, RecursionError):
            said = json.loads(text) if digits == _digits(text) else None
            if isinstance(said, dict) and _plan_in(said) == plan:
                return True
    return False


def _digits(text: bytes) -> bytes:
    return xxhash.xxh3_64(text).hexdigest().encode()


def _plan_in(line: dict[str, Any]) -> str | None:
    plan = line.get("plan")
    return plan if line.get("format") == FORMAT and isinstance(plan, str) else None


def _line(proof: dict[str, Any]) -> bytes:
    text = json.dumps(proof, separators=(",", ":")).encode()
    return _digits(text) + b" " + text + b"\n"


def _read(fd: int) -> tuple[list[dict[str, Any]], int]:
    """Return the lines that are whole, and where the last of them ends."""
    lines, end = [], 0
    with os.fdopen(os.dup(fd), "rb") as file:
        file.seek(0)
        for raw in file:
            digits, _, text = raw.rstrip(b"\n").partition(b" ")
            if not raw.endswith(b"\n") or digits != _digits(text):
                break
            try:
                proof = json.loads(text)
            except (ValueError, RecursionError):
                break
            if not isinstance(proof, dict):
                break
            lines.append(proof)
            end += len(raw)
    return lines, end
