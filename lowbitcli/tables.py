"""A plan, an outcome or a verification as lines of text and as a JSON document.

Everything here goes from values to lines; nothing is printed. Names are made safe before they are
measured, so that columns line up. The JSON documents keep names as they are.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len

from lowbitcli.console import duration, size
from lowbitcli.plan import need
from lowbitcli.plan.activations import of_readers
from lowbitcli.plan.nouns import Plan, Weight
from lowbitcli.recipe import Matcher, Recipe
from lowbitcli.tensors import safe

if TYPE_CHECKING:
    from lowbitcli.api import Outcome
    from lowbitcli.verify.nouns import Verification

WIDEST = 120  # longer cells stick out, so that one long name does not widen every line
SHOWN = 40  # rows of a list of tensors, unless all of them are asked for


def columns(rows: Iterable[Sequence[str]], right: Iterable[int] = ()) -> list[str]:
    """Return rows as lines whose cells stand below each other; columns in `right` end together."""
    shown = [[safe(cell) for cell in row] for row in rows]
    right = set(right)
    widths = [min(max(map(cell_len, column)), WIDEST) for column in zip(*shown, strict=True)]
    lines = []
    for row in shown:
        cells = []
        for number, (cell, width) in enumerate(zip(row, widths, strict=True)):
            gap = " " * (width - cell_len(cell))
            cells.append(gap + cell if number in right else cell + gap)
        lines.append("  ".join(cells).rstrip())
    return lines


def shape_of(shape: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def first(rows: list[Sequence[str]], everything: bool) -> tuple[list[Sequence[str]], list[str]]:
    """Return the rows to show, and a line about those that are not shown."""
    if everything or len(rows) <= SHOWN:
        return rows, []
    return rows[:SHOWN], [f"... and {len(rows) - SHOWN} more; -v lists all"]


def plan_lines(plan: Plan, *, everything: bool = False) -> list[str]:
    """Tell of a plan: schemes with tensors and bytes, what is kept and why, the sizes."""
    container = f"{plan.container}: {plan.chosen}" if plan.chosen else plan.container
    lines = [f"{safe(str(plan.source))} -> {safe(str(plan.output))} ({container})", ""]
    table: list[Sequence[str]] = [("scheme", "tensors", "size")]
    table += [(name, f"{n:,}", size(total)) for name, (n, total) in plan.counts.items()]
    lines += columns(table, right=(1, 2))
    if inputs := of_readers(plan):
        lines += ["", *columns([("scheme", "activations"), *inputs])]
    reasons = Counter(weight.kept for weight in plan.weights if weight.kept)
    if reasons:
        table = [("kept because", "tensors")]
        table += [(reason, f"{count:,}") for reason, count in reasons.most_common()]
        lines += ["", *columns(table, right=(1,))]
    if everything:
        table = [("tensor", "shape", "stored as", "")]
        table += [
            (weight.name, shape_of(weight.shape), _becomes(weight), weight.kept)
            for weight in plan.weights
        ]
        lines += ["", *columns(table)]
    return [*lines, "", *_sizes(plan)]


def _becomes(weight: Weight) -> str:
    before = weight.source.name if weight.source else weight.dtype
    after = weight.target.name if weight.target else weight.dtype
    if weight.fake:
        after = f"{weight.dtype} as {after} would have it"
    return before if before == after else f"{before} -> {after}"


def _sizes(plan: Plan) -> list[str]:
    beside = need.beside(plan)
    rows = [
        ("input", size(plan.size_in), f"({plan.size_in:,} bytes)"),
        ("output", size(plan.bytes_out), f"({plan.bytes_out:,} bytes)"),
    ]
    lines = columns(rows, right=(1, 2))
    if beside:
        lines.append(f"beside it about {size(sum(beside.values()))}: {_listed(beside, plan)}")
    if plan.bits_per_weight:
        lines.append(f"{plan.bits_per_weight:.2f} bits per quantized weight, scales included")
    free = None if plan.output is None else need.disk_free(plan.output)
    told = "" if free is None else f" of disk, where {size(free)} are free,"
    disk = plan.bytes_out + sum(beside.values())
    lines.append(f"needs {size(disk)}{told} and about {size(need.memory(plan))} of memory")
    if need.has_gpu():
        both = size(need.memory(plan, gpu=True)), size(need.gpu_memory(plan))
        lines.append(f"with a GPU about {both[0]} of memory and {both[1]} of the GPU's")
    return lines


def _listed(beside: Mapping[str, int], plan: Plan) -> str:
    """Name the files that are written beside the weights, and count those that are copied."""
    written = [f"{safe(x)} {size(n)}" for x, n in beside.items() if x not in plan.sidecars]
    copied = [number for name, number in beside.items() if name in plan.sidecars]
    if copied:
        written.append(f"{len(copied):,} copied {size(sum(copied))}")
    return ", ".join(written)


def plan_document(plan: Plan) -> dict[str, Any]:
    """Return a plan as a JSON document: sizes in bytes, every tensor with its reads and writes."""
    return {
        "source": str(plan.source),
        "output": None if plan.output is None else str(plan.output),
        "container": plan.container,
        "bytes_in": plan.size_in,
        "bytes_out": plan.bytes_out,
        "beside": need.beside(plan),
        "bytes_free": None if plan.output is None else need.disk_free(plan.output),
        "memory_about": need.memory(plan),
        "memory_about_with_gpu": need.memory(plan, gpu=True),
        "gpu_memory_about": need.gpu_memory(plan),
        "bits_per_weight": plan.bits_per_weight,
        "schemes": {
            name: {"tensors": number, "bytes": total}
            for name, (number, total) in plan.counts.items()
        },
        "activations": dict(of_readers(plan)),
        "notes": list(plan.notes),
        "files": [{"name": file.name, "bytes": file.size} for file in plan.files],
        "tensors": [_weight_document(weight) for weight in plan.weights],
    }


def recipe_lines(recipe: Recipe, plan: Plan, *, everything: bool = False) -> list[str]:
    """Tell which rule of a recipe takes which tensor of a plan, and why the others are kept."""
    matcher = Matcher(recipe)
    rows: list[Sequence[str]] = []
    labels = {kind.label for kind in recipe.kinds}
    for weight in plan.weights:
        rule = None if weight.kept in labels else matcher.decide(weight.name).rule
        number = "" if rule is None else f"rule {recipe.rules.index(rule) + 1}"
        rows.append((weight.name, number, getattr(weight.target, "name", "kept"), weight.kept))
    shown, more = first(rows, everything)
    return [*columns([("tensor", "taken by", "becomes", ""), *shown]), *more]


def _weight_document(weight: Weight) -> dict[str, Any]:
    return {
        "name": weight.name,
        "shape": list(weight.shape),
        "dtype": weight.dtype,
        "source": weight.source.name if weight.source else None,
        "target": weight.target.name if weight.target else None,
        "kept": weight.kept,
        "bytes_in": weight.bytes_in,
        "bytes_out": weight.bytes_out,
    }


def outcome_lines(outcome: "Outcome", *, everything: bool = False) -> list[str]:
    """Tell of a run: sizes, speed, memory, the weights that lost most, where the output is."""
    plan = outcome.plan
    if outcome.complete:
        return [f"{safe(str(outcome.output))} ({plan.container}): already complete"]
    sizes = f"{size(plan.size_in)} -> {size(plan.bytes_out)}"
    if plan.bits_per_weight:
        sizes += f", {plan.bits_per_weight:.2f} bits per quantized weight"
    rate = plan.bytes_in / outcome.seconds / 1e9 if outcome.seconds else 0.0
    memory = f"peak memory {_of(outcome.peak_rss, outcome.allowed[0], outcome.forecast[0])}"
    if outcome.peak_gpu:
        gpu = _of(outcome.peak_gpu, outcome.allowed[1], outcome.forecast[1])
        memory += f", of the GPU {gpu}"
    lines = []
    worst = outcome.worst(len(outcome.errors) if everything else 5)
    if worst:
        rows: list[Sequence[str]] = [("largest errors", "relative", "SQNR")]
        rows += [
            (name, f"{error.relative:.4f}", f"{error.sqnr_db:.1f} dB") for name, error in worst
        ]
        lines += [*columns(rows, right=(1, 2)), ""]
    if outcome.non_finite:
        rows = [("kept as it is", "because")]
        kept, more = first(list(outcome.non_finite.items()), everything)
        lines += [*columns([*rows, *kept]), *more, ""]
    if outcome.resumed:
        lines.append(f"{outcome.resumed:,} of {len(plan.jobs):,} jobs were done before")
    if outcome.moved:
        what = "global scale" if outcome.moved == 1 else "global scales"
        lines.append(
            f"{outcome.moved:,} {what} moved by an ulp: {plan.container} stores the reciprocal"
        )
    if outcome.blocks:
        lines.append(
            f"{outcome.equal:,} of {outcome.blocks:,} requantized blocks stand for the same numbers"
        )
    counts = ", ".join(f"{name} {number:,}" for name, (number, _) in plan.counts.items()) or "no"
    if outcome.missing:
        return [*lines, *share_lines(outcome), f"{duration(outcome.seconds)}, {memory}"]
    return [
        *lines,
        f"{counts} tensors; {sizes}",
        f"{duration(outcome.seconds)}, {rate:.2f} GB/s, {memory}",
        f"{safe(str(outcome.output))} ({plan.container})",
    ]


def share_lines(outcome: "Outcome") -> list[str]:
    """Tell of a share that is done, and of those that are not."""
    others = [
        f"{index} ({count:,} jobs)" for index, count in sorted(outcome.missing.items()) if count
    ]
    still = f"not done: {', '.join(others)}" if others else "others are being written"
    return [
        f"{outcome.share} of {safe(str(outcome.output))} is done; {still}",
        "the last one to end publishes it, or lowbit finish",
    ]


def _of(peak: int, allowed: int | None, forecast: int) -> str:
    """Tell a peak of memory, its cap if there is one, and what was expected."""
    cap = "" if allowed is None else f" of {size(allowed)}"
    return f"{size(peak)}{cap} (forecast {size(forecast)})"


def timing_lines(outcome: "Outcome") -> list[str]:
    """Tell where a run's time went: seconds of each stage, those of threads added up."""
    ranked = sorted(outcome.stages.items(), key=lambda item: -item[1])
    rows = [("stage", "seconds"), *((name, f"{seconds:.2f}") for name, seconds in ranked)]
    return columns(rows, right=(1,))


