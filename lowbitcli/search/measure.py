"""What each candidate would lose of each weight, in one pass over the checkpoint.

    measure   every slice of weights that share a scale with another slice: amax, for each candidate
              that has such a scale
    finish    every slice, for each candidate in turn: quantize, and the sums of what is lost

The arithmetic, the slices' units and the order of the sums are those of a run that quantizes, so
the figures are those that it reports, whatever memory and threads there are. A slice is read once
for all candidates; where there is a first pass and the weights that go together are more than may
be held in memory, twice.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from lowbit_kernels.error import Sums, bands
from lowbitcli.checkpoint.manifest import digest_of
from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.errors import DeviceError
from lowbitcli.pipeline import compute, lossless, memory
from lowbitcli.pipeline.arithmetic import device_of, ops_of
from lowbitcli.pipeline.crew import Crew, Step
from lowbitcli.pipeline.ledger import Progress
from lowbitcli.pipeline.read import Rows
from lowbitcli.pipeline.slices import Slice, slices, unit_rows
from lowbitcli.pipeline.stop import Stop
from lowbitcli.pipeline.warm import Warm
from lowbitcli.pipeline.work import non_finite
from lowbitcli.plan.importance import Importance
from lowbitcli.plan.nouns import Job, Plan, Weight
from lowbitcli.tensors import safe


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


@dataclass
class _Room:
    checkpoint: Checkpoint
    crew: Crew
    elements: int
    warm: Sequence[Warm]
    importance: Importance | None


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
        room = _Room(checkpoint, crew, elements, warm, importance)
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
        room: _Room,
        bundles: Sequence[dict[str, list[Job]]],
        held: int,
        progress: Progress | None,
    ) -> None:
        self.lost: dict[str, dict[str, Sums]] = {}
        self.weighed: dict[str, dict[str, Sums]] = {}
        self.source: dict[str, str] = {}
        self.done = 0
        self._room, self._bundles, self._held, self._progress = room, bundles, held, progress
        self.total = sum(_bytes(bundle) for bundle in bundles)

    def steps(self) -> Iterator[Step]:
        """Yield the steps in an order in which none waits for a later one."""
        for jobs in self._bundles:
            size = _bytes(jobs)
            hold = size <= self._held
            if hold:
                self._held -= size
            bundle = _Bundle(jobs, self._room, hold=hold)
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
            if not isinstance(bundle, _Bundle):
                raise TypeError(f"{bundle} is no bundle")
            if bundle.is_held:
                self._held += bundle.size
            self.source |= bundle.source
            for candidate, aims in bundle.aims.items():
                lost = self.lost.setdefault(candidate, {})
                weighed = self.weighed.setdefault(candidate, {})
                for aim in aims:
                    for weight in aim.job.weights:
                        lost[weight.name] = _total(weight, aim.lost[weight.name])
                        if aim.members[weight.name].importance:
                            weighed[weight.name] = _total(weight, aim.weighed[weight.name])


def _within_memory(work: Callable[[], None], name: str) -> None:
    try:
        work()
    except torch.OutOfMemoryError as error:
        raise DeviceError(
            f"the device has too little memory for {safe(name)}", hint="--device cpu"
        ) from error


def _bytes(jobs: Mapping[str, Sequence[Job]]) -> int:
    """Return the bytes that the weights of a bundle take in the source."""
    found = {w.name: w.bytes_in for some in jobs.values() for job in some for w in job.weights}
    return sum(found.values())


class _Member:
    """One weight: its slices, and what is known of them."""

    def __init__(self, variants: Mapping[str, Weight], room: _Room) -> None:
        # The largest unit is a multiple of every other one: all are powers of two.
        self.weight = max(variants.values(), key=unit_rows)
        self.slices = slices(self.weight, room.elements)
        self.rows = Rows(self.weight, room.checkpoint, room.crew.device, room.crew)
        self.held: dict[int, dict[str, Tensor]] = {}
        self.importance = b"" if room.importance is None else room.importance.of(self.weight)


class _Aim:
    """A job as one candidate has it: whose weights share a scale, and what that is."""

    def __init__(self, job: Job, members: Mapping[str, _Member]) -> None:
        self.job = job
        self.members = {weight.name: members[weight.name] for weight in job.weights}
        self.keep = all(lossless.keeps_codes(weight) for weight in job.weights)
        self.recodes = all(weight.recodes for weight in job.weights)
        number = sum(len(member.slices) for member in self.members.values())
        twice = any(w.target is not None and w.target.passes > 1 for w in job.weights)
        self.is_measured_first = twice and not self.recodes and number > 1
        self.amax: dict[tuple[str, int], Tensor] = {}
        self.shared: dict[tuple[str, int], Tensor | None] = {}
        self.lost: dict[str, dict[int, list[Sums]]] = {w.name: {} for w in job.weights}
        self.weighed: dict[str, dict[int, list[Sums]]] = {w.name: {} for w in job.weights}

    def share(self) -> None:
        """Make the scales of every matrix from the largest magnitudes of its slices."""
        first = next(iter(self.members.values()))
        for matrix in range(first.slices[-1].matrix + 1):
            found = {
                name: torch.stack(
                    [self.amax[name, x.index] for x in member.slices if x.matrix == matrix]
                ).amax(0)
                for name, member in self.members.items()
            }
            whole = torch.stack(list(found.values())).amax(0)
            for weight in self.job.weights:
                amax = whole if self.job.shared else found[weight.name]
                shared = compute.shared_scale(weight, amax, keep=self.keep)
                self.shared[weight.name, matrix] = shared


def _total(weight: Weight, slices: Mapping[int, list[Sums]]) -> Sums:
    """Return what was lost of a weight, its slices added in order."""
    found = Sums(weight.numel) if weight.recodes else Sums()
    for _, some in sorted(slices.items()):
        for one in some:
            found = found.plus(one)
    return found


def _weighed(w: Tensor, v: Tensor, h: Tensor, unit: int) -> list[Sums]:
    """Return the error sums of each `unit` rows with columns weighed by `h`; as only ratios of it
    count, the largest weight is 1."""
    root = (h / h.amax()).sqrt() if bool(h.any()) else torch.ones_like(h)
    cut = zip((w.float() * root).split(unit), (v * root).split(unit), strict=True)
    return [one for some, of in cut for one in bands(some, of)]


class _Bundle:
    """Weights that are read together, for all candidates."""

    def __init__(self, jobs: Mapping[str, Sequence[Job]], room: _Room, *, hold: bool) -> None:
        self._room = room
        variants: dict[str, dict[str, Weight]] = {}
        for candidate, some in jobs.items():
            for job in some:
                for weight in job.weights:
                    variants.setdefault(weight.name, {})[candidate] = weight
        self._members = {name: _Member(of, room) for name, of in sorted(variants.items())}
        self.aims = {c: [_Aim(job, self._members) for job in some] for c, some in jobs.items()}
        self.size = _bytes(jobs)
        self._first = [a for aims in self.aims.values() for a in aims if a.is_measured_first]
        self.is_held = hold
        self._unmeasured = sum(len(member.slices) for member in self._members.values())
        self._is_measured = False
        self._lock = threading.Lock()

    @property
    def source(self) -> dict[str, str]:
        """Return the checksum of every tensor read."""
        return {k: v for member in self._members.values() for k, v in member.rows.source.items()}

    def works(self) -> Iterator[tuple[Callable[[], None], str]]:
        """Yield what is to be done, and the weight that it is done with."""
        for work in (self._measure, self._finish) if self._first else (self._finish,):
            for name, member in self._members.items():
                for some in member.slices:
                    yield partial(work, name, member, some), name

    def _measure(self, name: str, member: _Member, some: Slice) -> None:
        parts = member.rows.parts(some)
        self._wait_for_kernels()
        with self._room.crew.clock.stage("measure"):
            w = compute.values_of(member.weight, parts)
            for aim in self._first:
                for weight in aim.job.weights:
                    if weight.name == name:
                        aim.amax[name, some.index] = self._amax(aim, weight, w, parts)
        if self.is_held:
            member.held[some.index] = parts
        with self._lock:
            self._unmeasured -= 1
            if self._unmeasured:
                return
        for aim in self._first:
            aim.share()

        def tell() -> None:
            self._is_measured = True

        self._room.crew.tell(tell)

    def _finish(self, name: str, member: _Member, some: Slice) -> None:
        if self._first:
            self._room.crew.wait_for(lambda: self._is_measured)
        parts = member.held.pop(some.index, None)
        if parts is None:
            parts = member.rows.parts(some, again=bool(self._first))
        self._wait_for_kernels()
        with self._room.crew.clock.stage("compute"):
            w = compute.values_of(member.weight, parts)
            for aims in self.aims.values():
                for aim in aims:
                    for weight in aim.job.weights:
                        if weight.name == name and not weight.recodes:
                            self._lose(aim, weight, some, w, parts)

    def _lose(
        self, aim: _Aim, weight: Weight, some: Slice, w: Tensor, parts: Mapping[str, Tensor]
    ) -> None:
        """Note what a candidate loses of a slice."""
        if aim.is_measured_first:
            shared = aim.shared[weight.name, some.matrix]
        else:
            amax = self._amax(aim, weight, w, parts)
            shared = compute.shared_scale(weight, amax, keep=aim.keep)
        source = parts if aim.keep else None
        unit = unit_rows(weight)
        out, found = compute.quantize(weight, w, shared, unit, source, some.matrix)
        aim.lost[weight.name][some.index] = found
        importance = aim.members[weight.name].importance
        if importance and weight.target is not None:
            v = ops_of(weight.target).dequantize(out, torch.float32)
            (h,) = compute.importance_of(
                replace(weight, importance=importance), some.matrix, w.device
            )
            aim.weighed[weight.name][some.index] = _weighed(w, v, h, unit)

    def _amax(self, aim: _Aim, weight: Weight, w: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        amax = compute.measure(weight, w)
        if amax is None:
            raise non_finite(weight, self._room.checkpoint, self._room.crew.device)
        return lossless.reach(parts) if aim.keep else amax

    def _wait_for_kernels(self) -> None:
        for one in self._room.warm:
            one.wait()


__all__ = ["Allowed", "Measured", "measure"]
