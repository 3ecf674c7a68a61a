"""`Worker`: does jobs of a plan on one device, wherever it runs.

    in the run itself        one device: the run's own threads
    in processes             a device each (`processes`)
    in tasks of a cluster    (`cluster`)

It reads the source, computes, and writes at planned places of files that are there already; what is
known of a finished job goes to `Told`. Jobs are asked for as they are needed, so that whoever hands
them out decides how long one worker is busy. Lock, journal and publishing are not its business.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch

from lowbitcli.checkpoint import journal
from lowbitcli.checkpoint.files import AttachedFiles
from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.errors import CheckpointError, DeviceError, OutputError
from lowbitcli.pipeline import memory, together
from lowbitcli.pipeline.arithmetic import device_of
from lowbitcli.pipeline.crew import Crew, Step
from lowbitcli.pipeline.pick import Picking
from lowbitcli.pipeline.proof import Done
from lowbitcli.pipeline.together import Together, is_small
from lowbitcli.pipeline.warm import Warm
from lowbitcli.pipeline.work import Computing, Copying, Piece, Room
from lowbitcli.pipeline.write import Writer
from lowbitcli.plan.asked import Asked
from lowbitcli.plan.nouns import Job, Plan
from lowbitcli.tensors import safe

Work = Copying | Picking | Computing

# The largest job that one thread does by itself, in bytes of the source, by the kind of device; and
# how many of them each thread should have, at least.
ALONE = {"cuda": 512 << 20}
_SHARES = 4


class Told(Protocol):
    """Who is told of what a worker does."""

    def step(self, size: int, name: str) -> None:
        """`size` bytes of the source are dealt with, at last of the weight `name`."""

    def done(self, done: Done) -> None:
        """A job is done and what it wrote is written."""


@dataclass(frozen=True)
class Usage:
    """What a worker took: seconds of each stage, those of threads added up, and bytes at peak."""

    seconds: dict[str, float]
    peak_rss: int
    peak_gpu: int


class Worker:
    """Threads, memory and compiled kernels for the jobs of one plan on one device."""

    def __init__(
        self,
        plan: Plan,
        checkpoint: Checkpoint,
        writer: Writer,
        crew: Crew,
        budget: memory.Budget,
    ) -> None:
        self.plan, self.crew = plan, crew
        warm = Warm(plan, crew.device)
        self._room = Room(checkpoint, writer, crew.device, crew, budget.elements, warm)
        self._held = budget.held  # bytes that may still be held between two passes

    def do(self, jobs: Iterable[Job], told: Told, is_stopped: Callable[[], bool]) -> bool:
        """Do jobs; return False where it was stopped before the last one had begun.

        Raises:
            NonFiniteError: a weight that is computed holds NaN or Inf.
            DeviceError: the device has too little memory for one job.
        """

        def retire(step: Step) -> None:
            told.step(step.size, step.name)
            for work in step.completes:
                if not isinstance(work, Work):
                    raise TypeError(f"{work} is no job")
                if isinstance(work, Computing) and work.is_held:
                    self._held += work.job.bytes_in
                told.done(work.done())

        return self.crew.run(self._steps(jobs), retire, is_stopped)

    def usage(self) -> Usage:
        """Return what it took so far."""
        cuda = self.crew.device.type == "cuda"
        gpu = torch.cuda.max_memory_reserved(self.crew.device) if cuda else 0
        return Usage(dict(self.crew.clock.seconds), memory.peak(), gpu)

    def _steps(self, jobs: Iterable[Job]) -> Iterator[Step]:
        """Yield the steps of all jobs; small jobs, one after the other, are one step together.

        On a GPU a job is one step too, as long as it is a small part of all: a thread by itself
        waits for nobody's checksum or amax, and others keep the device busy meanwhile.
        """
        alone = ALONE.get(self.crew.device.type, 0)
        alone = min(alone, self.plan.bytes_in // (_SHARES * self.crew.threads))
        batch: list[tuple[Work, list[Piece]]] = []
        held = 0
        for job in jobs:
            work = self._begin(job)
            pieces = list(work.steps())
            size = sum(piece.size for piece in pieces)
            if size > self._room.elements:
                if batch:
                    yield self._small(batch)
                    batch, held = [], 0
                if size <= alone:
                    yield _step(pieces, [work])
                    continue
                for number, piece in enumerate(pieces):
                    yield _step([piece], [work], number == len(pieces) - 1)
                continue
            batch.append((work, pieces))
            held += size
            if held > self._room.elements:
                yield self._small(batch)
                batch, held = [], 0
        if batch:
            yield self._small(batch)

    def _small(self, batch: Sequence[tuple[Work, list[Piece]]]) -> Step:
        """Return small jobs as one step, in which those that can be are done together."""
        pieces = [piece for _, own in batch for piece in own]
        works = [work for work, _ in batch]
        some = [work for work in works if is_small(work)]
        if len(some) < 2 or self.crew.device.type not in together.DEVICES:
            return _step(pieces, works)
        rest = [piece for work, own in batch if not is_small(work) for piece in own]

        def do() -> None:
            done = Together(some, self._room).work()
            for piece in rest if done else pieces:
                piece.work()

        return _step([Piece(do, sum(piece.size for piece in pieces))], works)

    def _begin(self, job: Job) -> Work:
        if len(job.weights) == 1 and job.weights[0].copies:
            return Copying(job, self._room)
        if len(job.weights) == 1 and job.weights[0].picks:
            return Picking(job, self._room)
        hold = job.bytes_in <= self._held
        if hold:
            self._held -= job.bytes_in
        return Computing(job, self._room, hold=hold)


def _step(pieces: Iterable[Piece], of: Sequence[Work], last: bool = True) -> Step:
    """Return pieces as one step, which completes the jobs they are of if it is their `last`."""
    kept, name = list(pieces), of[0].job.weights[0].name

    def work() -> None:
        try:
            for piece in kept:
                piece.work()
        except torch.OutOfMemoryError as error:
            raise DeviceError(
                f"the device has too little memory for {safe(name)}", hint="--device cpu"
            ) from error

    return Step(work, sum(piece.size for piece in kept), name, tuple(of) if last else ())


@dataclass(frozen=True)
class Brief:
    """What a worker in another process must know: what was asked for, which plan that makes, where
    its output is being written, and the memory that a process may take.

    `run` tells runs of one plan apart: what is open of an earlier one may be files that are gone.
    """

    asked: Asked
    digest: str
    target: Path
    staging: Path
    max_memory: int
    max_gpu_memory: int | None = None
    run: str = field(default_factory=lambda: os.urandom(8).hex())

    @contextmanager
    def worker(self, device: str, crowd: int = 1) -> Iterator[tuple[Worker, AttachedFiles]]:
        """Open a worker on a device that `crowd` workers share, and the files that it writes to.

        Raises:
            CheckpointError: the source is not the one that was planned for.
            OutputError: the files are not there, or those of another plan.
        """
        where = device_of(device)
        with ExitStack() as held:
            plan, checkpoint = held.enter_context(self.asked.planned(self.target))
            if plan.digest != self.digest:
                raise CheckpointError(
                    f"{safe(self.asked.source)}: not what was planned for",
                    hint="did it change meanwhile? Is it the same, with the same lowbit, on every "
                    "machine?",
                )
            budget = memory.budget(plan, self.max_memory, where, self.max_gpu_memory)
            held.enter_context(memory.gpu_limit(where, self.max_gpu_memory))
            if where.type == "cpu":
                budget = replace(budget, threads=max(1, budget.threads // crowd))
            files = AttachedFiles(self.target, self.staging, directory=plan.directory)
            held.enter_context(files)
            crew = held.enter_context(Crew(budget.threads, where))
            writer = Writer(plan, files)
            # Where the run is dead and this is late, these may be the files of another by now; a
            # run has a journal before it has files.
            if not journal.is_for(self.target, self.digest):
                raise OutputError(f"{safe(str(self.target))}: another run's by now")
            yield Worker(plan, checkpoint, writer, crew, budget), files
