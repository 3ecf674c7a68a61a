"""What a run of the library's front door returns."""

from dataclasses import dataclass, field
from pathlib import Path

from lowbit_kernels.error import Sums
from lowbitcli.pipeline.memory import DEFAULT
from lowbitcli.pipeline.shares import Share
from lowbitcli.plan.nouns import Plan
from lowbitcli.tensors import safe

NAMED = 10  # weights that a note names


@dataclass(frozen=True)
class Outcome:
    """What a run did: the plan it followed, where the output is, errors by weight, time, memory.

    `non_finite` are weights that were kept because they hold NaN or Inf: name -> what was found.
    `moved` counts global scales that a recode could only store to an ulp, so that the values they
    stand for differ from the source's: none where a reciprocal is read. Memory is in bytes.
    `complete` is whether the output was there already and whole, `resumed` how many jobs an
    earlier run had done; `stages` has the seconds of each stage, those of threads added up. Of
    `blocks` that a requantization could leave what they are, `equal` stand for the same numbers.
    `share` is the part of the jobs that this run did, None where it was to do all; `missing` are
    the shares that are not done, with how many jobs each still has (0: it is being written), and
    the output is there when there are none. `forecast` is the memory that the run was to take, of
    the process and of a GPU, `allowed` what it might take, None for no limit.
    """

    plan: Plan
    output: Path
    errors: dict[str, Sums]
    non_finite: dict[str, str]
    moved: int
    seconds: float
    peak_rss: int
    peak_gpu: int
    resumed: int = 0
    complete: bool = False
    stages: dict[str, float] = field(default_factory=dict)
    equal: int = 0
    blocks: int = 0
    share: Share | None = None
    missing: dict[int, int] = field(default_factory=dict)
    forecast: tuple[int, int] = (0, 0)
    allowed: tuple[int, int | None] = (DEFAULT, None)

    @property
    def bytes_in(self) -> int:
        return self.plan.bytes_in

    @property
    def bytes_out(self) -> int:
        return self.plan.bytes_out

    @property
    def lost(self) -> list[str]:
        """The weights of which hardly anything is left: their SQNR is 3 dB or less."""
        return sorted(name for name, error in self.errors.items() if error.is_lost)

    @property
    def notes(self) -> tuple[str, ...]:
        """What should be told of the plan, and of what became of it."""
        lost = self.lost
        if not lost:
            return self.plan.notes
        lines = [f"{safe(name)}: SQNR {self.errors[name].sqnr_db:.1f} dB" for name in lost[:NAMED]]
        if len(lost) > NAMED:
            lines.append(f"and {len(lost) - NAMED:,} more")
        return (*self.plan.notes, "\n".join(["hardly anything of these is left:", *lines]))

    def worst(self, number: int = 5) -> list[tuple[str, Sums]]:
        """Return the weights with the largest relative error, worst first."""
        ranked = sorted(self.errors.items(), key=lambda item: (-item[1].relative, item[0]))
        return ranked[:number]
