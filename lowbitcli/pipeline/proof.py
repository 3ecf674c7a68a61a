"""Proofs of what a run has done: written down when it is durable, checked before they are trusted.

a job is done      its checksums are kept; every SYNC_BYTES or SYNC_SECONDS the data is synced,
                   and what was kept goes into the journal
a run goes on      each journalled job's source and output are read and hashed again
all is written     every tensor is read back and hashed, before the output gets its name
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from lowbit_kernels.error import Sums
from lowbitcli.checkpoint import manifest
from lowbitcli.checkpoint.manifest import TensorHash
from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.checkpoint.writer import StagedOutput
from lowbitcli.errors import CheckpointError, OutputError
from lowbitcli.pipeline.clock import Clock
from lowbitcli.pipeline.crew import Step
from lowbitcli.pipeline.write import JOINED, Writer
from lowbitcli.plan.nouns import Job, Part
from lowbitcli.tensors import safe

SYNC_BYTES, SYNC_SECONDS = 64 << 20, 1.0
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

    def __init__(self, staged: StagedOutput, clock: Clock) -> None:
        self._staged, self._clock = staged, clock
        self._pending: list[Done] = []
        self._files: set[str] = set()
        self._bytes = 0
        self._is_open = True
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._keep_up, name="lowbit-journal", daemon=True)
        self._thread.start()

    def add(self, done: Done, size: int, files: Iterable[str]) -> None:
        """Keep a finished job, whose `size` bytes are written to `files`.

        Raises:
            OutputError: what was written before cannot be made durable.
        """
        with self._changed:
            self._fail()
            self._pending.append(done)
            self._files.update(files)
            self._bytes += size
            if self._bytes >= SYNC_BYTES:
                self._changed.notify_all()

    def flush(self) -> None:
        """Make everything durable that was added, journal it, and let go of the thread.

        Raises:
            OutputError: it cannot be.
        """
        self.close()
        self._fail()
        self._write(*self._taken())

    def close(self) -> None:
        """Let go of the thread."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()
        self._thread.join()

    def _keep_up(self) -> None:
        """Write what is pending when it is much, or has waited long enough."""
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(self._is_due, SYNC_SECONDS)
                    if not self._is_open:
                        return
                    taken = self._taken()
                self._write(*taken)
        except BaseException as error:
            self._error = error  # raised where it is next asked for

    def _is_due(self) -> bool:
        return not self._is_open or self._bytes >= SYNC_BYTES

    def _fail(self) -> None:
        if self._error is not None:
            raise self._error

    def _taken(self) -> tuple[list[Done], set[str]]:
        taken = self._pending, self._files
        self._pending, self._files, self._bytes = [], set(), 0
        return taken

    def _write(self, jobs: list[Done], files: set[str]) -> None:
        if not jobs:
            return
        with self._clock.stage("sync"):
            for name in sorted(files):
                self._staged.sync(name)
        if self._staged.journal is not None:
            self._staged.journal.append(done.line() for done in jobs)


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


def checksum(data: bytes | bytearray | memoryview) -> str:
    """Return the checksum of a tensor whose bytes are all there."""
    found = TensorHash()
    found.update(data)
    return found.hexdigest()


def promised(checkpoint: Checkpoint) -> dict[str, str]:
    """Return name -> hash of the tensors that a run wrote into a checkpoint; {} where no manifest
    tells, or one that was changed. Files whose headers are others were written anew since, and are
    promised by nobody; a training may save others under the very same header."""
    try:
        found = manifest.of(checkpoint)
    except CheckpointError:
        return {}
    if found is None or not found.intact:
        return {}
    anew = {one.file for one in manifest.check(checkpoint, found)}
    kept = (proof for file, proof in found.files.items() if file not in anew)
    return {name: one for proof in kept for name, one in proof.tensors.items()}


def source_hash(checkpoint: Checkpoint, part: Part) -> str:
    """Return the checksum of what is read of a stored tensor of the source."""
    name, begin = part.spec.name, part.begin
    return _hash(part.nbytes, lambda at, to: checkpoint.read_into(name, to, begin + at))


def written_hash(writer: Writer, part: Part) -> str:
    """Return the checksum of a tensor of the output as it can be read now."""
    return _hash(part.spec.nbytes, lambda at, to: writer.read_into(part, at, to))


def _hash(size: int, read_into: Callable[[int, memoryview], None]) -> str:
    # Not a bytearray: zeroing it takes as long as reading, while no other thread can go on.
    found, memory = TensorHash(), np.empty(min(size, _SLICE), np.uint8).data
    for start in range(0, size, _SLICE):
        piece = memory[: min(_SLICE, size - start)]
        read_into(start, piece)
        found.update(piece)
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
        for name, found in _hashes(writer, [parts[name] for name in kept]):
            if found != proofs[name]:
                raise OutputError(
                    f"{safe(name)}: read back, it is not what was written",
                    hint="the disk or its memory fails: do not trust what is on it",
                )

    return Step(work, 0, kept[0])


def _hashes(writer: Writer, parts: Sequence[Part]) -> Iterator[tuple[str, str]]:
    """Yield names and checksums of tensors of the output as they can be read now."""
    for part in parts:
        if part.spec.nbytes > JOINED:
            yield part.spec.name, written_hash(writer, part)
    for part, data in writer.read_all(part for part in parts if part.spec.nbytes <= JOINED):
        yield part.spec.name, checksum(data)
