"""Proofs of what a run has done: written down when it is durable, checked before they are trusted.

a job is done      its checksums are kept; every SYNC_BYTES or SYNC_SECONDS the data is synced,
                   and what was kept goes into the journal
a run goes on      each journalled job's source and output are read and hashed again
all is written     every tensor is read back and hashed, before the output gets its name
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from lowbit_kernels.error import Sums
from lowbitcli.checkpoint.manifest import TensorHash
from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.checkpoint.writer import StagedOutput
from lowbitcli.errors import OutputError
from lowbitcli.pipeline.clock import Clock
from lowbitcli.pipeline.crew import Step
from lowbitcli.pipeline.write import Writer
from lowbitcli.plan.nouns import Job, Part
from lowbitcli.tensors import safe

SYNC_BYTES, SYNC_SECONDS = 1 << 30, 10.0
_SLICE = 8 << 20


@dataclass
class Done:
    """A finished job: checksums of what was read and written, and what was lost, by weight; of
    weights that can be requantized without loss how many `blocks` there are, and came out
    `equal`."""

    name: str
    source: dict[str, str] = field(default_factory=dict)
    output: dict[str, str] = field(default_factory=dict)
    errors: dict[str, Sums] = field(default_factory=dict)
    moved: int = 0
    equal: int = 0
    blocks: int = 0

    def line(self) -> dict[str, Any]:
        """Return it as a line of a journal."""
        return asdict(self)

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> "Done | None":
        """Return what a line of a journal says, None where that is nothing."""
        try:
            errors = {name: Sums(**found) for name, found in line["errors"].items()}
            return cls(
                line["name"],
                dict(line["source"]),
                dict(line["output"]),
                errors,
                line["moved"],
                line["equal"],
                line["blocks"],
            )
        except (AttributeError, KeyError, TypeError, ValueError):
            return None


class Scribe:
    """Syncs what is written and journals it, now and then, in a thread of its own."""

    def __init__(self, staged: StagedOutput, files: Iterable[str], clock: Clock) -> None:
        self._staged, self._clock = staged, clock
        self._files = tuple(files)
        self._pool = ThreadPoolExecutor(1, "lowbit-journal")
        self._under_way: Future[None] | None = None
        self._pending: list[Done] = []
        self._bytes = 0
        self._since = time.monotonic()

    def add(self, done: Done, size: int) -> None:
        """Keep a finished job, whose `size` bytes are written.

        Raises:
            OutputError: what was written before cannot be made durable.
        """
        self._pending.append(done)
        self._bytes += size
        if self._under_way is not None and self._under_way.done():
            self._wait()
        due = self._bytes >= SYNC_BYTES or time.monotonic() - self._since >= SYNC_SECONDS
        if due and self._under_way is None:
            self._under_way = self._pool.submit(self._write, self._taken())

    def flush(self) -> None:
        """Make everything durable that was added, and journal it.

        Raises:
            OutputError: it cannot be.
        """
        self._wait()
        self._write(self._taken())

    def close(self) -> None:
        """Let go of the thread."""
        self._pool.shutdown()

    def _taken(self) -> list[Done]:
        taken, self._pending = self._pending, []
        self._bytes, self._since = 0, time.monotonic()
        return taken

    def _wait(self) -> None:
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            under_way.result()

    def _write(self, taken: list[Done]) -> None:
        with self._clock.stage("sync"):
            for name in self._files:
                self._staged.sync(name)
        if self._staged.journal is not None and taken:
            self._staged.journal.append(done.line() for done in taken)


class Trial:
    """One job's proof on trial: is what was read and what was written still the same?"""

    def __init__(self, job: Job, done: Done, checkpoint: Checkpoint, writer: Writer) -> None:
        self.job, self.done = job, done
        self.holds = False
        self._checkpoint, self._writer = checkpoint, writer

    def step(self) -> Step:
        """Return the step that decides."""
        return Step(self._decide, 0, self.done.name, (self,))

    def _decide(self) -> None:
        reads = {part.key: part for w in self.job.weights for part in w.reads.values()}
        writes = {part.spec.name: part for w in self.job.weights for part in w.writes.values()}
        if self.done.source.keys() != reads.keys() or self.done.output.keys() != writes.keys():
            return
        self.holds = all(
            written_hash(self._writer, writes[name]) == found
            for name, found in self.done.output.items()
        ) and all(
            source_hash(self._checkpoint, reads[key]) == found
            for key, found in self.done.source.items()
        )


def source_hash(checkpoint: Checkpoint, part: Part) -> str:
    """Return the checksum of what is read of a stored tensor of the source."""
    name, begin = part.spec.name, part.begin
    return _hash(part.nbytes, lambda a, b: checkpoint.read(name, begin + a, begin + b))


def written_hash(writer: Writer, part: Part) -> str:
    """Return the checksum of a tensor of the output as it can be read now."""
    return _hash(part.spec.nbytes, lambda a, b: writer.read(part, a, b))


def _hash(size: int, read: Callable[[int, int], bytearray]) -> str:
    found = TensorHash()
    for start in range(0, size, _SLICE):
        found.update(read(start, min(start + _SLICE, size)))
    return found.hexdigest()


def read_back(
    writer: Writer, proofs: Mapping[str, str], parts: Mapping[str, Part]
) -> Iterator[Step]:
    """Yield the steps that read every written tensor and compare it with its checksum, in batches.

    Steps raise:
        OutputError: something else is there.
    """
    names: list[str] = []
    size = 0
    for name in proofs:
        names.append(name)
        size += parts[name].spec.nbytes
        if size >= _SLICE:
            yield _comparing(writer, names, proofs, parts)
            names, size = [], 0
    if names:
        yield _comparing(writer, names, proofs, parts)


def _comparing(
    writer: Writer, names: list[str], proofs: Mapping[str, str], parts: Mapping[str, Part]
) -> Step:
    kept = tuple(names)

    def work() -> None:
        for name in kept:
            found = written_hash(writer, parts[name])
            if found != proofs[name]:
                raise OutputError(
                    f"{safe(name)}: read back, it is not what was written",
                    hint="the disk or its memory fails: do not trust what is on it",
                )

    return Step(work, 0, kept[0])
