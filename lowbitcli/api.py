"""The library's front door: plan, inspect, quantize, dequantize and verify, without a terminal.

Everything here takes paths and returns values; nothing prints, and nothing is kept between calls.
Options are those of the commands: of `plan` and `quantize` in a `Request`, of how the work is
spread in a `Spread`, all others by name. Sizes are in bytes. `progress` is called with bytes done,
bytes in all and a name, from any thread; what it raises stops the run, which can be resumed.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lowbitcli import recipe as recipes
from lowbitcli import report as reports
from lowbitcli.api_arguments import checked
from lowbitcli.api_outcome import Outcome
from lowbitcli.checkpoint import manifest, shares
from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.errors import CheckpointError, UsageError
from lowbitcli.importance import Measured
from lowbitcli.importance import measure as measure_importance
from lowbitcli.pipeline.arithmetic import device_of
from lowbitcli.pipeline.finite import find_non_finite
from lowbitcli.pipeline.ledger import Progress, Result
from lowbitcli.pipeline.memory import DEFAULT
from lowbitcli.pipeline.run import Options, run
from lowbitcli.pipeline.run import finish as finish_shares
from lowbitcli.pipeline.shares import Share
from lowbitcli.pipeline.spread import Spread
from lowbitcli.plan.asked import Asked
from lowbitcli.plan.inspection import Inspection
from lowbitcli.plan.inspection import inspect as inspect_checkpoint
from lowbitcli.plan.nouns import PathLike, Plan
from lowbitcli.plan.prepare import Request, dequantization, plan_quantize, quantization
from lowbitcli.search import Allowed, Found, Wanted
from lowbitcli.search import choose as choose_schemes
from lowbitcli.verify import Demands, Sample, Verification, asked
from lowbitcli.verify.check import verify as verify_checkpoint
from lowbitcli.verify.fix import fix as fix_checkpoint
from lowbitcli.verify.unreadable import unreadable

NON_FINITE = ("error", "keep")


@checked
def plan(source: PathLike, output: PathLike | None = None, request: Request | None = None) -> Plan:
    """Say what `quantize` would do, from headers and recipe alone: nothing is written.

    `request` says how (default: NVFP4); without `output` it is named beside the source.

    Raises:
        LowbitError: see lowbitcli.errors for what can go wrong, by kind.
    """
    return plan_quantize(source, output, _asked_for(request))


@checked
def quantize(
    source: PathLike,
    output: PathLike | None = None,
    request: Request | None = None,
    *,
    device: str = "auto",
    force: bool = False,
    max_memory: int | None = None,
    max_gpu_memory: int | None = None,
    resume: bool = True,
    readback: bool = True,
    spread: Spread | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Quantize a checkpoint; the output appears whole or not at all.

    `request` says how (default: NVFP4); without `output` it goes beside the source. `max_memory`
    is what the whole process may take, in bytes (default: 2 GiB), `max_gpu_memory` what it may
    reserve of a GPU (default: what it needs). With `resume` a run goes on with what an interrupted
    run of the same plan left; with `readback` everything is read and hashed again before the output
    gets its name. `spread` is over what the work is spread, in the place of one `device`.

    Raises:
        LowbitError: see lowbitcli.errors for what can go wrong, by kind.
    """
    request = _asked_for(request)
    options = _options(force, max_memory, resume, readback, max_gpu_memory)
    with _spread(spread, device, options) as (where, options):
        with quantization(source, output, request) as (plan, checkpoint, recipe):
            keep = (request.nonfinite or recipe.nonfinite) == "keep"
            found = find_non_finite(plan, checkpoint, progress) if keep else {}
            options = replace(options, asked=Asked.to_quantize(source, request, found))
            if not found:
                result = run(plan, checkpoint, _due(plan), where, options, progress)
                return _outcome(plan, result, {}, options.share)
        with quantization(source, output, request, frozenset(found)) as (plan, checkpoint, _):
            result = run(plan, checkpoint, _due(plan), where, options, progress)
            return _outcome(plan, result, found, options.share)


