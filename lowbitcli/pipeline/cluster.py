"""Ray does the jobs: one task for each bundle, done again alone when its worker dies.

| address | where |
|---|---|
| `local` | this machine, for the time of the run |
| `auto` | the cluster that this machine belongs to |
| `ray://HOST:PORT` | a cluster elsewhere |

The run itself has the lock, the files and the journal. Every machine needs lowbit, and sees source
and output under the same paths. A task takes a whole GPU (`num_gpus=1`) where GPUs are asked for or
there, else one CPU; it syncs what it wrote before it says so, as this machine cannot do it.
"""

import importlib
import os
import signal
import sys
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import Any, TextIO, cast

from lowbitcli.checkpoint.files import AttachedFiles
from lowbitcli.errors import LowbitError, UsageError, WorkerLostError
from lowbitcli.pipeline.proof import Done
from lowbitcli.pipeline.shares import Bundles
from lowbitcli.pipeline.stop import Later
from lowbitcli.pipeline.worker import Brief, Told, Usage, Worker
from lowbitcli.plan.nouns import Plan
from lowbitcli.tensors import safe

ATTEMPTS = 3
_POLL = 0.2  # seconds between two looks at whether the run is to stop
_AHEAD = 2  # tasks for each slot that are running or waiting


@contextmanager
def connected(address: str, device: str) -> Iterator["Cluster"]:
    """Connect to Ray, and disconnect.

    Raises:
        UsageError: Ray is not installed, there is no such cluster, or no such kind of device.
    """
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise UsageError(
            "--cluster needs Ray, which is not installed", hint="pip install 'lowbit[cluster]'"
        ) from error
    if address not in ("local", "auto") and not address.startswith("ray://"):
        raise UsageError(
            f"{safe(address)!r} is no cluster", hint="--cluster local, auto or ray://HOST:PORT"
        )
    if device not in ("auto", "cpu", "cuda"):
        raise UsageError(
            f"a cluster has no device {safe(device)!r}", hint="--device auto, cpu or cuda"
        )
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    more = {"include_dashboard": False} if address == "local" else {}
    try:
        with Later():  # Ray answers SIGTERM by an exit of its own, from here on
            ray.init(address=address, **quiet, **more)
    except SystemExit:
        signal.raise_signal(signal.SIGTERM)  # which is ours to answer again
        raise
    except (ConnectionError, RuntimeError, ValueError) as error:
        first = str(error).partition("\n")[0]
        raise UsageError(f"no cluster at {safe(address)}: {safe(first)}") from error
    try:
        with redirect_stdout(cast(TextIO, _OursAlone(sys.stdout))):
            yield Cluster(ray, device)
    finally:
        ray.shutdown()


