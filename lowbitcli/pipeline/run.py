"""Do what a plan says: read, compute, write at planned offsets, prove, publish whole or not at
all."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from lowbitcli.checkpoint import atomic, manifest
from lowbitcli.checkpoint.manifest import digest_of
from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.checkpoint.shares import GatheredOutput, SharedOutput
from lowbitcli.checkpoint.writer import StagedOutput
from lowbitcli.errors import (
    BusyError,
    CheckpointError,
    OutputError,
    UsageError,
    WorkerLostError,
)
from lowbitcli.pipeline import memory
from lowbitcli.pipeline.clock import since_start
from lowbitcli.pipeline.crew import Crew, Step
from lowbitcli.pipeline.ledger import Ledger, Progress, Result, proved
from lowbitcli.pipeline.proof import Scribe, source_hash
from lowbitcli.pipeline.shares import Share, shares
from lowbitcli.pipeline.stop import Stop
from lowbitcli.pipeline.worker import Brief, Told, Usage, Worker
from lowbitcli.pipeline.write import Writer
from lowbitcli.plan import need
from lowbitcli.plan.asked import Asked
from lowbitcli.plan.nouns import Plan
from lowbitcli.tensors import safe


class Engine(Protocol):
    """Does jobs of a plan, by their places in it, somewhere else than in the run's own threads."""

    def do(
        self,
        plan: Plan,
        brief: Brief,
        jobs: Sequence[int],
        told: Told,
        is_stopped: Callable[[], bool],
    ) -> tuple[bool, list[Usage]]:
        """Return whether all are done, or it was stopped before, and what workers took."""
        ...


@dataclass(frozen=True)
class Options:
    """How a run goes about it; none of this changes a byte of the output. Memory in bytes, for each
    process. `asked` is from what the plan can be made again, where others are to do so."""

    force: bool = False
    max_memory: int = memory.DEFAULT
    resume: bool = True
    readback: bool = True
    max_gpu_memory: int | None = None
    engine: Engine | None = None
    share: Share | None = None
    asked: Asked | None = None


def run(
    plan: Plan,
    checkpoint: Checkpoint,
    output: Path,
    device: torch.device,
    options: Options | None = None,
    progress: Progress | None = None,
) -> Result:
    """Carry out a plan; `output` appears whole, or not at all.

    Raises:
        NonFiniteError: a weight that is computed holds NaN or Inf.
        OutputError, BusyError, UsageError: see StagedOutput.
        DeviceError: the device has too little memory for one job.
        StoppedError: a signal came; the same run again goes on where this one ended.
    """
    options = options or Options()
    started = time.perf_counter()
    if device.type == "cuda":
        torch.zeros(1, device=device)  # what CUDA itself takes counts as taken
        torch.cuda.reset_peak_memory_stats(device)
    budget = memory.budget(plan, options.max_memory, device, options.max_gpu_memory)
    limit = memory.gpu_limit(device, options.max_gpu_memory)
    with limit, Stop() as stop, Crew(budget.threads, device) as crew:
        if not options.force and is_complete(plan, checkpoint, output, crew):
            atomic.tidy(output)
            result = Result(complete=True)
        else:
            doing = _Run(plan, checkpoint, output, options, crew, budget, stop, progress)
            result = doing.share() if options.share is not None else doing.whole()
    return _measured(_foreseen(result, plan, options, device), started, crew)


def finish(
    plan: Plan,
    checkpoint: Checkpoint,
    output: Path,
    options: Options | None = None,
    progress: Progress | None = None,
) -> Result:
    """Check that all shares of an output are proved, read it back, and publish it.

    Raises:
        OutputError: shares are missing, or what was written is not there.
        BusyError: a share is being written.
        StoppedError: a signal came.
    """
    options = options or Options()
    started = time.perf_counter()
    device = torch.device("cpu")
    budget = memory.budget(plan, options.max_memory, device)
    with Stop() as stop, Crew(budget.threads, device) as crew:
        doing = _Run(plan, checkpoint, output, options, crew, budget, stop, progress)
        result = doing.gather()
        if result.missing:
            raise _missing(output, result.missing, doing.number)
    return _measured(_foreseen(result, plan, options, device), started, crew)


