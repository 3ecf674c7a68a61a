"""The nouns of a search: what each choice costs and loses, what was chosen, and the curve of both.

error of a matrix   |V - W|^2 / |W|^2, V the values that stand for W; the experts' matrices of
                    one projection count as one, with the sums of their squares
error in all        the sum of that over the matrices of all units
as dB               10 log10(matrices / error), the SQNR of the mean
with importance h   sum h (V - W)^2 / sum h W^2, h of each element's column: the error of the
                    matrix's outputs for inputs of these second moments
bits                8 bytes / elements over the units, scales counted, what is kept in them too
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lowbitcli.plan.nouns import PathLike
from lowbitcli.search.candidates import Candidate
from lowbitcli.search.knapsack import Solution


@dataclass(frozen=True)
class Choice:
    """What a candidate costs of a unit in bytes, its error there, and the SQNR of the weight that
    suffers most."""

    cost: int
    error: float
    least_db: float


@dataclass(frozen=True)
class Score:
    """A unit measured: its name, the names that recipes see, elements, matrices, the bytes that it
    takes where it stays as it is, and what may be chosen, by candidate. `below` are the candidates
    that the floor rules out."""

    name: str
    members: tuple[str, ...]
    elements: int
    matrices: int
    kept: int
    choices: Mapping[str, Choice]
    below: Mapping[str, Choice]


@dataclass(frozen=True)
class Point:
    """A place on the curve: bytes of the units, error in all, and of how many elements each
    candidate is the choice."""

    cost: int
    error: float
    elements: Mapping[str, int]


def point(scores: Sequence[Score], names: Sequence[str]) -> Point:
    """Return what a choice for each unit comes to."""
    picked = [score.choices[name] for score, name in zip(scores, names, strict=True)]
    elements: dict[str, int] = {}
    for score, name in zip(scores, names, strict=True):
        elements[name] = elements.get(name, 0) + score.elements
    error = math.fsum(one.error for one in picked)
    return Point(sum(one.cost for one in picked), error, elements)


@dataclass(frozen=True)
class Wanted:
    """What is asked for: bits for each weight or bytes of the safetensors files, or neither, which
    is the curve alone; the schemes to choose from; the SQNR that each weight must reach; a
    container; and a file that says how much columns count."""

    bits: float | None = None
    size: int | None = None
    schemes: str = ""
    floor_db: float | None = None
    container: str = "auto"
    importance: PathLike | None = None


@dataclass(frozen=True)
class Chosen:
    """A solution as a recipe: its text, and the bytes of the safetensors files that it makes."""

    solution: Solution
    names: tuple[str, ...]
    text: str
    bytes_out: int


@dataclass(frozen=True)
class Found:
    """What a search found. `uniform` is what `--scheme` would do with each candidate; `bytes_in` is
    the size of the source, `digest` that of the numbers that were measured; `importance` says by
    what columns are weighed, `left_out` which schemes the container cannot hold, and why, `notes`
    what else the user should know. Seconds and memory say what it took."""

    source: str
    container: str
    wanted: Wanted
    candidates: tuple[Candidate, ...]
    scores: tuple[Score, ...]
    curve: tuple[Point, ...]
    uniform: Mapping[str, Point]
    bytes_in: int
    digest: str
    is_pipeline: bool = False
    importance: str = ""
    left_out: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    chosen: Chosen | None = None
    seconds: float = 0.0
    stages: Mapping[str, float] | None = None
    peak_rss: int = 0
    peak_gpu: int = 0

    @property
    def elements(self) -> int:
        return sum(score.elements for score in self.scores)

    @property
    def matrices(self) -> int:
        return sum(score.matrices for score in self.scores)

    def point(self, names: Sequence[str]) -> Point:
        """Return what a choice for each unit comes to."""
        return point(self.scores, names)

    def bits(self, cost: int) -> float:
        """Return bits for each weight of so many bytes."""
        return 8 * cost / self.elements

    def db(self, error: float) -> float:
        """Return an error in all as the SQNR of the mean."""
        return math.inf if error == 0 else 10 * math.log10(self.matrices / error)
