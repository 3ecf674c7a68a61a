"""One process for each device, all at the jobs of one run.

    run       has the lock, the files, the journal; hands out jobs, the largest first
    process   asks for jobs when it needs some, writes, tells what is done

A process that dies, or whose device fails, is replaced; the jobs that it had are done again, each
alone, so that one that kills its process takes no others with it. After `ATTEMPTS` of a job the run
ends, and what is done is kept. An error of the source or the output ends it at once.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

from lowbitcli.errors import LowbitError, WorkerLostError
from lowbitcli.pipeline.proof import Done
from lowbitcli.pipeline.shares import Bundles
from lowbitcli.pipeline.stop import SIGNALS
from lowbitcli.pipeline.worker import Brief, Told, Usage
from lowbitcli.plan.nouns import Job, Plan
from lowbitcli.tensors import safe

ATTEMPTS = 3
_POLL = 0.1  # seconds between two looks at whether the run is to stop
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_END, _STOP = "end", "stop"  # what a process is told instead of jobs


class Processes:
    """Does jobs in processes, one for each of `devices`; a device may be named twice."""

    def __init__(self, devices: Sequence[str]) -> None:
        self.devices = tuple(devices)

    def do(
        self,
        plan: Plan,
        brief: Brief,
        jobs: Sequence[int],
        told: Told,
        is_stopped: Callable[[], bool],
    ) -> tuple[bool, list[Usage]]:
        """Do jobs of a plan, by number; return whether all are done, and what processes took.

        Raises:
            WorkerLostError: processes died again and again.
            LowbitError: what the first job that failed raised.
        """
        team = _Team(plan, brief, jobs, told, self.devices)
        try:
            complete = team.run(is_stopped)
            return complete, team.usages
        finally:
            team.close()


@dataclass
class _Member:
    """A process, what it has been given and not done yet, and whether it waits for a word."""

    device: str
    process: Any
    connection: Connection
    jobs: dict[str, int] = field(default_factory=dict)  # name -> number
    has_begun: bool = False
    is_waiting: bool = False
    usage: Usage | None = None
    said: str = ""


class _Team:
    """The processes of one run."""

    def __init__(
        self,
        plan: Plan,
        brief: Brief,
        jobs: Sequence[int],
        told: Told,
        devices: tuple[str, ...],
    ) -> None:
        self.usages: list[Usage] = []
        self._plan, self._brief, self._told, self._devices = plan, brief, told, devices
        self._bundles = Bundles(self._plan.jobs, jobs)
        self._alone: deque[int] = deque()  # jobs that a process died of, or beside
        self._attempts: Counter[int] = Counter()
        self._lost = 0  # processes that died before they had begun
        self._left = len(jobs)
        self._stopping = False
        self._context = multiprocessing.get_context("spawn")
        self._members: list[_Member] = []

    def run(self, is_stopped: Callable[[], bool]) -> bool:
        """Hand out jobs until all are done; return False where it was stopped before."""
        for device in self._devices:
            self._start(device)
        while self._left or self._are_at_work():
            if is_stopped() and not self._stopping:
                self._stop()
            if self._stopping and not self._are_at_work():
                break
            connections = {member.connection: member for member in self._members}
            for ready in wait(list(connections), _POLL):
                self._hear(connections[ready])  # type: ignore[index]
        self._dismiss()
        return not self._left

    def close(self) -> None:
        """End what still runs, at once."""
        for member in self._members:
            member.process.kill()
        for member in self._members:
            member.process.join()
            member.connection.close()
        self._members.clear()

    def _are_at_work(self) -> bool:
        return any(member.has_begun and not member.is_waiting for member in self._members)

    def _start(self, device: str) -> None:
        ours, theirs = self._context.Pipe()
        crowd = self._devices.count(device)
        process = self._context.Process(
            target=serve,
            args=(theirs, self._brief, device, crowd, os.getpid()),
            name=f"lowbit-{device}",
        )
        # Else Ctrl-C could end one before it knows what to do with it. The tracker that Python
        # starts beside the first process would open the signals again: it has to be there before.
        resource_tracker.ensure_running()
        with _signals_blocked():
            process.start()
        theirs.close()
        self._members.append(_Member(device, process, ours))

    def _stop(self) -> None:
        self._stopping = True
        for member in self._members:
            self._send(member, _STOP)

    def _dismiss(self) -> None:
        """Let the processes that are done end in peace."""
        self.usages = [member.usage for member in self._members if member.usage is not None]
        for member in self._members:
            self._send(member, _END)
        for member in self._members:
            member.process.join(1.0)

    def _hear(self, member: _Member) -> None:
        try:
            kind, *said = member.connection.recv()
        except (EOFError, OSError):
            self._bury(member)
            return
        if kind == "step":
            self._told.step(*said)
        elif kind == "done":
            self._finish(member, *said)
        elif kind == "more":
            member.has_begun = True
            self._give(member)
        elif kind == "waiting":
            member.is_waiting, member.usage = True, said[0]
            if (self._alone or self._bundles) and not self._stopping:
                self._wake(member)
        elif kind == "failed":
            raise said[0]
        else:  # its device or our program failed: it ends, which is heard of next
            member.said = said[0]

    def _finish(self, member: _Member, done: Done) -> None:
        if member.jobs.pop(done.name, None) is None:
            raise ValueError(f"{safe(done.name)} was not given to this process")
        self._left -= 1
        self._told.done(done)

    def _give(self, member: _Member) -> None:
        """Answer a process that asks for jobs: with some, or None where it is to wait."""
        if self._stopping:
            self._send(member, _STOP)
            return
        given: list[int] | None = None
        if self._alone:
            # Nothing else beside it, and no more before it is done.
            given = [self._alone.popleft()] if not member.jobs else None
        elif not any(self._attempts[number] for number in member.jobs.values()):
            given = self._bundles.next()
        for number in given or ():
            member.jobs[self._plan.jobs[number].weights[0].name] = number
        self._send(member, given)

    def _wake(self, member: _Member) -> None:
        member.is_waiting = False
        self._send(member, [])

    def _send(self, member: _Member, word: object) -> None:
        with contextlib.suppress(OSError):
            member.connection.send(word)

    def _bury(self, member: _Member) -> None:
        """Give the jobs of a process that died to others, and its place to a new one.

        Raises:
            WorkerLostError: it was not the first time.
        """
        self._members.remove(member)
        member.process.join()
        member.connection.close()
        lost = sorted(member.jobs.values())
        self._attempts.update(lost)
        if not member.has_begun:
            self._lost += 1
        worst = max(lost, key=lambda number: self._attempts[number], default=None)
        attempts = self._lost if worst is None else self._attempts[worst]
        if attempts >= ATTEMPTS:
            raise self._gave_up(member, worst, attempts)
        self._alone.extend(lost)
        if self._stopping or not self._left:
            return
        self._start(member.device)
        for other in self._members:
            if self._alone and other.is_waiting:
                self._wake(other)

    def _gave_up(self, member: _Member, worst: int | None, attempts: int) -> WorkerLostError:
        code = member.process.exitcode
        how = f"killed by signal {-code}" if code and code < 0 else f"exit code {code}"
        at = "before its first job"
        if worst is not None:
            at = f"at {safe(self._plan.jobs[worst].weights[0].name)}"
        said = f"\n{member.said.rstrip()}" if member.said else ""
        return WorkerLostError(
            f"processes on {member.device} died {attempts} times {at}, at last: {how}{said}",
            hint="out of memory? See dmesg and --max-memory; run again to continue",
        )


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _EndedError(Exception):
    """The run wants no more of this process."""


class _Line:
    """A process's end of the line to the run, which is also whom its worker tells."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def step(self, size: int, name: str) -> None:
        self.connection.send(("step", size, name))

    def done(self, done: Done) -> None:
        self.connection.send(("done", done))

    def jobs(self, plan: Plan) -> Iterator[Job]:
        """Ask for jobs and yield them, until there are none for now."""
        while True:
            self.connection.send(("more",))
            answer = self.connection.recv()
            if answer == _END:
                raise _EndedError
            if answer is None or answer == _STOP:
                return
            for number in answer:
                yield plan.jobs[number]

    def is_stopped(self) -> bool:
        """Nothing comes unasked but the word to stop, or the end of the run."""
        return self.connection.poll()


def serve(connection: Connection, brief: Brief, device: str, crowd: int, parent: int) -> None:
    """Be one of a run's processes, to its end."""
    _die_with(parent)
    for number in SIGNALS:  # they are the run's to answer
        signal.signal(number, signal.SIG_IGN)
    line = _Line(connection)
    try:
        with brief.worker(device, crowd) as (worker, _):
            while True:
                worker.do(line.jobs(worker.plan), line, line.is_stopped)
                connection.send(("waiting", worker.usage()))
                while (word := connection.recv()) == _STOP:
                    pass
                if word == _END:
                    return
    except (EOFError, ConnectionError, _EndedError):
        return
    except LowbitError as error:
        with contextlib.suppress(OSError):
            connection.send(("failed", error))
    except Exception:
        with contextlib.suppress(OSError):
            connection.send(("broke", traceback.format_exc()))


def _die_with(parent: int) -> None:
    """Have the system kill this process when the run dies: nobody would take what it writes."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
