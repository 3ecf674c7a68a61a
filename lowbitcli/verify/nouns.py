"""What a verification found, as plain values: problems, checks done and not done, a row per weight.

Everything here turns into JSON by `Verification.to_dict`; docs/report.md describes the keys. A
number that JSON has no word for is a string there: "inf", "-inf", "nan".
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from lowbitcli.errors import FOUND_WRONG, OK
from lowbitcli.plan.consumers import FAIL, WARN
from lowbitcli.tensors import Shape

SCHEMA = 1


@dataclass(frozen=True)
class Problem:
    """Something wrong (`fail`) or to be known (`warn`), with the tensor and the file it is in.

    | kind | what is wrong |
    |---|---|
    | unreadable | the checkpoint, or a tensor of it, cannot be read |
    | missing, orphan, mismatch, unknown | names, dtypes or shapes against what is declared |
    | duplicate | a weight is stored twice, quantized and as it is |
    | index, manifest | the index or the manifest against what is stored |
    | scale | a stored scale is zero, negative, NaN or Inf, or not what lowbit makes of the source |
    | layout | codes or scales lie in another order than is declared, or padding is not zero |
    | shared | weights that are served as one matrix have different scales |
    | code | codes that stand for no number |
    | extra, shape, dtype, changed | the output against the source, for tensors left as they were |
    | nonfinite | the source holds NaN or Inf |
    | bound | an element is not in the rounding interval of its code |
    | consumer | a program that is to load it would not, or would make other numbers of it |
    | quality | the error is larger than was allowed, or all that there was |
    | nothing | there was nothing to check |
    """

    kind: str
    tensor: str
    message: str
    file: str = ""
    severity: str = FAIL


@dataclass(frozen=True)
class Check:
    """What was checked and how often; `ok` is None where it was not done. `note` says why, or how
    it was done."""

    what: str
    count: int
    ok: bool | None
    note: str = ""


@dataclass(frozen=True)
class Step:
    """A check with the problems that it found; `skipped` says why it was not done, `note` how."""

    what: str
    count: int = 0
    problems: tuple[Problem, ...] = ()
    skipped: str = ""
    note: str = ""

    @property
    def check(self) -> Check:
        if self.skipped:
            return Check(self.what, 0, None, self.skipped)
        failed = any(problem.severity == FAIL for problem in self.problems)
        return Check(self.what, self.count, not failed, self.note)


@dataclass(frozen=True)
class WorstBlock:
    """The block of a weight with the largest error: where it begins ([*, row, column]), how many
    rows and columns it has, its error (norm of v - w) alone and over the norm of its elements,
    and its largest magnitude in the source. `times` is its squared error over the mean of the
    weight's blocks."""

    place: tuple[int, ...]
    shape: tuple[int, int]
    error: float
    relative: float
    largest: float
    times: float = math.nan


@dataclass(frozen=True)
class Figures:
    """How far a weight's values lie from the source's, and how its elements lie in their intervals.

    `largest` is the largest absolute error, `relative` that of the Frobenius norms. `outside`
    counts elements that are not in the rounding interval of their code (None: there is no code to
    hold them against), `first_outside` is [*, row, column]. `clipped` counts elements beyond the
    largest value, `underflow` those that are not zero but whose step is.

    `norm` is the source's. What follows it is None where there are no codes: elements that became
    zero, mean of |error| and of error in steps, blocks, blocks whose step is zero though an element
    is not, the least and the largest scale as stored, the worst block. See `spread`.
    """

    largest: float
    relative: float
    sqnr_db: float
    cosine: float
    outside: int | None
    first_outside: tuple[int, ...] | None
    clipped: int
    underflow: int
    norm: float = math.nan
    zeros: int | None = None
    mean_steps: float | None = None
    bias_steps: float | None = None
    blocks: int | None = None
    underflow_blocks: int | None = None
    scale_least: float | None = None
    scale_most: float | None = None
    worst_block: WorstBlock | None = None


@dataclass(frozen=True)
class Histogram:
    """Errors of all elements of a scheme over half the widest gap of its grid, which is
    `half_gap` steps: `counts` are of equal bins from -1 to 1, and of what lies below and above."""

    half_gap: float
    counts: tuple[int, ...]


@dataclass(frozen=True)
class WeightRow:
    """One weight that was quantized: `how` is quantized, dequantized or fake. Sizes in bytes."""

    name: str
    scheme: str
    how: str
    shape: Shape
    bytes_before: int | None
    bytes_after: int
    figures: Figures | None = None

    @property
    def bits(self) -> float:
        """Bits that an element takes, scales counted."""
        return 8 * self.bytes_after / max(1, math.prod(self.shape))


@dataclass(frozen=True)
class Kept:
    """One tensor that is not quantized, and why ("" where nothing says)."""

    name: str
    dtype: str
    shape: Shape
    reason: str


@dataclass(frozen=True)
class Summary:
    """Sizes in bytes; `bits_per_weight` counts scales; `schemes`: scheme -> (tensors, bytes)."""

    tensors: int = 0
    bytes_before: int | None = None
    bytes_after: int = 0
    bits_per_weight: float | None = None
    schemes: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Verification:
    """All that a verification found. `untouched` counts tensors that are the source's bytes.

    `environment` names versions and the device; `manifest` what the output says of its making;
    `sample` which tensors were looked at, None for all; `fixed` what was put right in it before.
    `errors` is of the quantized weights, by scheme.
    """

    target: str
    source: str | None
    container: str
    problems: tuple[Problem, ...]
    checks: tuple[Check, ...]
    weights: tuple[WeightRow, ...] = ()
    kept: tuple[Kept, ...] = ()
    untouched: int = 0
    sample: Mapping[str, Any] | None = None
    fixed: tuple[str, ...] = ()
    summary: Summary = Summary()
    manifest: Mapping[str, Any] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    errors: Mapping[str, Histogram] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return not self.failures

    @property
    def exit_code(self) -> int:
        return OK if self.passed else FOUND_WRONG

    @cached_property
    def failures(self) -> tuple[Problem, ...]:
        return tuple(problem for problem in self.problems if problem.severity == FAIL)

    @cached_property
    def warnings(self) -> tuple[Problem, ...]:
        return tuple(problem for problem in self.problems if problem.severity == WARN)

    def worst(self, number: int = 20) -> tuple[WeightRow, ...]:
        """Return the measured weights with the largest relative error, worst first."""
        measured = [row for row in self.weights if row.figures is not None]
        measured.sort(key=lambda row: (-_rank(row), row.name))
        return tuple(measured[:number])

    def to_dict(self) -> dict[str, Any]:
        """Return this as a JSON document: strings, numbers, booleans, None, lists and objects."""
        document = {
            "schema": SCHEMA,
            "passed": self.passed,
            "exit_code": self.exit_code,
            **asdict(self),
            "worst": [row.name for row in self.worst()],
        }
        for row, told in zip(self.weights, document["weights"], strict=True):
            told["bits_per_weight"] = row.bits
        document["summary"]["schemes"] = {
            name: {"tensors": number, "bytes": size}
            for name, (number, size) in sorted(self.summary.schemes.items())
        }
        return plain(document)


def _rank(row: WeightRow) -> float:
    """Return the relative error to sort by; NaN is worse than anything."""
    relative = row.figures.relative if row.figures is not None else 0.0
    return math.inf if math.isnan(relative) else relative


def plain(value: Any) -> Any:
    """Return `value` with what JSON has no word for replaced."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
