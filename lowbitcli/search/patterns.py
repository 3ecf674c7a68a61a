r"""From names to few patterns that take these names and no others.

    model.layers.0.mlp.up_proj.weight     module: without `.weight`; numbers between dots are slots
    skeleton  model.layers.#.mlp.up_proj  the module without them
    deciding  slots by which the label differs; the others may hold any number

| the label of a skeleton depends on | pattern |
|---|---|
| no slot | `model.layers.*.mlp.up_proj`, where that takes nothing else, else as below |
| some | `re:model\.layers\.(0|7|29)\.mlp\.(up_proj|gate_proj)$` |

Expressions with the same beginning and the same numbers are one; those that are longer than a
recipe takes are cut.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from lowbitcli.recipe.patterns import Pattern
from lowbitcli.regex import compile_bounded

_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")
_ANY = "[0-9]+"
_FEW = "[0-9]{1,9}"  # takes less time, where there are many of them
SLOT = "#"

Numbers = tuple[str, ...]
Key = tuple[str, tuple[str, ...]]  # an expression's beginning, and its alternatives


def natural(name: str) -> list[tuple[int, int, str]]:
    """Return what to sort names by, so that layer 9 comes before layer 10."""
    pieces = re.split(r"([0-9]+)", name)
    return [(1, int(one), one) if n % 2 else (0, 0, one) for n, one in enumerate(pieces)]


def skeleton_of(name: str) -> tuple[str, Numbers]:
    """Return the module of a name with its numbers taken out, and these."""
    module = name.removesuffix(".weight")
    return _NUMBER.sub(SLOT, module), tuple(_NUMBER.findall(module))


def patterns(labels: Mapping[str, str], others: Iterable[str] = ()) -> dict[str, list[str]]:
    """Return patterns for the names of each label: together they take them and none of `others`,
    the names that have no label.

    Names that no pattern can tell from another's stand for themselves.
    """
    found: dict[str, list[str]] = {label: [] for label in dict.fromkeys(labels.values())}
    said: dict[str, dict[Key, list[str]]] = {label: {} for label in found}
    every = [*labels, *others]
    for skeleton, members in _skeletons(labels, every).items():
        slots = _deciding(members)
        for label in dict.fromkeys(one for one in members.values() if one is not None):
            numbers = [one for one, of in members.items() if of == label]
            glob = skeleton.replace(SLOT, "*")
            if SLOT in skeleton and not slots and _is_exact(glob, label, labels, every):
                found[label].append(glob)
            elif SLOT not in skeleton:
                found[label].append(_literal(skeleton))
            else:
                head, middles, tail = _pieces(skeleton, numbers, slots)
                said[label].setdefault((head, middles), []).append(tail)
    for label, pieces in said.items():
        for (head, middles), tails in pieces.items():
            found[label] += _expressions(head, middles, tails)
    return found


def _skeletons(
    labels: Mapping[str, str], names: Iterable[str]
) -> dict[str, dict[Numbers, str | None]]:
    """Return skeleton -> numbers -> label of all names whose skeleton is that of one with a label,
    in natural order."""
    wanted = {skeleton_of(name)[0] for name in labels}
    found: dict[str, dict[Numbers, str | None]] = {}
    for name in sorted(names, key=natural):
        skeleton, numbers = skeleton_of(name)
        if skeleton in wanted:
            found.setdefault(skeleton, {})[numbers] = labels.get(name)
    return found


def _deciding(members: Mapping[Numbers, str | None]) -> list[int]:
    """Return the slots that the label depends on; the last ones, experts mostly, are tried first
    for whether it does without."""
    slots = list(range(len(next(iter(members)))))
    for slot in reversed(tuple(slots)):
        fewer = [one for one in slots if one != slot]
        seen: dict[Numbers, str | None] = {}
        if all(
            seen.setdefault(tuple(numbers[n] for n in fewer), label) == label
            for numbers, label in members.items()
        ):
            slots = fewer
    return slots


def _pieces(
    skeleton: str, numbers: Sequence[Numbers], slots: Sequence[int]
) -> tuple[str, tuple[str, ...], str]:
    """Return an expression as what it begins with, alternatives, and what it ends with."""
    texts = [re.escape(one) for one in skeleton.split(SLOT)]
    if not slots:
        slots = [0]
        numbers = [(_ANY,) * (len(texts) - 1)]
    first, last = slots[0], slots[-1]
    middles = {}
    for one in numbers:
        pieces = [one[first]]
        for slot in range(first + 1, last + 1):
            pieces += [texts[slot], one[slot] if slot in slots else _ANY]
        middles["".join(pieces)] = None
    return _ANY.join(texts[: first + 1]), tuple(middles), _ANY.join(texts[last + 1 :])


def _expressions(head: str, middles: Sequence[str], tails: Sequence[str]) -> list[str]:
    """Return expressions for every middle with every tail, as few as a recipe takes."""
    text = f"{head}{_one_of(middles)}{_common(tails)}$"
    try:
        compile_bounded(text)
        return [f"re:{text}"]
    except ValueError:
        if len(middles) == len(tails) == 1:
            return [f"re:{text.replace(_ANY, _FEW)}"]
    if len(tails) > 1:
        half = len(tails) // 2
        halves = [(middles, tails[:half]), (middles, tails[half:])]
    else:
        half = len(middles) // 2
        halves = [(middles[:half], tails), (middles[half:], tails)]
    return [one for some, of in halves for one in _expressions(head, some, of)]


def _one_of(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else f"({'|'.join(texts)})"


def _common(tails: Sequence[str]) -> str:
    """Return alternatives with what all of them begin with, up to a dot, in front."""
    if len(tails) == 1:
        return tails[0]
    parts = [tail.split(r"\.") for tail in tails]
    same = 0
    while all(len(one) > same + 1 and one[same] == parts[0][same] for one in parts):
        same += 1
    front = "".join(rf"{one}\." for one in parts[0][:same])
    return front + _one_of([r"\.".join(one[same:]) for one in parts])


def _is_exact(text: str, label: str, labels: Mapping[str, str], every: Collection[str]) -> bool:
    """Does a glob take only names of a label?"""
    if text.startswith("re:") or any(char in text for char in "?["):
        return False
    compiled = re.compile(Pattern.model_validate(text).source([0]), re.DOTALL)
    return all(labels.get(name) == label for name in every if compiled.match(name))


def _literal(module: str) -> str:
    """Return a pattern that takes one module; that of `.weight` has no name."""
    module = module or ".weight"
    if module.startswith("re:") or any(char in module for char in "*?["):
        return f"re:{re.escape(module)}$"
    return module


__all__ = ["natural", "patterns", "skeleton_of"]
