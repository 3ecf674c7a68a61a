"""A job under way: its steps, what they tell each other, and what is known of it when it is done.

    measure   every slice of every weight: amax, where a scale is shared by more than a slice
    finish    every slice: quantize, dequantize or change layouts, and write
    copy      a tensor that stays as it is, piece by piece

Slices of a job that is measured first are read twice, or held in memory in between where `held` has
room for all of them.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from lowbit_kernels.error import total_of_bands
from lowbitcli.checkpoint.manifest import TensorHash
from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.errors import NonFiniteError
from lowbitcli.pipeline import compute, lossless
from lowbitcli.pipeline.clock import Clock
from lowbitcli.pipeline.crew import Crew, Order
from lowbitcli.pipeline.proof import Done
from lowbitcli.pipeline.read import Rows, as_stored, buffer, bytes_of
from lowbitcli.pipeline.slices import (
    Slice,
    extent,
    is_streamed,
    is_turned,
    row_bytes,
    rows_high,
    slices,
    unit_rows,
)
from lowbitcli.pipeline.warm import Warm
from lowbitcli.pipeline.write import Writer
from lowbitcli.plan.nouns import Job, Weight
from lowbitcli.tensors import DATA

COPY_BYTES = 8 << 20  # what is read at once of a tensor that is only copied


@dataclass
class Room:
    """What every job of a run has in common; `elements` is how large slices are."""

    checkpoint: Checkpoint
    writer: Writer
    device: torch.device
    crew: Crew
    elements: int
    warm: Warm

    @property
    def clock(self) -> Clock:
        return self.crew.clock


@dataclass(frozen=True)
class Piece:
    """One step of a job, and the bytes of the source that it deals with."""

    work: Callable[[], None]
    size: int


class Copying:
    """A job of one tensor that is copied byte for byte."""

    def __init__(self, job: Job, room: Room) -> None:
        self.job = job
        self.weight, self._room = job.weights[0], room
        self._order = Order(room.crew)
        self.hashes: dict[str, TensorHash] = {}

    def steps(self) -> Iterator[Piece]:
        """Yield the pieces of every part, in order."""
        number = 0
        for part, read in self.weight.reads.items():
            size = read.spec.nbytes
            self.hashes[part] = TensorHash()
            for start in range(0, size, COPY_BYTES):
                stop = min(start + COPY_BYTES, size)
                yield Piece(partial(self._copy, part, start, stop, number), stop - start)
                number += 1

    def _copy(self, part: str, start: int, stop: int, number: int) -> None:
        raw = buffer(stop - start, torch.device("cpu")).numpy().data
        with self._room.clock.stage("read"):
            self._room.checkpoint.read_into(self.weight.reads[part].spec.name, raw, start)
        with self._room.clock.stage("write"):
            self._room.writer.write(self.weight.writes[part], start, raw)
        with self._order.turn(number), self._room.clock.stage("hash"):
            self.hashes[part].update(raw)

    def done(self) -> Done:
        """Return what is known after the last step."""
        weight = self.weight
        hashes = {part: found.hexdigest() for part, found in self.hashes.items()}
        return Done(
            weight.name,
            {weight.reads[part].key: found for part, found in hashes.items()},
            {weight.writes[part].spec.name: found for part, found in hashes.items()},
        )


class Computing:
    """A job whose numbers change: one weight, or weights that share a scale."""

    def __init__(self, job: Job, room: Room, *, hold: bool) -> None:
        self.job = job
        self._room = room
        self.members = [Member(weight, room) for weight in job.weights]
        self._twice = self._is_measured_first()
        self._keep = all(lossless.keeps_codes(weight) for weight in job.weights)
        self.is_held = hold
        self._unmeasured = sum(len(member.slices) for member in self.members)
        self._is_measured = False
        self._lock = threading.Lock()

    def steps(self) -> Iterator[Piece]:
        """Yield the steps in an order in which none waits for a later one."""
        passes = (self._measure, self._finish) if self._twice else (self._finish,)
        for number, work in enumerate(passes):
            for member in self.members:
                for some in member.slices:
                    size = member.weight.bytes_in * (some.index + 1) // len(member.slices)
                    size -= member.weight.bytes_in * some.index // len(member.slices)
                    if self._twice:
                        size = size - size // 2 if number else size // 2
                    yield Piece(partial(work, member, some), size)

    def done(self) -> Done:
        """Return what is known after the last step."""
        done = Done(self.job.weights[0].name)
        for member in self.members:
            done.source |= member.rows.source
            done.output |= member.output
            done.moved += member.moved
            for equal, blocks in member.equal.values():
                done.equal += equal
                done.blocks += blocks
            if member.lost:
                found = torch.cat([member.lost[x] for x in range(len(member.slices))])
                done.errors[member.weight.name] = total_of_bands(found, member.weight.numel)
        return done

    def _is_measured_first(self) -> bool:
        """Is there a scale that more than one slice depends on?"""
        rounded = [x for x in self.job.weights if x.target is not None and not x.recodes]
        if not rounded or all(weight.target.passes == 1 for weight in rounded if weight.target):
            return False
        return sum(len(member.slices) for member in self.members) > 1

    def _measure(self, member: "Member", some: Slice) -> None:
        parts = member.rows.parts(some)
        self._room.warm.wait()
        with self._room.clock.stage("measure"):
            w = compute.values_of(member.weight, parts)
            member.amax[some.index] = self._amax(member, w, parts)
        if self.is_held:
            member.held[some.index] = parts
        with self._lock:
            self._unmeasured -= 1
            if self._unmeasured:
                return
        self._share()

        def tell() -> None:
            self._is_measured = True

        self._room.crew.tell(tell)

    def _amax(self, member: "Member", w: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        amax = compute.measure(member.weight, w)
        if amax is None:
            raise non_finite(member.weight, self._room.checkpoint, self._room.device)
        return lossless.reach(parts) if self._keep else amax

    def _share(self) -> None:
        """Make the scales of every matrix from the largest magnitudes of its slices."""
        for matrix in range(self.members[0].matrices):
            found = [member.amax_of(matrix) for member in self.members]
            whole = torch.stack(found).amax(0)
            for member, own in zip(self.members, found, strict=True):
                amax = whole if self.job.shared else own
                member.shared[matrix] = compute.shared_scale(member.weight, amax, keep=self._keep)

    def _finish(self, member: "Member", some: Slice) -> None:
        weight = member.weight
        if self._twice:
            self._room.crew.wait_for(lambda: self._is_measured)
        parts = member.held.pop(some.index, None)
        if parts is None:
            parts = member.rows.parts(some, again=self._twice)
        if weight.recodes:
            member.store(some, parts)
            return
        self._room.warm.wait()
        with self._room.clock.stage("compute"):
            out = self._computed(member, some, parts)
        member.store(some, out)

    def _computed(
        self, member: "Member", some: Slice, parts: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return what is stored of a slice, on the device."""
        weight = member.weight
        w = compute.values_of(weight, parts)
        if weight.target is None:
            if not bool(torch.isfinite(w).all()):
                raise non_finite(weight, self._room.checkpoint, self._room.device)
            return {DATA: compute.cast(weight, w)}
        if self._twice:
            shared = member.shared[some.matrix]
        else:
            amax = self._amax(member, w, parts)
            shared = compute.shared_scale(weight, amax, keep=self._keep)
        source = parts if self._keep else None
        out, member.lost[some.index] = compute.quantize(
            weight, w, shared, member.unit, source, some.matrix
        )
        if lossless.is_counted(weight) and not weight.fake:
            member.equal[some.index] = lossless.equal_blocks(weight, w, out)
        return out