def _foreseen(result: Result, plan: Plan, options: Options, device: torch.device) -> Result:
    """Say in a result what was expected of peaks of memory."""
    gpu = device.type == "cuda" or result.peak_gpu > 0  # of this process, or of another that worked
    result.allowed = (options.max_memory, options.max_gpu_memory)
    here = need.memory(plan, options.max_memory, gpu=gpu)
    result.forecast = (here, need.gpu_memory(plan, options.max_gpu_memory) if gpu else 0)
    return result


def _measured(result: Result, started: float, crew: Crew) -> Result:
    result.seconds = time.perf_counter() - started
    result.add(Usage(crew.clock.seconds, memory.peak(), 0))
    result.stages = {"start": since_start() - result.seconds, **result.stages}
    if crew.device.type == "cuda":
        result.peak_gpu = max(result.peak_gpu, torch.cuda.max_memory_reserved(crew.device))
    return result


def _missing(output: Path, missing: Mapping[int, int], number: int) -> OutputError:
    names = ", ".join(f"{index} ({count} jobs)" for index, count in sorted(missing.items()))
    least = min(missing)
    return OutputError(
        f"{safe(str(output))}: of {number} shares these are not done: {names}",
        hint=f"run the same command with --shard-index {least} --num-shards {number}",
    )


