"""Choose a scheme for each weight under a budget: plan all, measure all, solve, say it, plan that.

A recipe is believed when the plan that it makes gives every weight what was chosen for it, leaves
all others as they are, and takes no more bytes than were allowed.
"""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lowbitcli import recipe as recipes
from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.errors import RecipeError, UnsupportedError, UsageError
from lowbitcli.pipeline.ledger import Progress
from lowbitcli.plan.importance import Importance
from lowbitcli.plan.nouns import PathLike, Plan, Weight
from lowbitcli.search.candidates import KEEP, USUAL, Candidate, candidates, notes, usual
from lowbitcli.search.knapsack import Solution, solve
from lowbitcli.search.measure import Allowed, Measured, measure
from lowbitcli.search.nouns import Chosen, Found, Wanted
from lowbitcli.search.score import chosen_names, curve, items, scores, uniform
from lowbitcli.search.text import recipe_name, text
from lowbitcli.search.units import Paper, paper, plan_of
from lowbitcli.search.write import check_path, write
from lowbitcli.tensors import safe

_TRIES = 6  # how often a size is aimed at: headers differ by a few bytes from choice to choice


def choose(
    source: PathLike,
    wanted: Wanted,
    allowed: Allowed | None = None,
    output: PathLike | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> Found:
    """Measure every scheme on every weight of a checkpoint, choose the least error that a budget
    allows, and write it as a recipe where one is named.

    Raises:
        UsageError: the budget cannot be met, or makes no sense.
        UnsupportedError: a weight reaches the floor with no scheme, or nothing can be quantized.
        OutputError: the recipe cannot be written.
        LowbitError: what making a plan, and reading, raise.
    """
    started = time.perf_counter()
    if wanted.bits is not None and wanted.size is not None:
        raise UsageError("--bits and --size exclude each other", hint="leave one out")
    if wanted.bits is not None and not 0 < wanted.bits <= 64:
        raise UsageError(f"{wanted.bits:g} bits are no budget", hint="--bits 4.6")
    if output is not None and wanted.bits is None and wanted.size is None:
        raise UsageError("a recipe needs a budget", hint="--bits 4.6, or --size 3.2GB")
    if output is not None:
        check_path(Path(output), force=force)
    some = candidates(wanted.schemes or usual(wanted.container))
    if all(one.keeps for one in some):
        raise UsageError("nothing but keep to choose from", hint=f"--schemes {USUAL}")
    by = None if wanted.importance is None else Importance.open(wanted.importance)
    with Checkpoint.open(source) as checkpoint:
        if by is not None and checkpoint.components:
            raise UsageError("--importance is for models of tokens, and this is a pipeline")
        known = paper(checkpoint, some, wanted.container, by, need_all=bool(wanted.schemes))
        some = tuple(one for one in some if one.name not in known.left_out)
        _refuse_too_few(known, wanted)
        quantizing = [one.name for one in some if not one.keeps]
        plans = {name: known.plans[name] for name in quantizing}
        jobs = {name: known.jobs(name) for name in quantizing}
        measured = measure(checkpoint, plans, jobs, allowed or Allowed(), by, progress)
        found = _found(checkpoint, known, some, wanted, measured)
        if by is not None:
            found = replace(found, importance=_of(by, measured))
        if wanted.bits is not None or wanted.size is not None:
            found = replace(found, chosen=_chosen(checkpoint, known, found))
    if output is not None and found.chosen is not None:
        write(found.chosen.text, Path(output), force=force)
    return replace(
        found,
        seconds=time.perf_counter() - started,
        stages=measured.stages,
        peak_rss=measured.peak_rss,
        peak_gpu=measured.peak_gpu,
    )


def _of(by: Importance, measured: Measured) -> str:
    """Return by what errors are weighed.

    Raises:
        UsageError: it has the importance of none of the weights.
    """
    weighed = len({name for found in measured.weighed.values() for name in found})
    every = len({name for found in measured.lost.values() for name in found})
    if not weighed:
        raise UsageError(
            f"{safe(by.name)} has the importance of none of the {every:,} weights",
            hint="was it measured on this model?",
        )
    return f"{by.name} ({by.told}, sha256 {by.digest}), {weighed} of {every} weights"


def _found(
    checkpoint: Checkpoint,
    known: Paper,
    some: Sequence[Candidate],
    wanted: Wanted,
    measured: Measured,
) -> Found:
    scored = scores(known.units, measured, wanted.floor_db)
    return Found(
        source=checkpoint.path.resolve().name,
        container=known.container,
        wanted=wanted,
        candidates=tuple(some),
        scores=scored,
        curve=curve(scored),
        uniform={one.name: uniform(scored, one.name, KEEP) for one in some},
        bytes_in=known.kept.size_in,
        digest=measured.digest,
        is_pipeline=known.is_pipeline,
        left_out=known.left_out,
        notes=notes(wanted.schemes),
    )


def _chosen(checkpoint: Checkpoint, known: Paper, found: Found) -> Chosen:
    """Return the best choice within the budget, as a recipe that was planned."""
    wanted = found.wanted
    if wanted.size is None:
        budget = int((wanted.bits or 0.0) * found.elements / 8)
        solution = solve(items(found.scores), budget)
        if solution is None:
            raise _too_few(wanted, found.elements, found.curve[0].cost, known.rest)
        return _said(checkpoint, known, found, solution)
    rest, best = known.rest, None
    for _ in range(_TRIES):
        solution = solve(items(found.scores), wanted.size - rest)
        if solution is None:
            break
        chosen = _said(checkpoint, known, found, solution)
        over = chosen.bytes_out - solution.cost
        if chosen.bytes_out <= wanted.size and (
            best is None or solution.error < best.solution.error
        ):
            best = chosen
        if over == rest or (best is chosen and over > rest):
            break
        rest = over
    if best is None:
        raise _too_few(wanted, found.elements, found.curve[0].cost, rest)
    return best


def _refuse_too_few(known: Paper, wanted: Wanted) -> None:
    """Refuse a budget that no choice is within, before a weight is read; what the floor rules out
    is not known yet."""
    if wanted.bits is None and wanted.size is None:
        return
    elements = sum(unit.elements for unit in known.units)
    least = sum(min(unit.costs.values()) for unit in known.units)
    budget = wanted.size or int((wanted.bits or 0.0) * elements / 8)
    if budget < least:
        raise _too_few(replace(wanted, floor_db=None), elements, least, known.rest)


def _too_few(wanted: Wanted, elements: int, least: int, rest: int) -> UsageError:
    """Return the error for a budget below the least."""
    bits = -(-80000 * least // elements) / 10000  # rounded up
    floor = "" if wanted.floor_db is None else f" with {wanted.floor_db:g} dB or more"
    if wanted.size is None:
        message = f"{wanted.bits:g} bits are too few: the least is {bits:.4f}{floor}"
        hint = f"--bits {bits:.4f}"
    else:
        message = f"{wanted.size} bytes are too few: the least is {least + rest}{floor}"
        hint = f"--size {least + rest}"
    other = "--schemes with fewer bits" if wanted.floor_db is None else "a lower --floor-db"
    return UsageError(message, hint=f"{hint}, or {other}")


def _said(checkpoint: Checkpoint, known: Paper, found: Found, solution: Solution) -> Chosen:
    """Write a solution as a recipe, plan it, and hold the plan against the solution."""
    names = chosen_names(found.scores, solution.chosen)
    members = {name for score in found.scores for name in score.members}
    parts = {name.partition("/")[0] for name in members}
    others = [
        recipe_name(name, found)
        for name in known.names
        if name not in members and (not found.is_pipeline or name.partition("/")[0] in parts)
    ]
    said = text(found, solution, names, others)
    with tempfile.TemporaryDirectory(prefix="lowbit-") as folder:
        path = Path(folder) / "auto.yaml"
        path.write_text(said)
        try:
            plan = plan_of(checkpoint, recipes.load(str(path)), found.wanted.container)
        except RecipeError as error:
            raise UnsupportedError(
                f"the choice cannot be said in a recipe: {error.message}", hint=error.hint
            ) from error
    _refuse_other(plan, known, names)
    return Chosen(solution, names, said, plan.bytes_out)


def _refuse_other(plan: Plan, known: Paper, names: Sequence[str]) -> None:
    """Raise UnsupportedError where a plan is not what was chosen."""
    due = {weight.name: _fate(weight) for weight in known.kept.weights}
    for unit, name in zip(known.units, names, strict=True):
        for weight in unit.kept:
            due.pop(weight.name)
        due |= {weight.name: _fate(weight) for weight in unit.weights[name]}
    for weight in plan.weights:
        wanted = due.get(weight.name)
        if wanted is not None and wanted != _fate(weight):
            raise UnsupportedError(
                f"no patterns tell {safe(weight.name)} from others",
                hint="its name is too long, or another tensor's but for .weight",
            )


def _fate(weight: Weight) -> tuple[str, str, int]:
    """Return what becomes of a weight."""
    scheme = weight.target.name if weight.target is not None else ""
    return scheme, weight.rule if scheme and not weight.kept else "", weight.bytes_out


__all__ = ["choose"]