class Member:
    """One weight of a job: its slices, and what is known of them."""

    def __init__(self, weight: Weight, room: Room) -> None:
        self.weight = weight
        self.slices = slices(weight, room.elements)
        self.unit = unit_rows(weight)
        self.rows = Rows(weight, room.checkpoint, room.device, room.crew)
        self.matrices = self.slices[-1].matrix + 1 if self.slices else 0
        self.amax: dict[int, Tensor] = {}
        self.shared: dict[int, Tensor | None] = {}
        self.held: dict[int, dict[str, Tensor]] = {}
        self.lost: dict[int, Tensor] = {}  # figures of bands
        self.equal: dict[int, tuple[int, int]] = {}
        self.output: dict[str, str] = {}
        self.moved = 0
        self._writer, self._clock = room.writer, room.clock
        self._order = Order(room.crew)
        self._hashes: dict[str, TensorHash] = {}
        self._collected: dict[str, list[Tensor]] = {}
        # What the parts are parts of: nothing, where values are stored.
        self._scheme = None if weight.fake else weight.target

    def amax_of(self, matrix: int) -> Tensor:
        """Return the largest magnitude of a matrix, once its slices are measured."""
        found = [self.amax[some.index] for some in self.slices if some.matrix == matrix]
        return torch.stack(found).amax(0)

    def store(self, some: Slice, parts: Mapping[str, Tensor]) -> None:
        """Write the rows of a slice, and with the last slice what is not written by rows."""
        writes = self.weight.writes
        parts = {name: as_stored(parts[name], writes[name]) for name in writes}
        by_rows = {x for x, part in writes.items() if is_streamed(self._scheme, x, part)}
        with self._clock.stage("copy out"):
            found = bytes_of(*(parts[name] for name in sorted(by_rows)))
            kept = {
                name: parts[name].cpu()
                for name in writes
                if name not in by_rows and (some.first or rows_high(self._scheme, name) is not None)
            }
        written = dict(zip(sorted(by_rows), found, strict=True))
        for name, data in written.items():
            part, shape = writes[name], self.weight.shape
            place = extent(self._scheme, name, part, shape, some)
            step = row_bytes(self._scheme, name, part, shape)
            if len(data) != (place.stop - place.start) * step:
                raise AssertionError(f"{part.spec.name}: {len(data)} bytes, not as planned")
            with self._clock.stage("write"):
                self._writer.write(part, place.start * step, data)
        with self._order.turn(some.index), self._clock.stage("hash"):
            for name, data in written.items():
                self._hashes.setdefault(name, TensorHash()).update(data)
            for name, tensor in kept.items():
                self._collected.setdefault(name, []).append(tensor)
                if some.last and is_turned(self.weight.writes[name]):
                    self._turn(name, some.matrix)
            if some.index == len(self.slices) - 1:
                self._complete()

    def _turn(self, name: str, matrix: int) -> None:
        """Write a matrix that was collected and lies transposed in the file."""
        part = self.weight.writes[name]
        whole = torch.cat(self._collected.pop(name))
        (data,) = bytes_of(whole if part.stored is None else part.stored.layout.encode(whole))
        if len(data) * self.matrices != part.spec.nbytes:
            raise AssertionError(f"{part.spec.name}: {len(data)} bytes, not as planned")
        self._writer.write(part, matrix * len(data), data)
        self._hashes.setdefault(name, TensorHash()).update(data)

    def _complete(self) -> None:
        """Write what was collected, whole and in its layout, and finish all checksums."""
        specs = self._scheme.specs(self.weight.shape) if self._scheme is not None else {}
        for name, pieces in self._collected.items():
            part = self.weight.writes[name]
            by_rows = rows_high(self._scheme, name) is not None
            whole = torch.cat(pieces) if by_rows else torch.stack(pieces)
            whole = whole.reshape(specs[name].shape if name in specs else self.weight.shape)
            encoded = whole if part.stored is None else part.stored.layout.encode(whole)
            if self.weight.recodes and part.stored is not None and whole.dtype == torch.float32:
                back = part.stored.layout.decode(encoded)
                self.moved += int((back.view(torch.int32) != whole.view(torch.int32)).sum())
            (data,) = bytes_of(encoded)
            if len(data) != part.spec.nbytes:
                raise AssertionError(f"{part.spec.name}: {len(data)} bytes, not as planned")
            self._writer.write(part, 0, data)
            self._hashes[name] = TensorHash()
            self._hashes[name].update(data)
        for name, found in self._hashes.items():
            self.output[self.weight.writes[name].spec.name] = found.hexdigest()


def non_finite(weight: Weight, checkpoint: Checkpoint, device: torch.device) -> NonFiniteError:
    """Read a weight again and return the error that tells of the NaN and Inf in it."""
    found = look(weight, checkpoint, device)
    return found.error()


def look(weight: Weight, checkpoint: Checkpoint, device: torch.device) -> compute.NonFinite:
    """Count the NaN and Inf of a weight, in slices."""
    rows, found = Rows(weight, checkpoint, device), compute.NonFinite(weight)
    lead = weight.shape[:-2]
    for some in slices(weight, 1 << 20):
        w = compute.values_of(weight, rows.parts(some))
        at = np.unravel_index(some.matrix, lead) if lead else ()
        found.look(w, tuple(int(i) for i in at), some.start)
    return found
