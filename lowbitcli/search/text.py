"""The text of a recipe that a search makes: rules, and what was measured as comments.

Nothing in it depends on how it was measured: not on threads, memory, device or time.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence

from lowbitcli import __version__
from lowbitcli.search.candidates import Candidate, told
from lowbitcli.search.knapsack import Solution
from lowbitcli.search.nouns import Found, Point, Score
from lowbitcli.search.patterns import patterns
from lowbitcli.tensors import safe

MEASURED = 64 << 10  # bytes of comments on single units, at most: recipes have a largest size
CURVE = 13  # places of the curve in a table
PLACES = 41  # of the curve that are written down for reports


def text(found: Found, solution: Solution, names: Sequence[str], others: Iterable[str]) -> str:
    """Return a recipe that gives each unit the candidate of its name, and takes none of
    `others`."""
    labels = {
        recipe_name(member, found): name
        for score, name in zip(found.scores, names, strict=True)
        for member in score.members
    }
    rules = patterns(labels, others)
    lines = [*_head(found, solution), "", f"description: {json.dumps(_description(found))}"]
    lines += [f"container: {found.wanted.container}", "rules:"]
    for candidate in found.candidates:
        if candidate.name in rules:
            lines += _rule(found, candidate, names, rules[candidate.name])
    lines += ["", *_places(found, solution)]
    return "\n".join([*lines, "", *_measured(found, names)]) + "\n"


def _places(found: Found, solution: Solution) -> list[str]:
    """Return `measured`: the curve, what one scheme for all comes to, and what was chosen; without
    places where nothing is lost, which no curve of dB has."""
    curve = thinned([one for one in found.curve if one.error > 0] or found.curve[:1], PLACES)
    uniform = {name: _place(found, x.cost, x.error) for name, x in found.uniform.items() if x.error}
    chosen = _place(found, solution.cost, solution.error) if solution.error > 0 else None
    return [
        "measured:",
        f"  curve: {json.dumps([_place(found, x.cost, x.error) for x in curve if x.error > 0])}",
        f"  uniform: {json.dumps(uniform)}",
        *([f"  chosen: {json.dumps(chosen)}"] if chosen is not None else []),
    ]


def _place(found: Found, cost: int, error: float) -> tuple[float, float]:
    return round(found.bits(cost), 4), round(found.db(error), 3)


def recipe_name(member: str, found: Found) -> str:
    """Return what a pattern is tried on: of a pipeline without the component, as patterns without
    a slash are for its denoisers."""
    return member.partition("/")[2] if found.is_pipeline else member


def _description(found: Found) -> str:
    wanted = found.wanted
    what = f"{wanted.bits:g} bits per weight" if wanted.bits is not None else f"{wanted.size} bytes"
    return f"{what}, chosen by the measured error of {safe(found.source)}"


def _head(found: Found, solution: Solution) -> list[str]:
    wanted, bits = found.wanted, found.bits(solution.cost)
    budget = f"{wanted.bits:g} bits" if wanted.bits is not None else f"{wanted.size} bytes in all"
    floor = "" if wanted.floor_db is None else f", every weight {wanted.floor_db:g} dB or more"
    gap = "the least there is" if solution.gap == 0 else (
        f"at most {percent(solution.gap)} above the least there is"
    )  # fmt: skip
    squares = "sum h (V - W)^2 / sum h W^2" if found.importance else "|V - W|^2 / |W|^2"
    lines = [
        f"Made by lowbit {__version__}: lowbit recipe auto {safe(found.source)}",
        "",
        f"budget   {budget}{floor}; schemes {told(found.candidates)}",
        f"reached  {bits:.4f} bits for each of {found.elements} weights, scales counted",
        f"error    {solution.error:.6g} = sum of {squares} over {found.matrices} matrices: "
        f"{told_db(found.db(solution.error))}",
        *(f"without  {name}: {safe(why)}" for name, why in found.left_out.items()),
        *([f"weighed  h by {safe(found.importance)}"] if found.importance else []),
        f"gap      {gap}",
        f"numbers  sha256 {found.digest}",
        "",
        *table(found, CURVE),
    ]
    return [f"# {line}".rstrip() for line in lines]


def table(found: Found, number: int) -> list[str]:
    """Return about so many places of the curve as a table, and the uniform schemes as another."""
    names = [one.name for one in found.candidates]
    rows = [("bits", "dB", *(f"{name} %" for name in names))]
    rows += [_row(found, one, names) for one in thinned(found.curve, number)]
    alone = [(*_row(found, one, ()), f"all {name}") for name, one in found.uniform.items()]
    return [*aligned(rows), "", *aligned(alone)]


def thinned(curve: Sequence[Point], number: int) -> list[Point]:
    """Return about `number` places of a curve, evenly, both ends among them."""
    last = len(curve) - 1
    places = [round(last * n / (number - 1)) for n in range(number)] if last else [0]
    return [curve[n] for n in dict.fromkeys(places)]


def _row(found: Found, one: Point, names: Sequence[str]) -> tuple[str, ...]:
    shares = [100 * one.elements.get(name, 0) / found.elements for name in names]
    return (f"{found.bits(one.cost):.3f}", _db(found.db(one.error)), *(f"{x:.0f}" for x in shares))


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of as many cells each as lines, columns to the right."""
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(x.rjust(n) for x, n in zip(row, wide, strict=True)) for row in rows]


