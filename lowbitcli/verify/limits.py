"""What a verification is asked beyond what always holds: how much may be lost, who is to load it,
how much of it to look at."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lowbitcli.errors import UsageError
from lowbitcli.plan.source import Source
from lowbitcli.recipe import Consumer
from lowbitcli.recipe.limits import Limits, Threshold
from lowbitcli.recipe.nearest import nearest
from lowbitcli.tensors import safe
from lowbitcli.verify.nouns import WARN, Problem, Step, WeightRow
from lowbitcli.verify.sample import Sample


@dataclass(frozen=True)
class Demands:
    """`fail_under_db` and `max_rel_error` hold for every quantized weight, `thresholds` for those
    that their patterns take; `consumers` are programs that are to load it, `sample` is how much is
    looked at (None: all of it)."""

    fail_under_db: float | None = None
    max_rel_error: float | None = None
    thresholds: Sequence[Threshold] = ()
    consumers: Sequence[Consumer] = ()
    sample: Sample | None = None

    def __post_init__(self) -> None:
        """Raises:
        UsageError: a limit of no error, or of one below.
        """
        most = self.max_rel_error
        if most is not None and not most > 0:
            raise UsageError(
                f"--max-rel-error is above 0, not {most:g}", hint="--max-rel-error 0.1"
            )

    @property
    def needs_source(self) -> bool:
        limits = self.fail_under_db is not None or self.max_rel_error is not None
        return limits or bool(self.thresholds)


def limited(rows: Sequence[WeightRow], ours: Source, demands: Demands) -> list[Step]:
    """Hold what was measured against the limits that were asked for."""
    measured = [row for row in rows if row.figures is not None]
    steps = []
    if not demands.needs_source:
        steps = [Step("SQNR of every weight", skipped="no limit was asked for")]
    if demands.fail_under_db is not None:
        limit = demands.fail_under_db
        problems = [x for row in measured for x in _sqnr(row, ours, limit, "")]
        what = f"SQNR of every weight is {limit:g} dB or more"
        steps = [Step(what, len(measured), tuple(problems))]
    if demands.max_rel_error is not None:
        limit = demands.max_rel_error
        problems = [x for row in measured for x in _relative(row, ours, limit, "")]
        what = f"relative error of every weight is {limit:g} or less"
        steps.append(Step(what, len(measured), tuple(problems)))
    if demands.thresholds:
        steps.append(_thresholds(measured, rows, ours, demands.thresholds))
    return steps


def _thresholds(
    measured: Sequence[WeightRow],
    rows: Sequence[WeightRow],
    ours: Source,
    thresholds: Sequence[Threshold],
) -> Step:
    what = "weights keep the thresholds of the recipe"
    if not measured:
        return Step(
            what, skipped="nothing was measured: no source was named, or nothing to measure"
        )
    problems: list[Problem] = []
    count, used, limits = 0, set(), Limits(thresholds)
    for row in rows:
        number = limits.of(row.name)
        if number is None:
            continue
        used.add(number)
        if row.figures is None:
            continue
        count += 1
        one = thresholds[number]
        where = f", the limit of {one.match[0].text!r}" + (f" ({one.where})" if one.where else "")
        if one.fail_under_db is not None:
            problems += _sqnr(row, ours, one.fail_under_db, where)
        if one.max_rel_error is not None:
            problems += _relative(row, ours, one.max_rel_error, where)
    for number, one in enumerate(thresholds):
        if number not in used:
            told = f"the threshold of {one.match[0].text!r} is that of no weight"
            told += f" ({one.where})" if one.where else ""
            near = nearest(one.match[0], [row.name for row in rows])
            told += f"; near it: {', '.join(near)}" if near else ""
            problems.append(Problem("quality", "", safe(told), severity=WARN))
    return Step(what, count, tuple(problems))


def _sqnr(row: WeightRow, ours: Source, limit: float, where: str) -> Iterator[Problem]:
    sqnr = row.figures.sqnr_db if row.figures is not None else 0.0
    if not sqnr >= limit:  # NaN is below any limit
        told = f"its SQNR is {sqnr:.2f} dB, below {limit:g} dB{where}"
        yield Problem("quality", row.name, safe(told), ours.weights[row.name].file)


def _relative(row: WeightRow, ours: Source, limit: float, where: str) -> Iterator[Problem]:
    relative = row.figures.relative if row.figures is not None else 0.0
    if not relative <= limit:
        told = f"its relative error is {relative:.4g}, above {limit:g}{where}"
        yield Problem("quality", row.name, safe(told), ours.weights[row.name].file)
