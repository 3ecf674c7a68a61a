"""Weights that are read together and measured for all candidates: their steps, and what is known.

measure   every slice of weights that share a scale with another slice: amax, for each candidate
          that has such a scale
finish    every slice, for each candidate in turn: quantize, and the sums of what is lost
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lowbit_kernels.error import Sums, figures_of_bands, total_of_bands
from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.pipeline import compute, lossless
from lowbitcli.pipeline.arithmetic import ops_of
from lowbitcli.pipeline.crew import Crew
from lowbitcli.pipeline.read import Rows
from lowbitcli.pipeline.slices import Slice, slices, unit_rows
from lowbitcli.pipeline.warm import Warm
from lowbitcli.pipeline.work import non_finite
from lowbitcli.plan.importance import Importance
from lowbitcli.plan.nouns import Job, Weight


@dataclass
class Room:
    """What all bundles of a pass have in common; `elements` is how large slices are."""

    checkpoint: Checkpoint
    crew: Crew
    elements: int
    warm: Sequence[Warm]
    importance: Importance | None


def bytes_of(jobs: Mapping[str, Sequence[Job]]) -> int:
    """Return the bytes that the weights of a bundle take in the source."""
    found = {w.name: w.bytes_in for some in jobs.values() for job in some for w in job.weights}
    return sum(found.values())


class _Member:
    """One weight: its slices, and what is known of them."""

    def __init__(self, variants: Mapping[str, Weight], room: Room) -> None:
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
        self.lost: dict[str, dict[int, Tensor]] = {w.name: {} for w in job.weights}
        self.weighed: dict[str, dict[int, Tensor]] = {w.name: {} for w in job.weights}

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


def total_of(weight: Weight, slices: Mapping[int, Tensor]) -> Sums:
    """Return what was lost of a weight, the bands of its slices added in order."""
    if not slices:
        return Sums(weight.numel) if weight.recodes else Sums()
    return total_of_bands(torch.cat([some for _, some in sorted(slices.items())]), weight.numel)


def _weighed(w: Tensor, v: Tensor, h: Tensor, unit: int) -> Tensor:
    """Return the error figures of the bands of each `unit` rows, in memory of the CPU, with columns
    weighed by `h`; as only ratios of it count, the largest weight is 1."""
    root = (h / h.amax()).sqrt() if bool(h.any()) else torch.ones_like(h)
    cut = zip((w.float() * root).split(unit), (v * root).split(unit), strict=True)
    return torch.cat([figures_of_bands(some, of) for some, of in cut]).cpu()


class Bundle:
    """Weights that are read together, for all candidates."""

    def __init__(self, jobs: Mapping[str, Sequence[Job]], room: Room, *, hold: bool) -> None:
        self._room = room
        variants: dict[str, dict[str, Weight]] = {}
        for candidate, some in jobs.items():
            for job in some:
                for weight in job.weights:
                    variants.setdefault(weight.name, {})[candidate] = weight
        self._members = {name: _Member(of, room) for name, of in sorted(variants.items())}
        self.aims = {c: [_Aim(job, self._members) for job in some] for c, some in jobs.items()}
        self.size = bytes_of(jobs)
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
                weight._replace(importance=importance), some.matrix, w.device
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


__all__ = ["Bundle", "Room", "bytes_of", "total_of"]