@checked
def dequantize(
    source: PathLike,
    output: PathLike | None = None,
    *,
    dtype: str = "bf16",
    device: str = "auto",
    force: bool = False,
    strict: bool = False,
    raw_fp8: bool = False,
    nibbles: str = "",
    max_shard_size: int | None = None,
    max_memory: int | None = None,
    max_gpu_memory: int | None = None,
    resume: bool = True,
    readback: bool = True,
    spread: Spread | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Turn every quantized weight of a checkpoint into `dtype`: bf16, fp16 or fp32; with `raw_fp8`
    also FP8 that has no scale, with `nibbles` (low or high) NVFP4 with the even column there.

    Raises:
        LowbitError: see lowbitcli.errors for what can go wrong, by kind.
    """
    options = _options(force, max_memory, resume, readback, max_gpu_memory)
    how: dict[str, Any] = {"dtype": dtype, "strict": strict, "raw_fp8": raw_fp8}
    how |= {"nibbles": nibbles, "max_shard_size": max_shard_size}
    with _spread(spread, device, options) as (where, options):
        options = replace(options, asked=Asked.to_dequantize(source, how))
        with dequantization(source, output, **how) as (plan, checkpoint):
            result = run(plan, checkpoint, _due(plan), where, options, progress)
            return _outcome(plan, result, {}, options.share)


@checked
def finish(
    output: PathLike,
    *,
    force: bool = False,
    max_memory: int | None = None,
    readback: bool = True,
    progress: Progress | None = None,
) -> Outcome:
    """Check, read back and publish an output whose shares were written by runs of their own.

    Raises:
        OutputError: shares are missing, or none is there.
        LowbitError: see lowbitcli.errors for what can go wrong, by kind.
    """
    options = _options(force, max_memory, True, readback)
    asked = Asked.of(shares.asked(Path(output)))
    with asked.planned(output) as (plan, checkpoint):
        result = finish_shares(plan, checkpoint, _due(plan), options, progress)
        return _outcome(plan, result, dict(asked.non_finite))


@checked
def is_finished(output: PathLike) -> bool:
    """Is an output there whole, and as it was written by name, header and digest, with no share of
    it begun? No tensor is read."""
    if not os.path.lexists(output) or shares.found(Path(os.path.realpath(output))):
        return False
    try:
        with Checkpoint.open(output) as found:
            made = manifest.of(found)
            return made is not None and not any(True for _ in manifest.check(found, made))
    except (CheckpointError, UsageError):
        return False


@checked
def verify(
    output: PathLike,
    *,
    against: PathLike | None = None,
    device: str = "auto",
    fail_under_db: float | None = None,
    max_rel_error: float | None = None,
    recipe: PathLike | None = None,
    consumers: Sequence[str] = (),
    sample: str | None = None,
    report: PathLike | None = None,
    fix: PathLike | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Verification:
    """Check a checkpoint and, `against` its source, its numbers; write a report where one is named.

    What is wrong with the checkpoint is told in the result and not raised, even where it cannot be
    opened. `fail_under_db` is the SQNR that every quantized weight must reach, `max_rel_error` the
    relative error that it may have; a `recipe` has thresholds by pattern. `consumers` are programs
    that are to load it, by name; a `sample` such as `5%` is looked at instead of all of it. With
    `fix` what can be put right is, in a new checkpoint of that name, which is then verified: the
    result's `fixed` says what was changed, and where that is nothing, nothing was written.

    Raises:
        CheckpointError: there is no such checkpoint, or its source is wrong.
        UsageError: a limit without a source, an unknown consumer, or kind of report.
        OutputError: the report cannot be written.
    """
    where = device_of(device)
    if report is not None:
        reports.check_path(Path(report))
    demands = Demands(
        fail_under_db,
        max_rel_error,
        recipes.load(os.fspath(recipe)).thresholds if recipe is not None else (),
        asked(consumers),
        Sample.of(sample) if sample is not None else None,
    )
    how = {"device": where, "progress": progress, "demands": demands}
    fixed: tuple[str, ...] = ()
    if fix is not None:
        with Checkpoint.open(output) as checkpoint:
            made = fix_checkpoint(checkpoint, fix, force=force)
        fixed = (*made.changes, *(f"not fixed: {one}" for one in made.left))
        output = made.output or output
    found = replace(_verified(output, against, how), fixed=fixed)
    if report is not None:
        reports.write(found, report)
    return found


def _verified(output: PathLike, against: PathLike | None, how: Mapping[str, Any]) -> Verification:
    with contextlib.ExitStack() as stack:
        source = None
        if against is not None:
            source = stack.enter_context(Checkpoint.open(against))
        try:
            target = stack.enter_context(Checkpoint.open(output))
        except CheckpointError as error:
            if not os.path.lexists(output):
                raise
            said = os.fspath(against) if against is not None else None
            return unreadable(Path(output), said, error, how["device"])
        return verify_checkpoint(target, source, **how)


@contextlib.contextmanager
def _spread(
    spread: Spread | None, device: str, options: Options
) -> Iterator[tuple[torch.device, Options]]:
    """Open what does the jobs; return the device of this process, and options that say the rest."""
    spread = spread or Spread()
    share = spread.share()
    with spread.opened(device) as (where, engine):
        yield where, replace(options, engine=engine, share=share)


def _due(plan: Plan) -> Path:
    if plan.output is None:
        raise UsageError("the plan has no output")
    return plan.output


def _outcome(
    plan: Plan, result: Result, non_finite: dict[str, str], share: Share | None = None
) -> Outcome:
    return Outcome(plan, _due(plan), non_finite=non_finite, share=share, **vars(result))


def _options(
    force: bool, memory: int | None, resume: bool, readback: bool, gpu: int | None = None
) -> Options:
    return Options(force, DEFAULT if memory is None else memory, resume, readback, gpu)


def _asked_for(request: Request | None) -> Request:
    request = request or Request()
    if request.nonfinite not in (None, *NON_FINITE):
        raise UsageError(f"request.nonfinite is error or keep, not {request.nonfinite!r}")
    if request.scheme == "":
        raise UsageError("request.scheme is the name of a scheme, or None for nvfp4")
    return request


inspect = checked(inspect_checkpoint)
choose = checked(choose_schemes)
importance = checked(measure_importance)


__all__ = [
    "Allowed",
    "Found",
    "Inspection",
    "Measured",
    "Outcome",
    "Plan",
    "Request",
    "Spread",
    "Verification",
    "Wanted",
    "choose",
    "dequantize",
    "finish",
    "importance",
    "inspect",
    "is_finished",
    "plan",
    "quantize",
    "verify",
]
