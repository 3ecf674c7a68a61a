"""Who does which jobs: bundles for workers of one run, shares for runs on several machines.

    bundle   the largest job that is left, and with it as many as come to BUNDLE_BYTES
    share    a run of jobs in the plan's order, cut where the bytes read come to a N-th of all

A job is never divided, so weights that share a scale stay together. Shares follow from the plan and
the two numbers alone, and each reads few of the files, as neighbours in a model mostly are in one.
Numbers count from 0, as those of launchers do:

| launcher | which | of how many |
|---|---|---|
| torchrun | RANK | WORLD_SIZE |
| Slurm, srun | SLURM_PROCID | SLURM_NTASKS |
| Slurm, array | SLURM_ARRAY_TASK_ID - SLURM_ARRAY_TASK_MIN | SLURM_ARRAY_TASK_COUNT |
| Kubernetes, indexed job | JOB_COMPLETION_INDEX | not told |
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lowbitcli.errors import UsageError
from lowbitcli.plan.nouns import Job
from lowbitcli.tensors import safe

AUTO = "auto"
BUNDLE_BYTES, BUNDLE_JOBS = 32 << 20, 256
MOST = 4096  # shares
_LAUNCHERS = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))
_ARRAY = ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN")
_INDEXED = "JOB_COMPLETION_INDEX"


@dataclass(frozen=True)
class Share:
    """One of `number` shares of a plan's jobs, `index` counted from 0."""

    index: int
    number: int

    def __str__(self) -> str:
        return f"share {self.index} of {self.number}"


def shares(jobs: Sequence[Job], number: int) -> list[list[int]]:
    """Return the jobs of each of `number` shares, by their places in `jobs`."""
    total = max(1, sum(job.bytes_in for job in jobs))
    found: list[list[int]] = [[] for _ in range(number)]
    before = 0
    for place, job in enumerate(jobs):
        middle = before + job.bytes_in // 2
        found[min(number - 1, middle * number // total)].append(place)
        before += job.bytes_in
    return found


class Bundles:
    """Hands out jobs, by their places in a plan, the largest first."""

    def __init__(self, jobs: Sequence[Job], places: Sequence[int]) -> None:
        self._jobs = jobs
        self._left = sorted(places, key=lambda place: (jobs[place].bytes_in, -place))

    def __bool__(self) -> bool:
        return bool(self._left)

    def next(self) -> list[int] | None:
        """Return the next bundle, None where there is none left."""
        bundle: list[int] = []
        size = 0
        while self._left and size < BUNDLE_BYTES and len(bundle) < BUNDLE_JOBS:
            bundle.append(self._left.pop())
            size += self._jobs[bundle[-1]].bytes_in
        return bundle or None


def share_of(index: int | None, number: str | None, environment: Mapping[str, str]) -> Share | None:
    """Return the share that is asked for, None where none is.

    Without an `index`, or with `number` auto, the launcher's variables say what is missing; they
    are not looked at otherwise, as they may be there for something else.

    Raises:
        UsageError: it is no share, or nobody says which.
    """
    if number is None:
        if index is not None:
            raise UsageError("--shard-index needs --num-shards", hint="of how many?")
        return None
    if number == AUTO:
        found_index, found_number = _launched(environment)
        return _checked(found_index if index is None else index, found_number)
    if not number.isdecimal():
        raise UsageError(f"{safe(number)!r} is no number of shards", hint="a number, or auto")
    return _checked(_index(environment) if index is None else index, int(number))


def _launched(environment: Mapping[str, str]) -> tuple[int, int]:
    for which, many in _LAUNCHERS:
        if which in environment and many in environment:
            return _number(environment, which), _number(environment, many)
    if all(name in environment for name in _ARRAY):
        task, number, first = (_number(environment, name) for name in _ARRAY)
        return task - first, number
    if _INDEXED in environment:
        hint = "Kubernetes does not say: --num-shards with the job's `completions`"
    else:
        hint = "torchrun or srun would; else --shard-index I --num-shards N"
    raise UsageError("nothing here says how many shards there are", hint=hint)


def _index(environment: Mapping[str, str]) -> int:
    for name in (_INDEXED, *(which for which, _ in _LAUNCHERS)):
        if name in environment:
            return _number(environment, name)
    if all(name in environment for name in _ARRAY):
        return _number(environment, _ARRAY[0]) - _number(environment, _ARRAY[2])
    raise UsageError("nothing here says which shard this is", hint="--shard-index, from 0")


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not text.isdecimal():
        raise UsageError(f"{name}={safe(text)} is no number", hint="--shard-index, --num-shards")
    return int(text)


def _checked(index: int, number: int) -> Share:
    if not 1 <= number <= MOST:
        raise UsageError(f"{number} is no number of shards", hint=f"1 to {MOST}")
    if not 0 <= index < number:
        raise UsageError(
            f"there is no shard {index} of {number}", hint=f"they count from 0 to {number - 1}"
        )
    return Share(index, number)
