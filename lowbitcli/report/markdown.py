"""A verification as Markdown, for a pull request or a model card."""

from collections.abc import Iterable, Sequence

from lowbitcli.report import words
from lowbitcli.tensors import safe
from lowbitcli.verify.nouns import Verification

SHOWN = 200  # problems that are listed
_SPECIAL = str.maketrans({c: f"\\{c}" for c in "\\`*_{}[]<>()#+!|~&"})


def markdown(found: Verification) -> str:
    """Return the whole report as Markdown."""
    blocks = [
        f"# lowbit verify: {words.verdict(found)}",
        _table(("", ""), words.facts(found)),
        "## Problems",
        _problems(found),
        "## Checks",
        _table(("check", "number", "result"), words.checks(found)),
    ]
    if rows := words.schemes(found):
        blocks += ["## Sizes", _table(("scheme", "tensors", "size"), rows)]
    if rows := words.worst(found):
        blocks += ["## Largest errors", _table(words.WORST_HEAD, rows)]
    if reasons := words.kept(found):
        rows = [(reason, str(len(names))) for reason, names in reasons]
        blocks += ["## Not quantized", _table(("because", "tensors"), rows)]
    return "\n\n".join(blocks) + "\n"


def _problems(found: Verification) -> str:
    if not found.problems:
        return "None."
    rows = [(p.severity, p.kind, p.tensor, p.message, p.file) for p in found.problems[:SHOWN]]
    table = _table(("", "kind", "tensor", "problem", "file"), rows)
    more = len(found.problems) - SHOWN
    return f"{table}\n\nand {more} more" if more > 0 else table


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([_cell(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    """Return text that no Markdown reader takes for anything but text."""
    return safe(text).translate(_SPECIAL)
