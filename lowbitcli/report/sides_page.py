"""Two reports side by side as a page, as Markdown, or as JSON, by the suffix of the file."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from lowbitcli.report import sides
from lowbitcli.report.markdown import table
from lowbitcli.report.page import template
from lowbitcli.report.sides import Diff
from lowbitcli.report.write import check_path, put
from lowbitcli.verify.nouns import Problem

SHOWN = 400  # changes of a page; the JSON has all of them
PROBLEMS = 100  # of each side
BARS = 3.0  # dB; a change of this size or more has the strongest colour


def page(found: Diff) -> str:
    """Return a comparison as HTML."""
    shown = found.changes[:SHOWN]
    return template("sides.html.j2").render(
        summary=sides.summary(found),
        totals=sides.totals(found),
        head=sides.CHANGES_HEAD,
        rows=[(_tone(change.change), sides.row(change)) for change in shown],
        more=f"{len(found.changes) - len(shown):,}" if len(found.changes) > len(shown) else "",
        alone=[
            (name, problems[:PROBLEMS], max(0, len(problems) - PROBLEMS))
            for name, problems in (("A", found.problems_a), ("B", found.problems_b))
        ],
    )


def markdown(found: Diff) -> str:
    """Return a comparison as Markdown."""
    parts = [
        f"# lowbit report diff: {sides.summary(found)}",
        table(sides.TOTALS_HEAD, sides.totals(found)),
    ]
    if found.changes:
        rows = [sides.row(change) for change in found.changes[:SHOWN]]
        parts += ["## Tensors", table(sides.CHANGES_HEAD, rows)]
    if len(found.changes) > SHOWN:
        parts.append(f"and {len(found.changes) - SHOWN} more")
    for name, problems in (("A", found.problems_a), ("B", found.problems_b)):
        if problems:
            rows = map(_problem, problems[:PROBLEMS])
            head = ("", "kind", "tensor", "problem")
            parts += [f"## Problems of {name} alone", table(head, rows)]
    return "\n\n".join(parts) + "\n"


def _problem(one: Problem) -> tuple[str, ...]:
    return one.severity, one.kind, one.tensor, one.message


def _tone(change: float | None) -> str:
    """Return the class of a change: worse or better, and much or not."""
    if change is None or not abs(change) >= 0.005:
        return ""
    tone = "bad" if change < 0 else "good"
    return f"{tone} much" if abs(change) >= BARS else tone


SUFFIXES: Mapping[str, Callable[[Diff], str]] = {
    ".html": page,
    ".md": markdown,
    ".json": sides.text,
}


def write_diff(found: Diff, path: str | os.PathLike[str]) -> None:
    """Write a comparison to `path`, over one that is there.

    Raises:
        UsageError, OutputError: see `check_path`; OutputError also where writing fails.
    """
    path = Path(path)
    target = check_path(path)
    put(SUFFIXES[path.suffix.lower()](found), target)
