"""Do what a plan says: read, compute, write at planned offsets, prove, publish whole or not at
all."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lowbit_kernels.error import Sums
from lowbitcli.checkpoint import atomic, manifest
from lowbitcli.checkpoint.manifest import digest_of
from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.checkpoint.writer import StagedOutput
from lowbitcli.errors import CheckpointError, DeviceError, StoppedError, UsageError
from lowbitcli.pipeline import memory
from lowbitcli.pipeline.clock import since_start
from lowbitcli.pipeline.crew import Crew, Step
from lowbitcli.pipeline.pick import Picking
from lowbitcli.pipeline.proof import Done, Scribe, Trial, read_back, source_hash
from lowbitcli.pipeline.stop import Stop
from lowbitcli.pipeline.warm import Warm
from lowbitcli.pipeline.work import Computing, Copying, Piece, Room, look
from lowbitcli.pipeline.write import Writer
from lowbitcli.plan.nouns import Job, Part, Plan
from lowbitcli.tensors import safe

# Called with bytes done, bytes in all, and the name of what is being worked on.
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Options:
    """How a run goes about it; none of this changes a byte of the output. Memory in bytes."""

    force: bool = False
    max_memory: int = memory.DEFAULT
    resume: bool = True
    readback: bool = True


@dataclass
class Result:
    """What a run did: errors by weight, scales that moved by an ulp, blocks that were requantized
    without loss and of how many, seconds, memory in bytes.

    `complete` is whether there was nothing to do; `resumed` counts jobs that were done before;
    `stages` has the seconds of each stage, those of threads added up.
    """

    errors: dict[str, Sums] = field(default_factory=dict)
    moved: int = 0
    equal: int = 0
    blocks: int = 0
    seconds: float = 0.0
    peak_rss: int = 0
    peak_gpu: int = 0
    resumed: int = 0
    complete: bool = False
    stages: dict[str, float] = field(default_factory=dict)


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
    budget = memory.budget(plan, options.max_memory, device)
    with Stop() as stop, Crew(budget.threads, device) as crew:
        if not options.force and is_complete(plan, checkpoint, output, crew):
            atomic.tidy(output)
            result = Result(complete=True)
        else:
            result = _write(plan, checkpoint, output, options, crew, budget, stop, progress)
    result.seconds = time.perf_counter() - started
    result.stages = {"start": since_start() - result.seconds, **crew.clock.seconds}
    result.peak_rss = memory.peak()
    if device.type == "cuda":
        result.peak_gpu = torch.cuda.max_memory_reserved(device)
    return result


def _write(
    plan: Plan,
    checkpoint: Checkpoint,
    output: Path,
    options: Options,
    crew: Crew,
    budget: memory.Budget,
    stop: Stop,
    progress: Progress | None,
) -> Result:
    """Write the output of a plan and publish it."""
    sources = [checkpoint.path, *(checkpoint.root / file for file in checkpoint.files)]
    with StagedOutput(
        output,
        directory=plan.directory,
        force=options.force,
        sources=sources,
        plan=plan.digest,
        resume=options.resume,
    ) as staged:
        with crew.clock.stage("create"):
            writer = Writer(plan, staged)
        room = Room(checkpoint, writer, crew.device, crew, budget.elements, Warm(plan, crew.device))
        doing = _Run(plan, room, staged, budget.held, stop, progress)
        try:
            doing.do()
            with crew.clock.stage("finish"):
                writer.finish(checkpoint, digest_of(doing.source))
            if options.readback:
                with crew.clock.stage("read back"):
                    doing.read_back()
        finally:
            doing.close()
        with crew.clock.stage("publish"):
            staged.publish()
    if progress is not None:
        progress(plan.bytes_in, plan.bytes_in, "")
    return doing.result


class _Run:
    """The jobs of a plan, turned into steps, and what is known of those that are done."""

    def __init__(
        self,
        plan: Plan,
        room: Room,
        staged: StagedOutput,
        held: int,
        stop: Stop,
        progress: Progress | None,
    ) -> None:
        self.result = Result()
        self.source: dict[str, str] = {}
        self._output: dict[str, str] = {}
        self._plan, self._room, self._staged, self._stop = plan, room, staged, stop
        self._held = held  # bytes that may still be held between two passes
        self._progress = progress
        self._bytes = self._jobs = 0
        self._parts: dict[str, Part] = {
            part.spec.name: part for weight in plan.weights for part in weight.writes.values()
        }
        self._files = [room.writer.name_of(file.name) for file in plan.files]
        self._scribe = Scribe(staged, self._files, room.clock)

    def do(self) -> None:
        """Do all jobs, but those that an earlier run has done.

        Raises:
            StoppedError: a signal came.
        """
        self._tell("")
        left = self._check_proofs() if self._staged.proofs else list(self._plan.jobs)
        complete = self._room.crew.run(self._steps(left), self._retire, lambda: bool(self._stop))
        self._scribe.flush()
        if not complete:
            raise self._stopped()

    def read_back(self) -> None:
        """Read and hash what was written.

        Raises:
            OutputError: something else is there.
            StoppedError: a signal came.
        """
        for name in self._files:
            self._staged.sync(name)
            self._staged.forget(name)
        steps = read_back(self._room.writer, self._output, self._parts)
        if not self._room.crew.run(steps, lambda _: None, lambda: bool(self._stop)):
            raise self._stopped()

    def close(self) -> None:
        """Let go of the journal's thread."""
        self._scribe.close()

    def _stopped(self) -> StoppedError:
        kept = self._staged.journal is not None
        return self._stop.error(self._jobs, len(self._plan.jobs), kept=kept)

    def _check_proofs(self) -> list[Job]:
        """Hash what the jobs in the journal read and wrote; return the jobs that are left."""
        lines = [Done.of(line) for line in self._staged.proofs]
        known = {done.name: done for done in lines if done is not None}
        trials: list[Trial] = []
        left: list[Job] = []
        for job in self._plan.jobs:
            done = known.get(job.weights[0].name)
            if done is None:
                left.append(job)
            else:
                trials.append(Trial(job, done, self._room.checkpoint, self._room.writer))

        def decided(step: Step) -> None:
            for trial in step.completes:
                if isinstance(trial, Trial) and trial.holds:
                    self._bytes += trial.job.bytes_in
                    self._tell(step.name)
                    self._keep(trial.done)
                    self.result.resumed += 1
                elif isinstance(trial, Trial):
                    left.append(trial.job)

        steps = (trial.step() for trial in trials)
        if not self._room.crew.run(steps, decided, lambda: bool(self._stop)):
            raise self._stopped()
        return sorted(left, key=lambda job: job.weights[0].name)

    def _steps(self, jobs: Iterable[Job]) -> Iterator[Step]:
        """Yield the steps of all jobs; small jobs, one after the other, are one step together."""
        batch: list[Piece] = []
        within: list[Copying | Picking | Computing] = []
        for job in jobs:
            work = self._begin(job)
            pieces = list(work.steps())
            if sum(piece.size for piece in pieces) > self._room.elements:
                if within:
                    yield _step(batch, within)
                    batch, within = [], []
                for number, piece in enumerate(pieces):
                    yield _step([piece], [work], number == len(pieces) - 1)
                continue
            batch += pieces
            within.append(work)
            if sum(piece.size for piece in batch) > self._room.elements:
                yield _step(batch, within)
                batch, within = [], []
        if within:
            yield _step(batch, within)

    def _begin(self, job: Job) -> Copying | Picking | Computing:
        if len(job.weights) == 1 and job.weights[0].copies:
            return Copying(job, self._room)
        if len(job.weights) == 1 and job.weights[0].picks:
            return Picking(job, self._room)
        hold = job.bytes_in <= self._held
        if hold:
            self._held -= job.bytes_in
        return Computing(job, self._room, hold=hold)

    def _retire(self, step: Step) -> None:
        self._bytes += step.size
        self._tell(step.name)
        for work in step.completes:
            if not isinstance(work, Copying | Picking | Computing):
                raise TypeError(f"{work} is no job")
            if isinstance(work, Computing) and work.is_held:
                self._held += work.job.bytes_in
            done = work.done()
            self._keep(done)
            self._scribe.add(done, sum(weight.bytes_out for weight in work.job.weights))

    def _keep(self, done: Done) -> None:
        """Take a finished job into the manifest and the result."""
        self._jobs += 1
        self.source |= done.source
        self._output |= done.output
        for name, checksum in done.output.items():
            self._room.writer.prove(self._parts[name], checksum)
        self.result.errors |= done.errors
        self.result.moved += done.moved
        self.result.equal += done.equal
        self.result.blocks += done.blocks

    def _tell(self, name: str) -> None:
        if self._progress is not None:
            self._progress(self._bytes, self._plan.bytes_in, name)


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


def _step(
    pieces: Iterable[Piece], of: list[Copying | Picking | Computing], last: bool = True
) -> Step:
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


def find_non_finite(
    plan: Plan, checkpoint: Checkpoint, progress: Progress | None = None
) -> dict[str, str]:
    """Return name -> what is wrong, of every weight to be quantized that holds NaN or Inf.

    This reads all weights that the plan rounds, once, before anything is written.
    """
    found = {}
    rounded = [weight for weight in plan.quantized if not weight.recodes]
    done, total = 0, sum(weight.bytes_in for weight in rounded)
    for weight in rounded:
        if progress is not None:
            progress(done, total, weight.name)
        done += weight.bytes_in
        bad = look(weight, checkpoint, torch.device("cpu"))
        if bad.found:
            found[weight.name] = bad.error().message
    return found
