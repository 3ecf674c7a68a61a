"""The commands that write, to a directory and to a file, and what an output of theirs holds."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests import checkpoints
from tests.faults.shim import run


@dataclass(frozen=True)
class Models:
    """Checkpoints to read from, none of which a test may change: shards, and a file alone; and
    both of them quantized."""

    source: Path
    alone: Path
    quantized: Path
    quantized_alone: Path


@dataclass(frozen=True)
class Command:
    """One of the commands, and the kind of its output."""

    name: str
    kind: str  # directory or file

    def __str__(self) -> str:
        return f"{self.name} {self.kind}"

    def reads(self, models: Models) -> Path:
        """Return the checkpoint that it reads."""
        if self.name == "quantize":
            return models.source if self.kind == "directory" else models.alone
        return models.quantized if self.kind == "directory" else models.quantized_alone

    def target(self, place: Path) -> Path:
        """Return where it writes."""
        return place / ("out" if self.kind == "directory" else "out.safetensors")

    def words(self, models: Models, place: Path, *more: object) -> tuple[list[object], Path]:
        """Return its words, and where it writes."""
        where = self.target(place)
        return [self.name, self.reads(models), "-o", where, "--device", "cpu", "--json", *more], (
            where
        )

    @property
    def otherwise(self) -> tuple[str, str]:
        """Return the option with which it writes something else."""
        return ("--scheme", "mxfp8") if self.name == "quantize" else ("--dtype", "fp32")


COMMANDS = tuple(
    Command(name, kind) for name in ("quantize", "dequantize") for kind in ("directory", "file")
)
Content = Mapping[str, str]  # path -> sha256; "" is the file itself


def content(where: Path) -> Content | None:
    """Return what an output holds, None where there is none."""
    return checkpoints.hashes(where) if where.exists() else None


def models_in(place: Path) -> list[str]:
    """Return what in a folder looks like a checkpoint or a part of one."""
    return [path.name for path in place.iterdir() if not path.name.startswith(".")]


def names_in(place: Path) -> list[str]:
    return [path.name for path in place.iterdir()]


@dataclass(frozen=True)
class Whole:
    """What an undisturbed run writes, with its other option too, and how many calls it makes."""

    content: Content
    other: Content
    calls: int


def undisturbed(command: Command, models: Models, place: Path) -> Whole:
    """Run a command without a fault, and with its other option."""
    words, where = command.words(models, place)
    done = run(place, words)
    assert done.code == 0, done.err
    found = content(where)
    forced, _ = command.words(models, place, "--force", *command.otherwise)
    again = run(place, forced)
    assert again.code == 0, again.err
    other = content(where)
    assert found is not None and other is not None and found != other
    return Whole(found, other, done.calls)
