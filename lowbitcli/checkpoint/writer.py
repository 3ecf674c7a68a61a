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
import os
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from lowbitcli.checkpoint import atomic
from lowbitcli.checkpoint.atomic import beside, os_errors
from lowbitcli.checkpoint.files import StagedFiles
from lowbitcli.checkpoint.journal import Journal
from lowbitcli.errors import OutputError, StoppedError, UsageError, WorkerLostError
from lowbitcli.tensors import safe

Own = TypeVar("Own", bound="StagedOutput")

# After these what is proved stays for the next run: the output was not at fault.
_LEAVES = (KeyboardInterrupt, StoppedError, WorkerLostError)


class StagedOutput(StagedFiles):
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
        real = Path(os.path.realpath(asked))
        super().__init__(real, beside(real, "partial"), directory=directory)
        self.force = force
        self._old = beside(self.target, "old")
        self.journal: Journal | None = None
        self.proofs: list[dict[str, Any]] = []  # of what an earlier run left
        self._lock: int | None = None
        self._published = False
        atomic.refuse_sources(self.target, sources)
        atomic.check_target(self.target, directory=directory, force=force)
        self._made = atomic.make_parents(self.target)
        try:
            self._take_lock()
            self._restore()
            atomic.check_target(self.target, directory=directory, force=force)
            self._prepare(plan, resume)
        except BaseException:
            self._close()
            self._release()
            raise

    def _take_lock(self) -> None:
        self._lock = atomic.take_lock(beside(self.target, "lock"), self.target)

    def _prepare(self, plan: str | None, resume: bool) -> None:
        """Make a place to write in, or take what an earlier run left.

        Raises:
            UsageError: shares of this output were begun, and this is not to begin anew.
        """
        self._discard_shares(wanted=self.force or not resume)
        if plan is None or not resume or not self._goes_on(plan):
            self._start(plan)

    def _discard_shares(self, *, wanted: bool) -> None:
        """Refuse to throw away what others wrote of it, unless that is what is wanted."""
        own = beside(self.target, "journal")
        with os_errors(self.target.parent):
            begun = [path for path in atomic.journals(self.target) if path != own]
        if begun and not wanted:
            names = ", ".join(path.name.split(".")[-2] for path in begun)
            raise UsageError(
                f"{safe(str(self.target))}: begun in shares ({names}), which this would discard",
                hint="do the shares that are missing, or lowbit finish; --force starts over",
            )
        with os_errors(self.target.parent):
            atomic.remove(beside(self.target, "setup"))

    def _is_staged(self) -> bool:
        """Is there a staged output of the right kind that is ours?"""
        try:
            found = os.lstat(self.staging)
        except OSError:
            return False
        kind = stat.S_ISDIR if self.directory else stat.S_ISREG
        return kind(found.st_mode) and found.st_uid == os.geteuid()

    def _goes_on(self, plan: str) -> bool:
        """Open what an earlier run of this plan left, if it did and it is ours."""
        if not self._is_staged():
            return False
        resumed = Journal.resume(beside(self.target, "journal"), plan)
        if resumed is None:
            return False
        self.journal, self.proofs = resumed
        self.goes_on = True
        return True

    def _start(self, plan: str | None) -> None:
        with os_errors(self.staging):
            atomic.remove_journals(self.target)
            atomic.remove(self.staging)
            if self.directory:
                os.mkdir(self.staging)
        if plan is not None:
            self.journal = Journal.begin(beside(self.target, "journal"), plan)

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
        if self.goes_on and self.directory:
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
            # The folders that were made for it are names too, each in the one around it.
            for folder in (self.target.parent, *(made.parent for made in self._made)):
                atomic.sync_folder(folder)
            # Only now: until the new names are durable, a power cut may bring the old ones back.
            if self.directory and self.force:
                shutil.rmtree(self.staging, ignore_errors=True)
                shutil.rmtree(self._old, ignore_errors=True)
        finally:
            with contextlib.suppress(OSError):
                atomic.remove_journals(self.target)
                atomic.remove(beside(self.target, "setup"))
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
                    atomic.remove_journals(self.target)
            finally:
                self._release()

    def __enter__(self: Own) -> Own:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.journal is not None and isinstance(error, _LEAVES):
            self.suspend()
        else:
            self.abort()

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
        self.close_files()

    def _release(self) -> None:
        if self._lock is not None:
            fd, self._lock = self._lock, None
            atomic.drop_lock(fd, beside(self.target, "lock"))
        for folder in self._made if not self._published else ():
            try:
                os.rmdir(folder)
            except OSError:
                return
