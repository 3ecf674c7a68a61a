"""Hold the output's tensors against the source's: by bytes where they were left alone, else by
numbers."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowbit_kernels import error_looks
from lowbit_kernels.error import Sums, bands
from lowbit_kernels.error_codes import Look
from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.errors import CheckpointError
from lowbitcli.pipeline.arithmetic import torch_dtype
from lowbitcli.pipeline.read import pick
from lowbitcli.plan.source import SourceWeight
from lowbitcli.schemes import Scheme
from lowbitcli.tensors import DATA
from lowbitcli.verify import again as made_again
from lowbitcli.verify import diagnose, largest
from lowbitcli.verify.bound import half_gap, held_by_least, ruler, step_of
from lowbitcli.verify.hands import Map
from lowbitcli.verify.nouns import WARN, Figures, Problem, WeightRow
from lowbitcli.verify.rows import Rows
from lowbitcli.verify.spread import Spread, seen

SAID = 2.0**-8  # relative error: rounding to bf16 leaves less, rounding to codes more
COPY_BYTES = 16 << 20  # what is read at once of tensors that must be equal


def same_bytes(
    target: Checkpoint, weight: SourceWeight, source: Checkpoint, other: SourceWeight
) -> Problem | None:
    """Return how a tensor that was to stay as it is differs from the source's, None where equal."""
    name, size = weight.reads[DATA].spec.name, weight.reads[DATA].nbytes
    read = other.reads[DATA]
    picked = (
        pick(source.read(read.spec.name, *(read.span or (0, None))), read) if read.view else b""
    )
    for start in range(0, size, COPY_BYTES):
        stop = min(start + COPY_BYTES, size)
        theirs = picked[start:stop] or source.read(read.spec.name, start, stop)
        try:
            ours = target.read(name, start, stop)
        except CheckpointError as error:
            return Problem("unreadable", name, error.message, weight.file)
        if ours != theirs:
            differ = np.frombuffer(ours, np.uint8) != np.frombuffer(theirs, np.uint8)
            at = start + int(differ.argmax())
            message = f"not the source's bytes; the first that differs is byte {at} of {size}"
            return Problem("changed", name, message, weight.file)
    return None


class Rule(NamedTuple):
    """By what a weight was made, "" where it is not known, and how many rows of each run can be
    made again."""

    name: str = ""
    rows: int = 0


class Compared(NamedTuple):
    """What a comparison of a quantized weight found; `again` is whether some of it was made
    again."""

    row: WeightRow
    problems: list[Problem]
    spread: Spread
    again: bool
    largest: list[largest.Seen]


class _Seen(NamedTuple):
    """What was seen of some rows: error sums of bands, codes, how errors are spread, where the
    first element outside is, with what there is to say of it, which bytes are others than those
    that come out `again`, None where nothing was made again, and the largest element."""

    sums: list[Sums]
    codes: Look
    spread: Spread
    first: tuple[int, ...] | None
    told: str
    again: made_again.Others | None
    largest: largest.Seen | None


def quantized(ours: Rows, theirs: Rows, widening: float | None, each: Map, rule: Rule) -> Compared:
    """Compare a quantized weight with the source's, element by element; `each` is a map over runs
    of its rows. With the `rule` by which it was made, some of it is made again, where that can be
    done.

    Raises:
        UnreadableError: the output cannot be read.
        CheckpointError: the source cannot be read.
    """
    scheme = ours.weight.scheme
    if scheme is None:
        raise ValueError("only a quantized weight has codes")
    total, outside, clipped, underflow, spreads = Sums(), 0, 0, 0, Spread()
    again: list[made_again.Others] = []
    most: list[largest.Seen] = []
    first: tuple[int, ...] | None = None
    told = ""
    for found in each(partial(_seen_of, ours, theirs, scheme, widening, rule), ours.bands()):
        for band in found.sums:
            total = total.plus(band)
        spreads = spreads.plus(found.spread)
        if found.first is not None and first is None:
            first, told = found.first, found.told
        outside += found.codes.outside
        clipped += found.codes.clipped
        underflow += found.codes.underflow
        again += [] if found.again is None else [found.again]
        most += [] if found.largest is None else [found.largest]
    figures = _figures(total, outside, first, clipped, underflow)
    figures = _with_spread(figures, total, spreads, half_gap(scheme.element))
    row = _row(ours.weight, theirs.weight, scheme.name, "quantized", figures)
    problems = _non_finite(ours.weight, total)
    if not outside:
        problems += _lost(ours.weight, total)
    if outside:
        message = f"{outside} of {total.count} elements are not in the interval of their code; "
        file = ours.weight.file
        problems.append(Problem("bound", ours.weight.name, message + told, file))
        why = diagnose.reason(ours, theirs) if diagnose.is_asked(outside, total.count) else ""
        if why:
            message = f"against the source: {why}"
            problems.append(Problem("layout", ours.weight.name, message, file))
    elif others := [one for one in again if one.count and not _is_said(theirs, ours, total)]:
        message = (
            f"quantized again by the rule {rule.name}, the source gives other codes or scales: "
        )
        message += f"{sum(one.count for one in others)} bytes of the rows that were made differ, "
        message += others[0].where
        problems.append(Problem("scale", ours.weight.name, message, ours.weight.file))
    if _is_said(theirs, ours, total):
        return Compared(row, problems, spreads, False, [])
    return Compared(row, problems, spreads, bool(again), most)