def _rule(
    found: Found, candidate: Candidate, names: Sequence[str], match: Sequence[str]
) -> list[str]:
    mine = [s for s, name in zip(found.scores, names, strict=True) if name == candidate.name]
    share = sum(score.elements for score in mine) / found.elements
    what = f"{len(mine)} of {len(names)} units, {share:.1%} of the weights"
    worst = min(score.choices[candidate.name].least_db for score in mine)
    if math.isfinite(worst):
        what += f"; the worst weight has {worst:.2f} dB"
    lines = [f"  # {what}", "  - match:", *(f"      - {quoted(one)}" for one in match)]
    rule = candidate.rule
    if candidate.keeps:
        return [*lines, "    keep: true"]
    lines.append(f"    scheme: {rule.scheme}")
    return [*lines, f"    scale: {rule.scale}", f"    activations: {rule.activations}"]


def _measured(found: Found, names: Sequence[str]) -> list[str]:
    """Return what each candidate would have lost of each unit, as comments."""
    columns = [one.name for one in found.candidates if not one.keeps]
    rows = [("chosen", *columns, "unit")]
    for score, name in zip(found.scores, names, strict=True):
        rows.append((name, *(_measure(score, one) for one in columns), safe(score.name)))
    wide = [max(len(row[n]) for row in rows) for n in range(len(columns) + 1)]
    lines = ["# The SQNR of the worst weight of each unit, in dB; - where it is no choice."]
    size = 0
    for number, row in enumerate(rows):
        cells = [cell.rjust(width) for cell, width in zip(row, wide, strict=False)]
        line = "  ".join(["#", *cells, row[-1]])
        size += len(line.encode(errors="replace")) + 1
        if size > MEASURED:
            return [*lines, f"# and {len(rows) - number} more"]
        lines.append(line)
    return lines


def _measure(score: Score, name: str) -> str:
    choice = score.choices.get(name) or score.below.get(name)
    if choice is None:
        return "-"
    return f"{_db(choice.least_db)}{'' if name in score.choices else ' (low)'}"


def told_db(value: float) -> str:
    """Return decibels with their unit, or that nothing is lost."""
    return f"{value:.2f} dB" if math.isfinite(value) else "exact"


def _db(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "exact"


def percent(gap: float) -> str:
    """Return a ratio as a percentage of two digits."""
    return f"{100 * gap:.2g} %"


def quoted(pattern: str) -> str:
    """Return a pattern as YAML has it: between single quotes, or where there is more than printed
    ASCII in it, with escapes between double ones."""
    if pattern.isascii() and pattern.isprintable():
        return "'" + pattern.replace("'", "''") + "'"
    return json.dumps(pattern)


def shares(found: Found, elements: Mapping[str, int]) -> str:
    """Return of how much of the weights each candidate is the choice: `nvfp4 81 %, mxfp8 19 %`."""
    return ", ".join(
        f"{one.name} {100 * elements[one.name] / found.elements:.0f} %"
        for one in found.candidates
        if elements.get(one.name)
    )


__all__ = [
    "aligned", "percent", "quoted", "recipe_name", "shares", "table", "text", "thinned", "told_db",
]  # fmt: skip
