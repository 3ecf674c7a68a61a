"""An output that several machines write, each its share of the tensors, on one file system.

    `.<name>.lock`                 flock: shared by the shares, alone for a whole run or the finish
    `.<name>.setup`                flock: one at a time makes the files
    `.<name>.share-I-of-N.lock`    flock: nobody else writes this share
    `.<name>.share-I-of-N.journal` what of this share is proved, and what was asked for
    `.<name>.partial`              where all of them write, as a whole run does

Nothing is removed by a share that ends, however it ends, but what it alone has made and nothing is
proved of. The last one, or whoever asks for it, takes the lock alone and publishes.
"""

import contextlib
import fcntl
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from lowbitcli.checkpoint import atomic, journal
from lowbitcli.checkpoint.atomic import beside, os_errors
from lowbitcli.checkpoint.journal import Journal
from lowbitcli.checkpoint.writer import StagedOutput
from lowbitcli.errors import BusyError, OutputError, UsageError
from lowbitcli.tensors import safe

_NAME = re.compile(r"\.share-(\d+)-of-(\d+)\.journal$")


def found(target: Path) -> dict[tuple[int, int], Path]:
    """Return (index, of how many) -> journal, for the shares of an output that were begun."""
    with os_errors(target.parent):
        paths = atomic.journals(target)
    matches = ((_NAME.search(path.name), path) for path in paths)
    return {(int(m[1]), int(m[2])): path for m, path in matches if m is not None}


def asked(target: Path) -> Mapping[str, Any]:
    """Return what was asked for when the shares of an output were begun.

    Raises:
        OutputError: there are none, or they do not say.
    """
    target = Path(os.path.realpath(target))
    for path in found(target).values():
        read = journal.read(path)
        if read is not None and read[1]:
            return read[1]
    raise OutputError(
        f"{safe(str(target))}: no shares of it are here",
        hint="it is complete, or was not written with --num-shards",
    )


class SharedOutput(StagedOutput):
    """One share of an output; call `settle` when its files are made."""

    def __init__(
        self,
        target: str | os.PathLike[str],
        share: tuple[int, int],
        asked_for: Mapping[str, Any],
        *,
        directory: bool,
        force: bool = False,
        sources: Iterable[str | os.PathLike[str]] = (),
        plan: str,
        resume: bool = True,
    ) -> None:
        """Check and lock the share and make a place to write in, or take the one that is there.

        Raises:
            UsageError: other shares were begun with another plan, or another number of them.
            BusyError: another run writes this share, or all of it.
            OutputError: see StagedOutput.
        """
        self._name = f"share-{share[0]}-of-{share[1]}"
        self._share, self._asked = share, asked_for
        self._setup: int | None = None
        self._own: int | None = None
        self._is_alone = False
        super().__init__(
            target, directory=directory, force=force, sources=sources, plan=plan, resume=resume
        )

    def settle(self) -> None:
        """Let other shares begin: the files are made."""
        if self._setup is not None:
            fd, self._setup = self._setup, None
            os.close(fd)  # its file stays to the end: others may be waiting for it

    def _take_lock(self) -> None:
        lock = beside(self.target, "lock")
        self._setup = atomic.take_lock(beside(self.target, "setup"), self.target, waits=True)
        try:
            self._lock = atomic.take_lock(lock, self.target)
            self._is_alone = True
            fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BusyError:
            self._lock = atomic.take_lock(lock, self.target, shared=True)
        own = beside(self.target, f"{self._name}.lock")
        self._own = atomic.take_lock(own, own)

    def _prepare(self, plan: str | None, resume: bool) -> None:
        if plan is None:
            raise ValueError("shares are shares of a plan")
        begun = found(self.target)
        strange = [share for share in begun if not self._belongs(share, begun[share], plan)]
        if strange and (resume or not self._is_alone):
            index, number = strange[0]
            raise UsageError(
                f"{safe(str(self.target))}: share {index} of {number} was begun with another plan",
                hint="every share needs the same source, recipe, number of shards and lowbit; "
                "--no-resume begins anew, once no share is being written",
            )
        mine = beside(self.target, f"{self._name}.journal")
        if strange or not begun or not self._is_staged():
            if not self._is_alone:
                raise OutputError(f"{safe(str(self.staging))}: removed while it was written")
            self._start(None)
        else:
            self.goes_on = True
        resumed = Journal.resume(mine, plan) if resume else None
        if resumed is not None:
            self.journal, self.proofs = resumed
        else:
            self.journal = Journal.begin(mine, plan, self._asked)

    def _belongs(self, share: tuple[int, int], path: Path, plan: str) -> bool:
        read = journal.read(path)
        if read is None:  # torn before its first line was whole
            return True
        return share[1] == self._share[1] and read[0] == plan

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.suspend()
        else:
            super().__exit__(kind, error, trace)

    def abort(self) -> None:
        """Let go, and remove what is there if nothing is proved of it and nobody is at it."""
        self._close()
        if self._lock is None:
            return
        self._release()
        with contextlib.suppress(OSError, OutputError, BusyError):
            fd = atomic.take_lock(beside(self.target, "lock"), self.target)
            try:
                reads = [journal.read(path) for path in found(self.target).values()]
                if not any(read is not None and read[2] for read in reads):
                    atomic.remove(self.staging)
                    atomic.remove_journals(self.target)
                    atomic.remove(beside(self.target, "setup"))
            finally:
                atomic.drop_lock(fd, beside(self.target, "lock"))

    def publish(self) -> None:
        """A share has nothing to publish."""
        raise ValueError("a share is not the whole output")

    def _release(self) -> None:
        self.settle()
        if self._own is not None:
            fd, self._own = self._own, None
            atomic.drop_lock(fd, beside(self.target, f"{self._name}.lock"))
        if self._lock is not None:
            fd, self._lock = self._lock, None
            atomic.drop_shared_lock(fd, beside(self.target, "lock"))


class GatheredOutput(StagedOutput):
    """What all shares of an output wrote, to be checked and published; `number` says how many there
    are to be."""

    number = 0

    def _prepare(self, plan: str | None, resume: bool) -> None:
        begun = found(self.target)
        for (_, number), path in sorted(begun.items()):
            read = journal.read(path)
            if read is None or read[0] != plan:
                raise OutputError(
                    f"{safe(str(path))}: not the journal of this plan",
                    hint="the source, the recipe or lowbit is not what the share was written with",
                )
            self.number = number
            self.proofs += read[2]
        if not begun or not self._is_staged():
            raise OutputError(
                f"{safe(str(self.target))}: no shares of it are here",
                hint="it is complete, or was not written with --num-shards",
            )
        self.goes_on = True

    def abort(self) -> None:
        """Let go; what the shares wrote stays."""
        self._close()
        self._release()