def _is_said(theirs: Rows, ours: Rows, total: Sums) -> bool:
    """Does the source hold these numbers already, in the same scheme or dequantized to a dtype that
    has nearly all of them? Then it is no source that they were rounded from."""
    if theirs.weight.scheme is not None and theirs.weight.scheme == ours.weight.scheme:
        return True
    return not total.is_finite or (total.signal > 0 and total.relative < SAID)


def _seen_of(
    ours: Rows,
    theirs: Rows,
    scheme: Scheme,
    widening: float | None,
    rule: Rule,
    place: tuple[int, int, int],
) -> _Seen:
    """Look at the rows of a matrix from one place to another, all of it at once."""
    matrix, start, stop = place
    w = theirs.values(theirs.parts(matrix, start, stop))
    parts = ours.parts(matrix, start, stop)
    step, held_to = step_of(scheme, parts, start, stop - start), ruler(scheme.element, widening)
    v = error_looks.values(parts[DATA], step, held_to, scheme.block)
    v = ours.values(parts) if v is None else v
    codes = error_looks.look(w, v, parts[DATA], step, held_to, scheme.block)
    codes = codes._replace(
        clipped=codes.clipped - held_by_least(scheme, w, parts[DATA], step, widening)
    )
    lead, first, told = _lead(ours.weight, matrix), None, ""
    if codes.first is not None:
        row, col = codes.first
        first, told = (*lead, start + row, col), _told(ours, w, parts, start, codes.first)
    other = made_again.differing(ours.weight, w, parts, rule.name, rule.rows, start)
    most = largest.seen(scheme, w, parts, rule.name, matrix)
    spread = seen(scheme, codes, w, v, parts, start, lead)
    return _Seen(bands(w, v), codes, spread, first, told, other, most)


def unquantized(
    ours: Rows, theirs: Rows, *, fake: bool, rounded: bool
) -> tuple[WeightRow, list[Problem]]:
    """Compare a weight that holds dequantized numbers with the source's.

    Where the source is quantized, every element must be its value rounded to the output's dtype.
    Where numbers were `rounded` to codes that the source does not have, by this run (`fake`) or
    before it, there is no telling which code stands behind a value, and only errors are summed.

    Raises:
        UnreadableError, CheckpointError: see `quantized`.
    """
    weight = ours.weight
    dtype = torch_dtype(weight.dtype)
    total, wrong = Sums(), 0
    first: tuple[int, ...] | None = None
    told = ""
    for matrix, start, stop in ours.bands():
        w = theirs.values(theirs.parts(matrix, start, stop))
        v = ours.values(ours.parts(matrix, start, stop))
        total = _add(total, w, v)
        if rounded:
            continue
        expected = w.to(dtype)
        zero = (v == 0) & (expected == 0)  # whose sign is no matter
        differ = (_bits(v) != _bits(expected)) & ~zero
        found = int(differ.sum())
        if found and first is None:
            row, col = torch.nonzero(differ)[0].tolist()
            first = (*_lead(weight, matrix), start + row, col)
            told = f"{float(expected[row, col]):.9g} in the source, {float(v[row, col]):.9g} in "
            told += "the output"
        wrong += found
    how = "fake" if fake else "dequantized"
    scheme = theirs.weight.scheme.name if theirs.weight.scheme is not None else ""
    figures = _figures(total, None if rounded else wrong, first, 0, 0)
    problems = _non_finite(weight, total)
    if not wrong:
        problems += _lost(weight, total)
    if wrong and first is not None:
        message = f"{wrong} of {total.count} elements are not the source's value in {weight.dtype}"
        message += f", the first at {list(first)}: {told}"
        problems.append(Problem("bound", weight.name, message, weight.file))
    return _row(weight, theirs.weight, scheme, how, figures), problems


