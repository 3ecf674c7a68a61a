"""A verification as Markdown, for a pull request or a model card."""

from collections.abc import Iterable, Sequence

from lowbitcli.report import bits, layers, words
from lowbitcli.tensors import safe
from lowbitcli.verify.nouns import Verification

SHOWN = 200  # problems that are listed
_SPECIAL = str.maketrans({c: f"\\{c}" for c in "\\`*_{}[]<>()#+!|~&"})


def markdown(found: Verification) -> str:
    """Return the whole report as Markdown."""
    tiles = [(tile.label, tile.value, ", ".join(tile.notes)) for tile in words.tiles(found)]
    text = [
        f"# lowbit verify: {words.verdict(found)}",
        table(("", "", ""), [("Checked", words.title(found.target), words.scope(found)), *tiles]),
        "## Problems",
        _problems(found),
    ]
    if found.fixed:
        rows = [("yes", one) for one in words.fixed(found)[:SHOWN]]
        rows += [("no", one) for one in words.unfixed(found)[:SHOWN]]
        text += ["## Put right", table(("done", "by --fix, before it was checked"), rows)]
        more = words.beyond(found, SHOWN)
        text += [f"and {more} more"] if more else []
    maps = layers.maps(found)
    for one in maps.maps if maps is not None else ():
        text += _map(one)
    if (chosen := bits.budget(found)) is not None:
        text += ["## Error against bits", table(("bits", "dB", "of what"), chosen.rows)]
    if rows := words.worst(found):
        text += ["## Largest errors", table(("tensor", "scheme", "SQNR", "relative", "why"), rows)]
    if rows := words.blocks(found):
        head = ("tensor", "where", "of the mean", "relative", "largest")
        text += ["### Blocks that stand out", table(head, rows)]
    if rows := words.schemes(found):
        text += ["## Sizes", table(("scheme", "tensors", "size"), rows)]
    if reasons := words.kept(found):
        rows = [(reason, f"{len(names):,}") for reason, names in reasons]
        text += ["## Not quantized", table(("because", "tensors"), rows)]
    text += ["## Checks", table(("check", "number", "result"), words.checks(found))]
    text += ["## Evidence", table(("", ""), words.facts(found))]
    return "\n\n".join(text) + "\n"


def _map(one: layers.Map) -> list[str]:
    """Return the map of a stack: SQNR in dB by layer and kind."""
    if not one.rows:
        return []
    rows = [
        (label, *("" if cell is None else cell.text for cell in cells), total)
        for label, cells, total in one.rows
    ]
    stack = one.stack or "outside of layers"
    head = (stack, *one.kinds, "all")
    text = [f"## SQNR in dB: {_cell(stack)}", table(head, [*rows, ("all", *one.totals, "")])]
    if one.left_out or one.kinds_left_out:
        text.append(f"{one.left_out} better layers and {one.kinds_left_out} kinds are not shown.")
    return text


def _problems(found: Verification) -> str:
    if not found.problems:
        return "None."
    rows = [(p.severity, p.kind, p.tensor, p.message, p.file) for p in found.problems[:SHOWN]]
    shown = table(("", "kind", "tensor", "problem", "file"), rows)
    more = len(found.problems) - SHOWN
    return f"{shown}\n\nand {more} more" if more > 0 else shown


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose cells are text, whatever they hold."""
    lines = [map(_cell, head), ["---"] * len(head), *(map(_cell, row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    """Return text that no Markdown reader takes for anything but text."""
    return safe(text).translate(_SPECIAL)
