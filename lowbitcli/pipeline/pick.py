"""A job that picks numbers out of a stack and leaves them as they are: the bias of one expert."""

from collections.abc import Iterator

from lowbitcli.pipeline.proof import Done, checksum
from lowbitcli.pipeline.read import pick
from lowbitcli.pipeline.work import Piece, Room
from lowbitcli.plan.nouns import Job
from lowbitcli.tensors import DATA


class Picking:
    """A job of one tensor of numbers that are picked out of a stack: the bias of one expert."""

    def __init__(self, job: Job, room: Room) -> None:
        self.job = job
        self._weight, self._room = job.weights[0], room
        self._done = Done(self._weight.name)

    def steps(self) -> Iterator[Piece]:
        """Yield the one step."""
        yield Piece(self._pick, self._weight.bytes_in)

    def _pick(self) -> None:
        read, written = self._weight.reads[DATA], self._weight.writes[DATA]
        with self._room.clock.stage("read"):
            raw = self._room.checkpoint.read(read.spec.name, *(read.span or (0, None)))
        found = memoryview(pick(raw, read))
        with self._room.clock.stage("write"):
            self._room.writer.write(written, 0, found)
        self._done.source[read.key] = checksum(raw)
        self._done.output[written.spec.name] = checksum(found)

    def done(self) -> Done:
        """Return what is known after the step."""
        return self._done
