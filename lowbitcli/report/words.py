"""A verification in words and numbers for people, the same for every kind of report."""

import math
from pathlib import Path
from typing import NamedTuple

from lowbitcli.report import loss
from lowbitcli.verify.nouns import Kept, Verification, WeightRow

EVERY_HEAD = (
    *("tensor", "scheme", "shape", "bits", "SQNR", "relative", "cosine", "largest error"),
    *("mean, steps", "bias, steps", "zeros made", "clipped", "underflow", "outside"),
    *("least scale", "largest scale"),
)
FILES = 40  # whose digests are listed


class Tile(NamedTuple):
    """One of the few numbers that come first; of the notes, `name` is one from the checkpoint."""

    label: str
    value: str
    notes: tuple[str, ...]
    name: str = ""


class Kind(NamedTuple):
    """Problems of one kind: how many, and the first of them."""

    kind: str
    severity: str
    number: int
    tensor: str
    message: str


class Worst(NamedTuple):
    """A weight among those with the largest errors."""

    name: str
    scheme: str
    sqnr: str
    relative: str
    why: str


class Outlier(NamedTuple):
    """A block that stands out."""

    name: str
    where: str
    times: str
    relative: str
    largest: str


def verdict(found: Verification) -> str:
    """Return the result in a few words."""
    return verdict_of(len(found.failures), len(found.warnings))


def verdict_of(failures: int, warnings: int) -> str:
    """Return the result of a verification with so many problems in a few words."""
    text = f"{_count(failures, 'problem')} found" if failures else "passed"
    return f"{text}, {_count(warnings, 'warning')}" if warnings else text


def title(target: str) -> str:
    """Return a checkpoint's name without the folders that it is in."""
    return Path(place(target)).name or target


def place(target: str) -> str:
    """Return a checkpoint's path, the whole one where it has no name, as `.` has none."""
    return str(Path(target).resolve()) if Path(target).name in ("", "..") else target


def tone(found: Verification) -> str:
    """Return good, warn or bad."""
    return "bad" if not found.passed else "warn" if found.warnings else "good"


def scope(found: Verification) -> str:
    """Return how much was checked."""
    done = [check for check in found.checks if check.ok is not None]
    left = len(found.checks) - len(done)
    against = "against its source" if found.source is not None else "by itself, without a source"
    text = f"{_count(len(done), 'check')} {against}"
    text += f", {left:,} not done" if left else ""
    looked = (found.sample or {}).get("tensors")
    if isinstance(looked, list | tuple):
        text += f"; numbers of a sample: {len(looked):,} of {found.summary.tensors:,} tensors"
    return text


def kinds(found: Verification) -> list[Kind]:
    """Return the kinds of problems that make the verdict, in the order in which they were found."""
    first: dict[str, Kind] = {}
    for one in found.failures or found.warnings:
        seen = first.get(one.kind, Kind(one.kind, one.severity, 0, one.tensor, one.message))
        first[one.kind] = seen._replace(number=seen.number + 1)
    return list(first.values())


def tiles(found: Verification) -> list[Tile]:
    """Return what comes first: size, bits, loss, and where most was lost."""
    summary, rows = found.summary, loss.measured(found)
    before = summary.bytes_before
    note = "the source was not looked at" if before is None else f"from {short(before)}"
    if before:
        note += f": {percent(summary.bytes_after / before)} of it"
    tiles = [Tile("Size", short(summary.bytes_after), (note,))]
    if summary.bits_per_weight is not None:
        stored = [(n, name) for name, (n, _) in summary.schemes.items() if name != "kept"]
        told = ", ".join(f"{n:,} {name}" for n, name in sorted(stored, reverse=True))
        told += f" of {summary.tensors:,} tensors"
        tiles.append(Tile("Bits per quantized weight", f"{summary.bits_per_weight:.2f}", (told,)))
    total = loss.total(figures for _, figures in rows)
    if total is not None:
        note = f"relative error {percent(total.relative)}, {_count(total.number, 'weight')}"
        of = (
            "all" if len(rows) == len(found.weights) else f"{len(rows):,} of {len(found.weights):,}"
        )
        tiles.append(Tile(f"SQNR over {of} weights", decibels(total.sqnr_db), (note,)))
    elif not rows:
        why = "no source was named" if found.source is None else "no weight was compared"
        tiles.append(Tile("Loss", "not measured", (why,)))
    worst = loss.least(rows)
    if worst is not None:
        row, figures = worst
        why = loss.Reasons(found).of(row, figures)
        tiles.append(Tile("Lowest SQNR", decibels(figures.sqnr_db), (row.name, why), row.name))
    return tiles


