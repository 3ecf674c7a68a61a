"""What is known of a run's jobs: taken down as they are done, for the journal, the manifest, the
report, and whoever watches."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lowbit_kernels.error import Sums
from lowbitcli.checkpoint import manifest
from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.checkpoint.writer import StagedOutput
from lowbitcli.errors import CheckpointError, StoppedError
from lowbitcli.pipeline import memory
from lowbitcli.pipeline.crew import Crew, Step
from lowbitcli.pipeline.proof import Done, Scribe, Trial, promised, read_back
from lowbitcli.pipeline.stop import Stop
from lowbitcli.pipeline.worker import Usage
from lowbitcli.pipeline.write import Writer
from lowbitcli.plan.nouns import Part, Plan
from lowbitcli.tensors import safe

# Called with bytes done, bytes in all, and the name of what is being worked on.
Progress = Callable[[int, int, str], None]


@dataclass
class Result:
    """What a run did: errors by weight, scales that moved by an ulp, blocks that were requantized
    without loss and of how many, seconds, memory in bytes.

    `complete` is whether there was nothing to do; `resumed` counts jobs that were done before;
    `stages` has the seconds of each stage, those of threads and processes added up; memory is that
    of the process that took most. `missing` has the jobs that other shares still have to do, by
    share: the output is published when there are none. `forecast` is what was expected of both
    peaks, `allowed` their caps.
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
    missing: dict[int, int] = field(default_factory=dict)
    forecast: tuple[int, int] = (0, 0)
    allowed: tuple[int, int | None] = (memory.DEFAULT, None)

    def add(self, usage: Usage) -> None:
        """Count in what a worker took."""
        for stage, seconds in usage.seconds.items():
            self.stages[stage] = self.stages.get(stage, 0.0) + seconds
        self.peak_rss = max(self.peak_rss, usage.peak_rss)
        self.peak_gpu = max(self.peak_gpu, usage.peak_gpu)


def proved(lines: Iterable[Mapping[str, Any]]) -> dict[str, Done]:
    """Return the jobs that the lines of a journal speak of, by name."""
    done = (Done.of(line) for line in lines)
    return {one.name: one for one in done if one is not None}


class Ledger:
    """The book of one run; `places` are its jobs, by their places in the plan."""

    def __init__(
        self,
        plan: Plan,
        checkpoint: Checkpoint,
        writer: Writer,
        places: Iterable[int],
        progress: Progress | None,
    ) -> None:
        self.result = Result()
        self.source: dict[str, str] = {}
        self.scribe: Scribe | None = None
        self.places = list(places)
        self._output: dict[str, str] = {}
        self._plan, self._checkpoint, self._writer = plan, checkpoint, writer
        self._promised = promised(checkpoint)
        self._progress = progress
        self._total = sum(plan.jobs[place].bytes_in for place in self.places)
        self._bytes = self._jobs = 0
        self._parts: dict[str, Part] = {
            part.spec.name: part for weight in plan.weights for part in weight.writes.values()
        }

    def step(self, size: int, name: str) -> None:
        """Count `size` bytes of the source that are dealt with."""
        self._bytes += size
        self.tell(name)

    def done(self, done: Done) -> None:
        """Take down a job whose output is written.

        Raises:
            CheckpointError: what it read are not the bytes that lowbit once wrote there.
            OutputError: what was written before cannot be made durable.
        """
        self._hold(done.source)
        self.keep(done)
        if self.scribe is not None:
            parts = [self._parts[name] for name in done.output]
            files = {self._writer.name_of(part.file) for part in parts}
            self.scribe.add(done, sum(part.spec.nbytes for part in parts), files)

    def keep(self, done: Done) -> None:
        """Take a finished job into the manifest and the result."""
        self._jobs += 1
        self.source |= done.source
        self._output |= done.output
        for name, checksum in done.output.items():
            self._writer.prove(self._parts[name], checksum)
        self.result.errors |= done.errors
        self.result.moved += done.moved
        self.result.equal += done.equal
        self.result.blocks += done.blocks

    def _hold(self, source: Mapping[str, str]) -> None:
        """Hold checksums of what was read to those of the source's own manifest; parts of a tensor
        have none there."""
        for name, found in source.items():
            if self._promised.get(name, found) != found:
                raise CheckpointError(
                    f"{safe(name)}: its bytes are not those that lowbit wrote",
                    hint=f"lowbit verify says what else is damaged; {self._anew()}",
                )

    def _anew(self) -> str:
        """Return what to do where these are no damaged bytes, but others that were saved there."""
        if self._checkpoint.is_directory:
            beside = safe(str(self._checkpoint.path / manifest.MANIFEST))
            return f"where a training saved others in their place, remove {beside}"
        return "where others were saved in their place, save them without lowbit's metadata"

    def tell(self, name: str) -> None:
        """Say how far it is."""
        if self._progress is not None:
            self._progress(self._bytes, self._total, name)

    def close_with(self, plan: Plan) -> None:
        """Put errors in the order of the plan, and say that all is done."""
        errors = self.result.errors
        self.result.errors = {w.name: errors[w.name] for w in plan.weights if w.name in errors}
        if self._progress is not None:
            self._progress(self._total, self._total, "")

    def check(self, staged: StagedOutput, crew: Crew, stop: Stop) -> list[int]:
        """Hash what the jobs in the journal read and wrote; return the jobs that are left.

        Raises:
            StoppedError: a signal came.
        """
        known = proved(staged.proofs)
        places = {self._plan.jobs[place].weights[0].name: place for place in self.places}
        trials: list[Trial] = []
        left = [place for name, place in places.items() if name not in known]
        for name in places.keys() & known.keys():
            job = self._plan.jobs[places[name]]
            trials.append(Trial(job, known[name], self._checkpoint, self._writer))

        def decided(step: Step) -> None:
            for trial in step.completes:
                if isinstance(trial, Trial) and trial.holds:
                    self.step(trial.job.bytes_in, step.name)
                    self.keep(trial.done)
                    self.result.resumed += 1
                elif isinstance(trial, Trial):
                    left.append(places[trial.done.name])

        trials.sort(key=lambda trial: places[trial.done.name])
        if not crew.run((trial.step() for trial in trials), decided, lambda: bool(stop)):
            raise self.stopped(stop, staged)
        return sorted(left)

    def read_back(self, staged: StagedOutput, crew: Crew, stop: Stop) -> None:
        """Read and hash what was written.

        Raises:
            OutputError: something else is there.
            StoppedError: a signal came.
        """
        for file in self._plan.files:
            name = self._writer.name_of(file.name)
            staged.sync(name)
            staged.forget(name)
        steps = read_back(self._writer, self._output, self._parts)
        if not crew.run(steps, lambda _: None, lambda: bool(stop)):
            raise self.stopped(stop, staged)

    def stopped(self, stop: Stop, staged: StagedOutput) -> StoppedError:
        """Return the error that says that a signal came, and how far it was."""
        kept = staged.journal is not None
        return stop.error(self._jobs, len(self.places), kept=kept)