def outcome_document(outcome: "Outcome") -> dict[str, Any]:
    """Return a run as a JSON document: its plan, the error of each weight, seconds, bytes."""
    return {
        **plan_document(outcome.plan),
        "notes": list(outcome.notes),
        "output": str(outcome.output),
        "errors": {
            name: {"relative": error.relative, "sqnr_db": error.sqnr_db}
            for name, error in sorted(outcome.errors.items())
        },
        "non_finite": dict(outcome.non_finite),
        "moved": outcome.moved,
        "requantized_blocks": {"equal": outcome.equal, "all": outcome.blocks},
        "already_complete": outcome.complete,
        "resumed": outcome.resumed,
        "share": [outcome.share.index, outcome.share.number] if outcome.share else None,
        "missing": {str(index): count for index, count in sorted(outcome.missing.items())},
        "seconds": outcome.seconds,
        "stages": dict(outcome.stages),
        "peak_rss": outcome.peak_rss,
        "peak_gpu": outcome.peak_gpu,
        "forecast": dict(zip(("peak_rss", "peak_gpu"), outcome.forecast, strict=True)),
    }


def verification_lines(found: "Verification", *, everything: bool = False) -> list[str]:
    """Tell of a verification: what was checked, what is wrong, which weights lost most."""
    rows: list[Sequence[str]] = []
    for check in found.checks:
        outcome = "skipped" if check.ok is None else "ok" if check.ok else "FAILED"
        count = "" if check.ok is None else f"{check.count:,}"
        rows.append((check.what, count, outcome, check.note))
    lines = [f"fixed: {safe(one)}" for one in found.fixed]
    lines += columns([("checked", "number", "", ""), *rows], right=(1,))
    if found.problems:
        rows = [
            (one.severity, one.kind, one.tensor, one.file, one.message) for one in found.problems
        ]
        shown, more = first(rows, everything)
        lines += ["", *columns([("", "kind", "tensor", "file", "problem"), *shown]), *more]
    worst = found.worst(len(found.weights) if everything else 5)
    if worst:
        rows = [
            (row.name, row.scheme, f"{row.figures.relative:.4f}", f"{row.figures.sqnr_db:.1f} dB")
            for row in worst
            if row.figures is not None
        ]
        head = ("largest errors", "scheme", "relative", "SQNR")
        lines += ["", *columns([head, *rows], right=(2, 3))]
    return [*lines, "", _verdict(found)]


def _verdict(found: "Verification") -> str:
    summary = found.summary
    text = f"{safe(found.target)} ({found.container}): "
    text += "good" if found.passed else f"{len(found.failures):,} problem(s)"
    if found.warnings:
        text += f", {len(found.warnings):,} warning(s)"
    text += f"; {summary.tensors:,} tensors, {size(summary.bytes_after)}"
    if summary.bytes_before is not None:
        text += f" of {size(summary.bytes_before)}"
    if summary.bits_per_weight is not None:
        text += f", {summary.bits_per_weight:.2f} bits per quantized weight"
    return text
