"""What each candidate would lose of each weight, in one pass over the checkpoint.

The arithmetic, the slices' units and the order of the sums are those of a run that quantizes, so
the figures are those that it reports, whatever memory and threads there are. A slice is read once
for all candidates; where there is a first pass and the weights that go together are more than may
be held in memory, twice.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from lowbit_kernels.error import Sums
from lowbitcli.checkpoint.manifest import digest_of
from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.errors import DeviceError, NonFiniteError
from lowbitcli.pipeline import memory
from lowbitcli.pipeline.arithmetic import device_of
from lowbitcli.pipeline.crew import Crew, Step
from lowbitcli.pipeline.ledger import Progress
from lowbitcli.pipeline.stop import Stop
from lowbitcli.pipeline.warm import Warm
from lowbitcli.plan.importance import Importance
from lowbitcli.plan.nouns import Job, Plan
from lowbitcli.search.bundle import Bundle, Room, bytes_of, total_of
from lowbitcli.tensors import safe

_FINITE = "only finite weights can be measured; `nonfinite: keep` is for a recipe of your own"


@dataclass(frozen=True)
class Measured:
    """What was lost, by candidate and weight; the same with columns weighed, where there is their
    importance; a digest of all numbers that were read; seconds of each stage, those of threads
    added up, and the most memory that was taken."""

    lost: Mapping[str, Mapping[str, Sums]]
    weighed: Mapping[str, Mapping[str, Sums]]
    digest: str
    stages: Mapping[str, float]
    peak_rss: int
    peak_gpu: int = 0


@dataclass(frozen=True)
class Allowed:
    """The device by name, and the memory that may be taken, in bytes: of the process, and of a
    GPU."""

    device: str = "auto"
    max_memory: int = memory.DEFAULT
    max_gpu_memory: int | None = None


def measure(
    checkpoint: Checkpoint,
    plans: Mapping[str, Plan],
    jobs: Mapping[str, Sequence[Job]],
    allowed: Allowed,
    importance: Importance | None = None,
    progress: Progress | None = None,
) -> Measured:
    """Measure the jobs of each candidate, which are of its plan.

    Raises:
        NonFiniteError: a weight holds NaN or Inf.
        UnsupportedError: the arithmetic refuses a weight.
        DeviceError: the device has too little memory.
        StoppedError: a signal came.
    """
    device = device_of(allowed.device)
    if device.type == "cuda":
        torch.zeros(1, device=device)  # what CUDA itself takes counts as taken
        torch.cuda.reset_peak_memory_stats(device)
    budgets = [
        memory.budget(plan, allowed.max_memory, device, allowed.max_gpu_memory)
        for plan in plans.values()
    ]
    threads, elements, held = (
        min(getattr(one, name) for one in budgets) for name in ("threads", "elements", "held")
    )
    limit = memory.gpu_limit(device, allowed.max_gpu_memory)
    with limit, Stop() as stop, Crew(threads, device) as crew:
        warm = [Warm(plan, device) for plan in plans.values()]
        room = Room(checkpoint, crew, elements, warm, importance)
        pass_ = _Pass(room, list(_bundles(jobs)), held, progress)
        if not crew.run(pass_.steps(), pass_.retire, lambda: bool(stop)):
            raise stop.error(pass_.done, pass_.total, kept=False)
        gpu = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0
        return Measured(
            pass_.lost,
            pass_.weighed,
            digest_of(pass_.source),
            dict(crew.clock.seconds),
            memory.peak(),
            gpu,
        )


def _bundles(jobs: Mapping[str, Sequence[Job]]) -> Iterator[dict[str, list[Job]]]:
    """Yield the jobs that must be read together, by candidate: those with a weight in common, and
    those with one in common with these; in the order of their first names."""
    of: dict[str, str] = {}

    def root(name: str) -> str:
        while of.setdefault(name, name) != name:
            name = of[name]
        return name

    for some in jobs.values():
        for job in some:
            for weight in job.weights:
                one, other = sorted((root(weight.name), root(job.weights[0].name)))
                of[other] = one
    found: dict[str, dict[str, list[Job]]] = {}
    for candidate, some in jobs.items():
        for job in some:
            bundle = found.setdefault(root(job.weights[0].name), {})
            bundle.setdefault(candidate, []).append(job)
    for name in sorted(found):
        yield found[name]


class _Pass:
    """The steps of all bundles, and what they found."""

    def __init__(
        self,
        room: Room,
        bundles: Sequence[dict[str, list[Job]]],
        held: int,
        progress: Progress | None,
    ) -> None:
        self.lost: dict[str, dict[str, Sums]] = {}
        self.weighed: dict[str, dict[str, Sums]] = {}
        self.source: dict[str, str] = {}
        self.done = 0
        self._room, self._bundles, self._held, self._progress = room, bundles, held, progress
        self.total = sum(bytes_of(bundle) for bundle in bundles)

    def steps(self) -> Iterator[Step]:
        """Yield the steps in an order in which none waits for a later one."""
        for jobs in self._bundles:
            size = bytes_of(jobs)
            hold = size <= self._held
            if hold:
                self._held -= size
            bundle = Bundle(jobs, self._room, hold=hold)
            works = list(bundle.works())
            for number, (work, name) in enumerate(works):
                share = size * (number + 1) // len(works) - size * number // len(works)
                of = (bundle,) if number == len(works) - 1 else ()
                yield Step(partial(_within_memory, work, name), share, name, of)

    def retire(self, step: Step) -> None:
        """Note what a step completed."""
        self.done += step.size
        if self._progress is not None:
            self._progress(self.done, self.total, step.name)
        for bundle in step.completes:
            if not isinstance(bundle, Bundle):
                raise TypeError(f"{bundle} is no bundle")
            if bundle.is_held:
                self._held += bundle.size
            self.source |= bundle.source
            for candidate, aims in bundle.aims.items():
                lost = self.lost.setdefault(candidate, {})
                weighed = self.weighed.setdefault(candidate, {})
                for aim in aims:
                    for weight in aim.job.weights:
                        lost[weight.name] = total_of(weight, aim.lost[weight.name])
                        if aim.members[weight.name].importance:
                            weighed[weight.name] = total_of(weight, aim.weighed[weight.name])


def _within_memory(work: Callable[[], None], name: str) -> None:
    try:
        work()
    except NonFiniteError as error:
        if "--nonfinite" not in error.hint:
            raise
        raise NonFiniteError(error.message, hint=_FINITE) from error
    except torch.OutOfMemoryError as error:
        raise DeviceError(
            f"the device has too little memory for {safe(name)}", hint="--device cpu"
        ) from error


__all__ = ["Allowed", "Measured", "measure"]