class _Run:
    """One run: what it works with, and the walk from a plan to an output."""

    def __init__(
        self,
        plan: Plan,
        checkpoint: Checkpoint,
        output: Path,
        options: Options,
        crew: Crew,
        budget: memory.Budget,
        stop: Stop,
        progress: Progress | None,
    ) -> None:
        self.number = 0  # of shares, where they are gathered
        self._plan, self._checkpoint, self._output = plan, checkpoint, output
        self._options, self._crew, self._budget = options, crew, budget
        self._stop, self._progress = stop, progress
        self._sources = [checkpoint.path, *(checkpoint.root / file for file in checkpoint.files)]

    def whole(self) -> Result:
        """Write the output of the plan and publish it."""
        with StagedOutput(
            self._output,
            directory=self._plan.directory,
            force=self._options.force,
            sources=self._sources,
            plan=self._plan.digest,
            resume=self._options.resume,
        ) as staged:
            # A GPU's kernels are loaded and its first slices read meanwhile; there is nothing to
            # hide it behind elsewhere, and what is wrong is said before any work.
            here = self._options.engine is None and self._crew.device.type == "cuda"
            wait = staged.goes_on or not here
            ledger, writer = self._opened(staged, range(len(self._plan.jobs)), wait=wait)
            try:
                self._do(ledger, writer, staged)
            finally:
                writer.settle()
            self._publish(ledger, writer, staged)
        return ledger.result

    def share(self) -> Result:
        """Write one share, and publish the output if it was the last one."""
        share = self._options.share
        if share is None or self._options.asked is None:
            raise ValueError("no share is asked for, or not said of what")
        with SharedOutput(
            self._output,
            (share.index, share.number),
            self._options.asked.document(),
            directory=self._plan.directory,
            force=self._options.force,
            sources=self._sources,
            plan=self._plan.digest,
            resume=self._options.resume,
        ) as staged:
            places = shares(self._plan.jobs, share.number)[share.index]
            ledger, writer = self._opened(staged, places)
            staged.settle()
            self._do(ledger, writer, staged)
        try:
            gathered = self.gather()
        except BusyError:  # others are at it, and the last of them comes here too
            gathered = Result(missing={share.index: 0})
        gathered.resumed = ledger.result.resumed
        gathered.add(Usage(ledger.result.stages, ledger.result.peak_rss, ledger.result.peak_gpu))
        if gathered.missing:
            own = ledger.result
            gathered.errors, gathered.moved = own.errors, own.moved
            gathered.equal, gathered.blocks = own.equal, own.blocks
        return gathered

    def gather(self) -> Result:
        """Publish what all shares wrote, if none is missing.

        Raises:
            BusyError: one is being written.
        """
        with GatheredOutput(
            self._output,
            directory=self._plan.directory,
            force=self._options.force,
            sources=self._sources,
            plan=self._plan.digest,
        ) as staged:
            self.number = staged.number
            known = proved(staged.proofs)
            names = [job.weights[0].name for job in self._plan.jobs]
            missing = {
                index: sum(names[place] not in known for place in places)
                for index, places in enumerate(shares(self._plan.jobs, staged.number))
            }
            if any(missing.values()):
                return Result(missing={index: count for index, count in missing.items() if count})
            ledger, writer = self._opened(staged, range(len(names)))
            for name in names:
                ledger.keep(known[name])
            self._publish(ledger, writer, staged)
        return ledger.result

    def _opened(
        self, staged: StagedOutput, places: Sequence[int], *, wait: bool = True
    ) -> tuple[Ledger, Writer]:
        with self._crew.clock.stage("create"):
            writer = Writer(self._plan, staged, wait=wait)
        ledger = Ledger(self._plan, self._checkpoint, writer, places, self._progress)
        return ledger, writer

    def _do(self, ledger: Ledger, writer: Writer, staged: StagedOutput) -> None:
        """Do all jobs, but those that an earlier run has done.

        Raises:
            StoppedError: a signal came.
        """
        ledger.tell("")
        left = ledger.places
        if staged.proofs:
            left = ledger.check(staged, self._crew, self._stop)
        ledger.scribe = Scribe(staged, self._crew.clock)
        try:
            complete = self._work(left, ledger, writer, staged)
            ledger.scribe.flush()
        except WorkerLostError:
            ledger.scribe.flush()  # what is done is kept
            raise
        finally:
            ledger.scribe.close()
        if not complete:
            raise ledger.stopped(self._stop, staged)

    def _work(
        self, left: Sequence[int], ledger: Ledger, writer: Writer, staged: StagedOutput
    ) -> bool:
        """Have jobs done, here or by an engine."""
        if self._options.engine is None:
            worker = Worker(self._plan, self._checkpoint, writer, self._crew, self._budget)
            jobs = (self._plan.jobs[place] for place in left)
            return worker.do(jobs, ledger, lambda: bool(self._stop))
        if self._options.asked is None:
            raise ValueError("workers elsewhere must be told what was asked for")
        brief = Brief(
            self._options.asked,
            self._plan.digest,
            staged.target,
            staged.staging,
            self._options.max_memory,
            self._options.max_gpu_memory,
        )
        engine = self._options.engine
        complete, usages = engine.do(self._plan, brief, left, ledger, lambda: bool(self._stop))
        for usage in usages:
            ledger.result.add(usage)
        return complete

    def _publish(self, ledger: Ledger, writer: Writer, staged: StagedOutput) -> None:
        """Write what stands around the weights, read everything back, and give it its name."""
        with self._crew.clock.stage("finish"):
            writer.finish(self._checkpoint, digest_of(ledger.source))
        if self._options.readback:
            with self._crew.clock.stage("read back"):
                ledger.read_back(staged, self._crew, self._stop)
        with self._crew.clock.stage("publish"):
            staged.publish()
        ledger.close_with(self._plan)


def is_complete(plan: Plan, checkpoint: Checkpoint, output: Path, crew: Crew) -> bool:
    """Is `output` there already, made by the same plan from the same numbers?"""
    if not os.path.lexists(output):
        return False
    try:
        with Checkpoint.open(output) as found:
            made = manifest.of(found)
            if made is None or made.plan_digest != plan.digest or not made.source:
                return False
            if any(True for _ in manifest.check(found, made)):
                return False
    except (CheckpointError, UsageError):
        return False
    hashes: dict[str, str] = {}
    parts = {part.key: part for w in plan.weights for part in w.reads.values()}

    def step(key: str) -> Step:
        def work() -> None:
            hashes[key] = source_hash(checkpoint, parts[key])

        return Step(work, 0, key)

    crew.run(map(step, sorted(parts)), lambda _: None)
    return digest_of(hashes) == made.source
