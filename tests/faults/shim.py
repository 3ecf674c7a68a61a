"""Faults put into a run of the program: a child is forked, its calls on the output are counted, and
the n-th one fails, is cut short, kills the process or does something else.

Children are forked from a process that has imported and read everything once, so that each costs
little more than the run itself.
"""

import contextlib
import functools
import gc
import importlib
import io
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowbitcli import api, program
from lowbitcli.checkpoint import atomic
from lowbitcli.cli import app
from lowbitcli.pipeline import proof
from lowbitcli.pipeline import run as run_of_plan
from lowbitcli.schemes import SCHEMES

CALLS = ("open", "mkdir", "pwrite", "posix_fallocate", "fdatasync", "fsync", "unlink")
LONG = os.environ.get("FAULTS") == "all"
EVERY = 1 if LONG else 3  # which of the calls are hit
LIMIT = 120  # seconds for one child

assert api is not None  # imported for its cost


@dataclass(frozen=True)
class Ended:
    """How a child ended: its exit code or minus the signal, what it said, the calls counted, and
    whether its fault fired."""

    code: int
    out: str
    err: str
    calls: int
    fired: int


@functools.cache
def warm(checkpoint: Path) -> None:
    """Load here, once, what a run loads when it needs it, and keep the collector away from it."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        program.run(app, ["plan", str(checkpoint)])
    for scheme in SCHEMES:
        importlib.import_module(scheme.ops.partition(":")[0])
    gc.collect()
    gc.freeze()
    gc.get_freeze_count = lambda: 1  # which counts them one by one, and a run only asks for any


def fail(code: int) -> Callable[..., None]:
    """Return a fault that raises an OSError."""

    def fault(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    return fault


def kill(*_: object) -> None:
    """End the process as a power cut of the program would."""
    os.kill(os.getpid(), signal.SIGKILL)


class Counter:
    """Counts calls and lets the fault happen at those that are asked for."""

    def __init__(self, root: Path, at: Callable[[int], bool], fault: Callable[..., object]) -> None:
        self.calls = self.fired = 0
        self._root, self._at, self._fault = str(root), at, fault
        self._lock = threading.Lock()

    def wrap(self, name: str) -> None:
        real = getattr(os, name)

        def call(*args, **options):
            if name in ("open", "mkdir", "unlink") and not self._ours(args, options):
                return real(*args, **options)
            if name == "pwrite" and self._hit(name):
                args = self._fault(*args) or args
            elif name != "pwrite" and self._hit(name):
                self._fault(*args)
            return real(*args, **options)

        setattr(os, name, call)

    def wrap_rename(self) -> None:
        real = atomic._renameat2

        def call(*args):
            if self._hit("rename"):
                self._fault(*args)
            return real(*args)

        atomic._renameat2 = call

    def _ours(self, args, options) -> bool:
        """Is it a call on the output and not on the source or on a library's file?"""
        path = os.fspath(args[0]) if isinstance(args[0], str | os.PathLike) else ""
        return os.path.dirname(str(path)).startswith(self._root) or str(path) == self._root

    def _hit(self, name: str) -> bool:
        with self._lock:
            self.calls += 1
            hit = self._at(self.calls)
            self.fired += hit
        if hit and self._fault is kill:
            _told(self)
        return hit


class Prompt(proof.Scribe):
    """Journals each job before it returns to the run, in the thread that does it anyway: how many
    jobs are journalled at once is no matter of which thread is quicker."""

    def __init__(self, *given: Any) -> None:
        self._added = self._written = 0
        super().__init__(*given)

    def add(self, done: proof.Done, *given: Any) -> None:
        super().add(done, *given)
        self._added += 1
        while self._written < self._added and self._thread.is_alive():
            time.sleep(0.0002)

    def _write(self, jobs: list[proof.Done], files: set[str]) -> None:
        super()._write(jobs, files)
        self._written += len(jobs)


_report = ""


def _told(counter: Counter) -> None:
    with open(_report, "w") as file:
        json.dump([counter.calls, counter.fired], file)


def start(
    root: Path,
    arguments: list[object],
    at: Callable[[int], bool] | int = 0,
    fault: Callable[..., object] = kill,
    *,
    journal_each: bool = True,
    prepare: Callable[[], object] | None = None,
) -> "Child":
    """Fork a child that runs `lowbit ARGUMENTS`, with a fault at the `at`-th call under `root`.

    `prepare` is called in the child before; what it returns is called after, if it can be.
    """
    folder = Path(tempfile.mkdtemp(prefix="fault-"))
    folder.chmod(0o777)  # a child may be another user
    pid = os.fork()
    if pid:
        return Child(pid, folder)
    code = 99
    try:
        signal.alarm(LIMIT)
        after = prepare() if prepare is not None else None
        code = _child(folder, root, arguments, at, fault, journal_each)
        if callable(after):
            after()
    except BaseException:
        (folder / "err").write_text(traceback.format_exc())
    finally:
        os._exit(code)


def _child(folder, root, arguments, at, fault, journal_each) -> int:
    global _report
    _report = str(folder / "report")
    sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
    proof.SYNC_SECONDS = 3600  # the clock journals nothing: a slow machine makes the same calls
    if journal_each:
        proof.SYNC_BYTES = 1
        run_of_plan.Scribe = Prompt
    when = at if callable(at) else lambda n: n == at
    counter = Counter(root, when, fault)
    for name in CALLS:
        counter.wrap(name)
    counter.wrap_rename()
    code = program.run(app, [str(word) for word in arguments])
    for name, stream in (("out", sys.stdout), ("err", sys.stderr)):
        with open(folder / name, "w") as file:
            file.write(stream.getvalue())
    _told(counter)
    return code


@dataclass(frozen=True)
class Child:
    """A child that is running."""

    pid: int
    folder: Path

    def end(self) -> Ended:
        """Wait for it."""
        _, status = os.waitpid(self.pid, 0)

        def read(name: str) -> str:
            path = self.folder / name
            return path.read_text() if path.exists() else ""

        calls, fired = json.loads(read("report") or "[0, 0]")
        code = os.waitstatus_to_exitcode(status)
        ended = Ended(code, read("out"), read("err"), calls, fired)
        shutil.rmtree(self.folder)
        return ended


def run(root: Path, arguments: list[object], *at: object, **options: object) -> Ended:
    """Run a child to its end."""
    return start(root, arguments, *at, **options).end()  # type: ignore[arg-type]