class _OursAlone:
    """stdout, on which a document may be printed: what Ray's threads say goes to stderr."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        theirs = threading.current_thread().name.startswith("ray_")
        return getattr(sys.stderr if theirs else self._stream, name)


class Cluster:
    """Does jobs as tasks of a Ray that is connected to."""

    def __init__(self, ray: Any, device: str) -> None:
        self._ray = ray
        there = ray.cluster_resources()
        gpus = int(there.get("GPU", 0))
        if device == "cuda" and not gpus:
            raise UsageError("the cluster has no GPU", hint="--device cpu")
        self.device = "cuda" if device == "cuda" or (device == "auto" and gpus) else "cpu"
        self.slots = max(1, gpus if self.device == "cuda" else int(there.get("CPU", 1)))
        takes = {"num_gpus": 1, "num_cpus": 1} if self.device == "cuda" else {"num_cpus": 1}
        self._task = ray.remote(max_retries=ATTEMPTS - 1, retry_exceptions=False, **takes)(do)

    def do(
        self,
        plan: Plan,
        brief: Brief,
        jobs: Sequence[int],
        told: Told,
        is_stopped: Callable[[], bool],
    ) -> tuple[bool, list[Usage]]:
        """Do jobs of a plan, by number; return whether all are done, and what workers took.

        Raises:
            WorkerLostError: workers died again and again.
            LowbitError: what a job that failed raised.
        """
        ray = self._ray
        bundles, again = Bundles(plan.jobs, jobs), deque[list[int]]()
        attempts: Counter[int] = Counter()
        running: dict[Any, list[int]] = {}
        usages: dict[int, Usage] = {}
        left = len(jobs)
        crowd = self.slots if self.device == "cpu" else 1
        while left:
            while not is_stopped() and len(running) < _AHEAD * self.slots:
                bundle = again.popleft() if again else bundles.next()
                if bundle is None:
                    break
                running[self._task.remote(brief, bundle, self.device, crowd)] = bundle
            if not running:
                break
            ready, _ = ray.wait(list(running), num_returns=1, timeout=_POLL)
            for reference in ready:
                bundle = running.pop(reference)
                done, said = self._result(reference, bundle, plan)
                if done is None:  # the program or its device failed, and the worker is no more
                    attempts.update(bundle)
                    if max(attempts[place] for place in bundle) >= ATTEMPTS:
                        raise _lost(plan, bundle, said)
                    again.extend([place] for place in bundle)
                    continue
                found, (process, usage) = done
                usages[process] = usage
                for one, place in zip(found, bundle, strict=True):
                    told.step(plan.jobs[place].bytes_in, one.name)
                    told.done(one)
                left -= len(bundle)
        return not left, list(usages.values())

    def _result(
        self, reference: Any, bundle: list[int], plan: Plan
    ) -> "tuple[_Answer | None, str]":
        """Return what a task returned; None and the reason where it broke.

        Raises:
            WorkerLostError: its workers died, as often as Ray tries.
            LowbitError: what it raised.
        """
        try:
            answer = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            last = str(error).strip().rpartition("\n")[2]
            raise WorkerLostError(
                f"a worker could not begin {_named(plan, bundle)}: {safe(last)}",
                hint="is the same lowbit on every machine?",
            ) from error
        except self._ray.exceptions.RayError as error:
            first = str(error).partition("\n")[0]
            raise _lost(plan, bundle, first) from error
        if isinstance(answer, LowbitError):
            raise answer
        return (None, answer) if isinstance(answer, str) else (answer, "")


# Jobs that are done, and which process (a number of its own) has taken what so far.
_Answer = tuple[list[Done], tuple[int, Usage]]


def _named(plan: Plan, bundle: list[int]) -> str:
    name = safe(plan.jobs[bundle[0]].weights[0].name)
    return f"{name} and {len(bundle) - 1} more jobs" if len(bundle) > 1 else name


def _lost(plan: Plan, bundle: list[int], said: str) -> WorkerLostError:
    return WorkerLostError(
        f"workers died {ATTEMPTS} times at {_named(plan, bundle)}, at last: {safe(said)}",
        hint="out of memory? See Ray's logs and --max-memory; run again to continue",
    )


class _Kept:
    """The worker that a process of Ray keeps from one task of a run to the next."""

    def __init__(self) -> None:
        self.brief: Brief | None = None
        self.number = int.from_bytes(os.urandom(6), "little")
        self.stack = ExitStack()
        self.worker: Worker | None = None
        self.files: AttachedFiles | None = None
        self.is_broken = False

    def opened(self, brief: Brief, device: str, crowd: int) -> tuple[Worker, AttachedFiles]:
        """Return the worker for a brief, opened where it is another's or none."""
        if self.worker is None or self.files is None or brief != self.brief:
            self.close()
            self.worker, self.files = self.stack.enter_context(brief.worker(device, crowd))
            self.brief = brief
        return self.worker, self.files

    def close(self) -> None:
        """Let go of threads and files."""
        self.worker = self.files = None
        self.stack.close()
        self.stack = ExitStack()


_kept = _Kept()


class _Collected:
    """Keeps what is done until the task returns it."""

    def __init__(self) -> None:
        self.jobs: dict[str, Done] = {}

    def step(self, size: int, name: str) -> None:
        """Progress is told by the task."""

    def done(self, done: Done) -> None:
        self.jobs[done.name] = done


def do(brief: Brief, bundle: list[int], device: str, crowd: int) -> "_Answer | LowbitError | str":
    """Be one task: do a bundle of jobs, sync what they wrote, and return what is known of them.

    An error of the source or the output is returned; the text of any other one too, and the process
    ends at its next task, which Ray then does elsewhere: its device may not work any more.
    """
    if _kept.is_broken:
        os._exit(1)
    told = _Collected()
    try:
        worker, files = _kept.opened(brief, device, crowd)
        jobs = [worker.plan.jobs[place] for place in bundle]
        worker.do(jobs, told, lambda: False)
        written = {part.file for job in jobs for w in job.weights for part in w.writes.values()}
        for file in sorted(written):
            files.sync(file if files.directory else files.target.name)
        found = [told.jobs[job.weights[0].name] for job in jobs]
        return found, (_kept.number, worker.usage())
    except LowbitError as error:
        _kept.close()  # its threads were let go
        return error
    except Exception:
        _kept.is_broken = True
        return traceback.format_exc()