def facts(found: Verification) -> list[tuple[str, str]]:
    """Return what was looked at, how large it is, and with what it was done."""
    summary = found.summary
    rows = [("checkpoint", place(found.target)), ("container", found.container or "unknown")]
    source = place(found.source) if found.source else "none was named: numbers were not compared"
    rows.append(("source", source))
    if summary.bytes_before is not None:
        rows.append(("size before", size(summary.bytes_before)))
    after = size(summary.bytes_after)
    if summary.bytes_before:
        after += f" ({summary.bytes_after / summary.bytes_before:.1%})"
    rows.append(("size", after))
    if summary.bits_per_weight is not None:
        rows.append(("bits per quantized weight", f"{summary.bits_per_weight:.2f}"))
    rows.append(("tensors", f"{summary.tensors:,}"))
    if found.source is not None:
        rows.append(("byte for byte the source's", f"{found.untouched:,}"))
    if found.manifest is not None:
        rows.append(("written by", f"lowbit {found.manifest.get('version', '')}"))
        rows += [
            (name, str(found.manifest[key]))
            for name, key in (("digest of the plan", "plan"), ("digest of the source", "source"))
            if found.manifest.get(key)
        ]
        files = found.manifest.get("files")
        listed = files.items() if isinstance(files, dict) else ()
        rows += [(f"digest of {file}", str(digest)) for file, digest in list(listed)[:FILES]]
        if len(listed) > FILES:
            rows.append(("digests of more files", f"{len(listed) - FILES:,}"))
        recipe = found.manifest.get("recipe")
        name = recipe.get("name", "") if isinstance(recipe, dict) else ""
        if name:
            rows.append(("recipe", str(name)))
    rows += [(f"checked with: {key}", value) for key, value in found.environment.items()]
    return rows


def checks(found: Verification) -> list[tuple[str, str, str]]:
    """Return each check, how often it was made, and how it went or why it was not made."""
    rows = []
    for check in found.checks:
        if check.ok is None:
            rows.append((check.what, "", f"not done: {check.note}"))
        else:
            result = "ok" if check.ok else "FAILED"
            note = f" ({check.note})" if check.note else ""
            rows.append((check.what, f"{check.count:,}", result + note))
    return rows


def schemes(found: Verification) -> list[tuple[str, str, str]]:
    """Return each scheme with its tensors and their size."""
    return [
        (name, f"{number:,}", size(total))
        for name, (number, total) in found.summary.schemes.items()
    ]


def worst(found: Verification) -> list[Worst]:
    """Return the weights with the largest errors, and why."""
    reasons = loss.Reasons(found)
    return [
        Worst(
            row.name,
            row.scheme or row.how,
            decibels(row.figures.sqnr_db),
            percent(row.figures.relative),
            reasons.of(row, row.figures),
        )
        for row in found.worst()
        if row.figures is not None
    ]


def blocks(found: Verification) -> list[Outlier]:
    """Return the blocks that stand out most from their weight."""
    return [
        Outlier(
            row.name,
            loss.place(block.place, block.shape),
            f"{block.times:,.1f}\u00d7",
            percent(block.relative),
            f"{block.largest:.4g}",
        )
        for row, figures in loss.worst_blocks(found)
        if (block := figures.worst_block) is not None
    ]


def figures(row: WeightRow) -> tuple[str, ...]:
    """Return all figures of a weight, columns as in EVERY_HEAD; "" where one is not known."""
    shape = "\u00d7".join(map(str, row.shape))
    seen = row.figures
    if seen is None:
        return (row.name, row.scheme, shape, f"{row.bits:.2f}", *[""] * (len(EVERY_HEAD) - 4))
    return (
        row.name,
        row.scheme or row.how,
        shape,
        f"{row.bits:.2f}",
        decibels(seen.sqnr_db),
        percent(seen.relative),
        f"{seen.cosine:.6f}",
        f"{seen.largest:.4g}",
        "" if seen.mean_steps is None else f"{seen.mean_steps:.4f}",
        "" if seen.bias_steps is None else f"{seen.bias_steps:+.1e}",
        percent(loss.share(seen.zeros, row)),
        f"{seen.clipped:,}",
        f"{seen.underflow:,}",
        "" if seen.outside is None else f"{seen.outside:,}",
        "" if seen.scale_least is None else f"{seen.scale_least:.4g}",
        "" if seen.scale_most is None else f"{seen.scale_most:.4g}",
    )


def kept(found: Verification) -> list[tuple[str, list[Kept]]]:
    """Return the tensors that are not quantized by reason, the most frequent reason first."""
    reasons: dict[str, list[Kept]] = {}
    for one in found.kept:
        reasons.setdefault(one.reason or "nothing says why", []).append(one)
    return sorted(reasons.items(), key=lambda item: (-len(item[1]), item[0]))


def decibels(value: float) -> str:
    """Return an SQNR for people."""
    if math.isinf(value) and value > 0:
        return "no error"
    return f"{value:.2f} dB"


def percent(part: float | None) -> str:
    """Return a share in per cent with three digits, "" where it is not known."""
    if part is None:
        return ""
    digits = 2 if not math.isfinite(part) or part == 0 else 2 - math.floor(math.log10(100 * part))
    return f"{100 * part:.{min(max(digits, 0), 6)}f}%"


def short(count: int) -> str:
    """Return a number of bytes for people, in decimal units."""
    return size(count).partition(" (")[0]


def size(count: int) -> str:
    """Return a number of bytes for people, in decimal units, and to the byte."""
    for unit, one in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= one:
            return f"{count / one:.2f} {unit} ({count:,} bytes)"
    return f"{count:,} bytes"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


UNFIXED = "not fixed: "  # what begins what `--fix` had to leave


def fixed(found: Verification) -> list[str]:
    """Return what was put right, in words."""
    return [one for one in found.fixed if not one.startswith(UNFIXED)]


def unfixed(found: Verification) -> list[str]:
    """Return what could not be put right, and why."""
    return [one.removeprefix(UNFIXED) for one in found.fixed if one.startswith(UNFIXED)]


def beyond(found: Verification, shown: int) -> int:
    """Return how many of both there are beyond the first `shown` of each."""
    return sum(max(0, len(some) - shown) for some in (fixed(found), unfixed(found)))
