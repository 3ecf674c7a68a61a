"""Small jobs done together: neighbours read by one call, weights of a kind quantized as a stack,
neighbours written by one call.

    one by one   a read, some 10 launches, 3 waits for the device and a write for each part; about
                 1 ms of Python a weight, during which other threads stand still
    together     as many for all weights of a kind in 16 MiB of the source

Bytes and error sums are those of one by one. Where anything is refused, nothing has been written
and the jobs are done one by one, which says what is wrong with which.

It is done on the kinds of devices in `DEVICES`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

import torch
from torch import Tensor

from lowbitcli.pipeline import alike
from lowbitcli.pipeline.arithmetic import torch_dtype
from lowbitcli.pipeline.compute import is_finite
from lowbitcli.pipeline.proof import checksum
from lowbitcli.pipeline.read import as_stored, buffer, bytes_of, on_host
from lowbitcli.pipeline.work import Computing, Copying, Member, Room
from lowbitcli.plan.nouns import Part, Weight
from lowbitcli.tensors import DATA

DEVICES = frozenset({"cpu", "cuda"})
_ALIGNED = 256  # bytes, at a multiple of which a stack begins

Small = Copying | Computing


def is_small(work: object) -> TypeGuard[Small]:
    """May this job be done together with others?"""
    if isinstance(work, Computing):
        return all(len(one.slices) == 1 and alike.fits(one.weight) for one in work.members)
    return isinstance(work, Copying)


@dataclass
class _Stack:
    """Weights of one kind, and where the first of them is in what was read."""

    members: list[Member] = field(default_factory=list)
    place: int = 0

    @property
    def like(self) -> Weight:
        return self.members[0].weight

    @property
    def size(self) -> int:
        """The bytes of one of them."""
        return self.like.reads[DATA].nbytes

    def of(self, memory: Tensor) -> Tensor:
        """Return the stack as it lies in memory."""
        flat = memory[self.place : self.place + len(self.members) * self.size]
        dtype = torch_dtype(self.like.reads[DATA].spec.dtype)
        return flat.view(dtype).reshape(len(self.members), *self.like.shape)


Computed = tuple[dict[str, Tensor], Tensor]


class Together:
    """Small jobs of one step."""

    def __init__(self, works: Sequence[Small], room: Room) -> None:
        self._room = room
        self._copying = [work for work in works if isinstance(work, Copying)]
        self._computing = [work for work in works if isinstance(work, Computing)]
        self._stacks = _stacks([one for work in self._computing for one in work.members])
        self._raw: dict[str, memoryview] = {}  # what was read, by the key of its part

    def work(self) -> bool:
        """Do the jobs; return False, and nothing is done, where a weight is refused."""
        with self._room.clock.stage("read"):
            memory = self._read()
        self._room.warm.wait()
        try:
            found = self._computed(memory)
        except ValueError:
            return False
        if found is None:
            return False
        with self._room.clock.stage("copy out"):
            written = self._copies() + self._parts(found)
        with self._room.clock.stage("write"):
            self._room.writer.write_all((part, data) for part, data, _ in written)
        with self._room.clock.stage("hash"):
            self._keep(written, found)
        return True

    def _read(self) -> Tensor:
        """Read everything; return the bytes of all stacks, on the device."""
        room, end = self._room, 0
        for stack in self._stacks:
            stack.place = -(-end // _ALIGNED) * _ALIGNED
            end = stack.place + len(stack.members) * stack.size
        memory = buffer(end, room.device)
        views: list[tuple[Part, memoryview]] = []
        raw = memory.numpy().data
        for stack in self._stacks:
            for index, member in enumerate(stack.members):
                start = stack.place + index * stack.size
                views.append((member.weight.reads[DATA], raw[start : start + stack.size]))
        copied = [part for work in self._copying for part in work.weight.reads.values()]
        rest = buffer(sum(part.nbytes for part in copied), torch.device("cpu")).numpy().data
        for part in copied:
            views.append((part, rest[: part.nbytes]))
            rest = rest[part.nbytes :]
        room.checkpoint.read_all((part.spec.name, part.begin, view) for part, view in views)
        self._raw = {part.key: view for part, view in views}
        return memory.to(room.device, non_blocking=True)

    def _computed(self, memory: Tensor) -> list[Computed] | None:
        """Return parts and losses of each stack, None where one holds what cannot be stored."""
        if not self._stacks:
            return []
        stacks = [stack.of(memory) for stack in self._stacks]
        with self._room.clock.stage("measure"):
            own = [alike.measure(x.like, w) for x, w in zip(self._stacks, stacks, strict=True)]
            amax = torch.cat(own).cpu()
            if not bool(torch.isfinite(amax).all()):
                return None
            self._share(amax)
        found = []
        with self._room.clock.stage("compute"):
            counts = [len(stack.members) for stack in self._stacks]
            for stack, w, one in zip(self._stacks, stacks, amax.split(counts), strict=True):
                found.append(alike.quantize(stack.like, w, one))
                if not is_finite(found[-1][1].flatten(0, 1)):
                    return None
        return found

    def _share(self, amax: Tensor) -> None:
        """Give weights that share a scale the largest magnitude among them."""
        members = [one for stack in self._stacks for one in stack.members]
        places = {id(member): place for place, member in enumerate(members)}
        for work in self._computing:
            if work.job.shared:
                its = [places[id(member)] for member in work.members]
                amax[its] = amax[its].amax()

    def _copies(self) -> list[tuple[Part, memoryview, Member | None]]:
        """Return what is written as it was read."""
        return [
            (work.weight.writes[name], self._raw[part.key], None)
            for work in self._copying
            for name, part in work.weight.reads.items()
        ]

    def _parts(self, found: list[Computed]) -> list[tuple[Part, memoryview, Member | None]]:
        """Return what is written of each weight: its parts, as they are stored."""
        names = [(x, name) for x in range(len(found)) for name in self._stacks[x].like.writes]
        tensors = on_host([found[x][0][name] for x, name in names])
        written = []
        for (x, name), tensor in zip(names, tensors, strict=True):
            members, part = self._stacks[x].members, self._stacks[x].like.writes[name]
            tensor = as_stored(tensor, part)
            if part.stored is not None:
                tensor = part.stored.layout.encode(tensor)
            (data,) = bytes_of(tensor)
            size = data.nbytes // len(members)
            for index, member in enumerate(members):
                own = data[index * size : (index + 1) * size]
                written.append((member.weight.writes[name], own, member))
        return written

    def _keep(
        self, written: list[tuple[Part, memoryview, Member | None]], found: list[Computed]
    ) -> None:
        """Keep checksums and losses with the jobs."""
        for work in self._copying:
            for name, part in work.weight.reads.items():
                work.hashes[name].update(self._raw[part.key])
        for part, data, member in written:
            if member is not None:
                member.output[part.spec.name] = checksum(data)
        for stack, (_, losses) in zip(self._stacks, found, strict=True):
            for member, lost in zip(stack.members, losses, strict=True):
                part = member.weight.reads[DATA]
                member.rows.hash(part, self._raw[part.key])
                member.lost[0] = lost


def _stacks(members: Sequence[Member]) -> list[_Stack]:
    """Return weights by their kind."""
    found: dict[object, _Stack] = {}
    for member in members:
        found.setdefault(alike.kind(member.weight), _Stack()).members.append(member)
    return list(found.values())