def _bits(values: Tensor) -> Tensor:
    return values.view(torch.int32 if values.element_size() == 4 else torch.int16)


def _add(total: Sums, w: Tensor, v: Tensor) -> Sums:
    """Add the sums of some rows, a band at a time, as they are added over the whole weight."""
    for one in bands(w, v):
        total = total.plus(one)
    return total


def _figures(
    total: Sums,
    outside: int | None,
    first: tuple[int, ...] | None,
    clipped: int,
    underflow: int,
) -> Figures:
    if not total.is_finite:
        return Figures(math.nan, math.nan, math.nan, math.nan, outside, first, clipped, underflow)
    return Figures(
        total.largest,
        total.relative,
        total.sqnr_db,
        total.cosine,
        outside,
        first,
        clipped,
        underflow,
        math.sqrt(total.signal),
    )


def _with_spread(figures: Figures, total: Sums, found: Spread, half: float) -> Figures:
    """Return figures with those of the codes and blocks."""
    worst = found.worst
    if worst is not None and total.error:
        mean = total.error / found.blocks
        worst = replace(worst, times=worst.error * worst.error / mean)
    return replace(
        figures,
        zeros=found.zeros,
        mean_steps=found.in_steps(found.far, half),
        bias_steps=found.in_steps(found.bias, half),
        blocks=found.blocks,
        underflow_blocks=found.lost,
        scale_least=found.least if math.isfinite(found.least) else None,
        scale_most=found.most or None,
        worst_block=worst if worst is not None and worst.error else None,
    )


def _non_finite(weight: SourceWeight, total: Sums) -> list[Problem]:
    if not math.isfinite(total.signal):
        message = "the source holds NaN or Inf in it, and it is quantized"
        return [Problem("nonfinite", weight.name, message, weight.file)]
    if not math.isfinite(total.value):
        message = "it stands for values that are NaN or Inf"
        return [Problem("code", weight.name, message, weight.file)]
    return []


def _lost(weight: SourceWeight, total: Sums) -> list[Problem]:
    if not total.is_lost:
        return []
    message = f"hardly anything of it is left: an SQNR of {total.sqnr_db:.1f} dB"
    return [Problem("quality", weight.name, message, weight.file, WARN)]


def _row(
    weight: SourceWeight, other: SourceWeight, scheme: str, how: str, figures: Figures
) -> WeightRow:
    return WeightRow(weight.name, scheme, how, weight.shape, other.nbytes, weight.nbytes, figures)


def _lead(weight: SourceWeight, matrix: int) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(matrix, weight.shape[:-2] or (1,)))[
        : len(weight.shape) - 2
    ]


def _told(ours: Rows, w: Tensor, parts: dict[str, Tensor], start: int, place: Sequence[int]) -> str:
    """Return where the first element outside is, what it is and what is stored for it."""
    scheme = ours.weight.scheme
    if scheme is None:
        raise ValueError("only a quantized weight has codes")
    row, col = place
    step = step_of(scheme, parts, start, w.shape[0])
    step = step.expand(w.shape[0], -1)
    block = col // (scheme.block[1] or w.shape[1])
    unit = float(step[row, block])
    stored = float(ours.values(parts)[row, col])
    high = scheme.block[0]
    across = 0 if high is None else (start + row) // high
    return (
        f"the first at row {start + row}, column {col}, block [{across}, {block}]: "
        f"{float(w[row, col]):.9g} in the source, {stored:.9g} in the output, "
        f"one step is {unit:.9g}"
    )
