"""A verification in words and numbers for people, the same for every kind of report."""

import math

from lowbitcli.verify.nouns import Kept, Verification, WeightRow

WORST_HEAD = ("tensor", "scheme", "relative", "SQNR", "largest", "clipped", "lost", "outside")


def verdict(found: Verification) -> str:
    """Return the result in a few words."""
    text = "passed" if found.passed else f"{_count(len(found.failures), 'problem')} found"
    return f"{text}, {_count(len(found.warnings), 'warning')}" if found.warnings else text


def facts(found: Verification) -> list[tuple[str, str]]:
    """Return what was looked at, how large it is, and with what it was done."""
    summary = found.summary
    rows = [("checkpoint", found.target), ("container", found.container or "unknown")]
    rows.append(("source", found.source or "none was named: numbers were not compared"))
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


def worst(found: Verification) -> list[tuple[str, ...]]:
    """Return the weights with the largest errors, columns as in WORST_HEAD."""
    return [_numbers(row) for row in found.worst()]


def _numbers(row: WeightRow) -> tuple[str, ...]:
    figures = row.figures
    if figures is None:
        return (row.name, row.scheme, "", "", "", "", "", "")
    return (
        row.name,
        row.scheme or row.how,
        f"{figures.relative:.5f}",
        decibels(figures.sqnr_db),
        f"{figures.largest:.4g}",
        f"{figures.clipped:,}",
        f"{figures.underflow:,}",
        "" if figures.outside is None else f"{figures.outside:,}",
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


def size(count: int) -> str:
    """Return a number of bytes for people, in decimal units, and to the byte."""
    for unit, one in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= one:
            return f"{count / one:.2f} {unit} ({count:,} bytes)"
    return f"{count:,} bytes"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
