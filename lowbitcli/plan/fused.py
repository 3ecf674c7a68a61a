"""Weights that are served as one matrix: they share a scale, are kept together, and have one scheme
or are refused."""

from collections.abc import Iterable, Mapping

from lowbitcli.errors import RecipeError
from lowbitcli.plan.nouns import Choice
from lowbitcli.plan.source import SourceWeight
from lowbitcli.recipe import Decision
from lowbitcli.recipe.layout import Layouts
from lowbitcli.tensors import safe


def all_grouped(choices: Mapping[str, Choice], groups: Mapping[str, str]) -> dict[str, Choice]:
    """Return the choices with the keys of those that share a scale; partners have one choice."""
    found = dict(choices)
    made: dict[str, tuple[Choice, Choice]] = {}
    for name, group in groups.items():
        choice = choices[name]
        one = made.get(group)
        if one is None or one[0] is not choice:
            one = made[group] = (choice, grouped(choice, group))
        found[name] = one[1]
    return found


def grouped(choice: Choice, group: str) -> Choice:
    """Return the choice with the key of those it shares a scale with, if its scheme shares any."""
    if choice.target is None or not choice.target.shares or not group:
        return choice
    key = f"{group}|{choice.target.name}|{choice.rule}"
    return choice._replace(group=key)


def keep_whole_groups(
    choices: dict[str, Choice],
    groups: Mapping[str, str],
    weights: Mapping[str, SourceWeight],
    non_finite: Iterable[str],
) -> None:
    """Keep the partners of a weight that is kept for NaN or Inf: fused weights go together."""
    because = {groups[name]: name for name in non_finite if name in groups}
    for name, group in groups.items():
        if group in because and name != because[group] and choices[name].target is not None:
            reason = f"{safe(because[group])}, which it is fused with, holds NaN or Inf"
            choices[name] = Choice.to_keep(weights[name].scheme, reason)


def refuse_split(
    choices: Mapping[str, Choice],
    groups: Mapping[str, str],
    weights: Mapping[str, SourceWeight],
    decisions: Mapping[str, Decision],
    layouts: Layouts,
) -> None:
    """Raise RecipeError for a fused group whose members get different schemes; where some of them
    lie otherwise, it is the layout that says so that is blamed."""
    stored = any(weight.scheme is not None for weight in weights.values())
    first: dict[str, Choice] = {}
    unlike: set[str] = set()
    for name, group in groups.items():
        if first.setdefault(group, choices[name]) is not choices[name] or stored:
            unlike.add(group)
    members: dict[str, list[str]] = {}
    for name, group in groups.items() if unlike else ():
        if group in unlike:
            members.setdefault(group, []).append(name)
    for names in members.values():
        if len({_kind(choices[name], weights[name]) for name in names}) < 2:
            continue
        kinds = {name: _kind(choices[name], weights[name]) for name in sorted(names)}
        told = ", ".join(
            f"{safe(name)}: {kind}{_why(choices[name])}" for name, kind in kinds.items()
        )
        hint = "serving programs fuse these and need one scheme; "
        hint += "--allow-split-groups writes it all the same"
        where = next((decisions[name].where for name in names if decisions[name].where), "")
        if len({layouts.of(name) for name in names}) > 1:
            where = next(filter(None, map(layouts.where, names)), where)
            hint = f"the layout takes some of these, and not the others; {hint}"
        raise RecipeError(f"the recipe splits a fused group ({told})", where=where, hint=hint)


def _why(choice: Choice) -> str:
    return f", {safe(choice.kept)}" if choice.target is None and choice.kept else ""


def _kind(choice: Choice, weight: SourceWeight) -> str:
    if choice.target is None:
        return "kept"
    if choice.target == weight.scheme and choice.target.shares:
        return f"{choice.target.name} as it is stored"  # with a scale that partners cannot take on
    return choice.target.name if choice.rule == "amax" else f"{choice.target.name} {choice.rule}"
