"""What may become of a weight: the schemes that a search chooses from, as rules of a recipe.

nvfp4        the scheme, with its first scale rule
nvfp4:mse    with another one; nvfp4_mse, as recipes have it, is the same
keep         the weight stays as it is
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lowbitcli import recipe as recipes
from lowbitcli.containers import container
from lowbitcli.errors import UsageError
from lowbitcli.recipe import Rule
from lowbitcli.recipe.document import Text
from lowbitcli.recipe.model import SUGAR
from lowbitcli.schemes import scheme
from lowbitcli.tensors import safe

KEEP = "keep"
USUAL = "nvfp4,mxfp8,fp8,keep"


@dataclass(frozen=True)
class Candidate:
    """One choice: `name` is how it was asked for, `rule` takes every weight."""

    name: str
    rule: Rule

    @property
    def keeps(self) -> bool:
        return self.rule.keep

    @property
    def weighs(self) -> bool:
        """Does it search scales in a way that can weigh columns?"""
        return not self.keeps and self.rule.scale in scheme(self.rule.scheme or "").weighs


def candidates(asked: str) -> tuple[Candidate, ...]:
    """Return the candidates of a list such as `nvfp4,mxfp8,keep`, each once, in order.

    Raises:
        UsageError: there is none, no scheme is called so, or it has no such scale rule.
    """
    found: dict[tuple[str | None, str], Candidate] = {}
    for one in _all(asked):
        found.setdefault(_numbers(one), one)
    if not found:
        raise UsageError("no scheme to choose from", hint=f"--schemes {USUAL}")
    return tuple(found.values())


def notes(asked: str) -> tuple[str, ...]:
    """Return what is to be said of a list: which of its words mean one candidate."""
    first: dict[tuple[str | None, str], Candidate] = {}
    again: dict[str, None] = {}
    for one in _all(asked):
        other = first.setdefault(_numbers(one), one)
        if other is one:
            continue
        what = "is there twice" if one.name == other.name else f"is {other.name}"
        if one.rule.activations != other.rule.activations:
            what += f" but for activations, which stay {other.rule.activations}"
        again[f"{one.name} {what}"] = None
    return (f"--schemes: {'; '.join(again)}; each is measured once",) if again else ()


def _all(asked: str) -> list[Candidate]:
    return [_candidate(word.strip()) for word in asked.split(",") if word.strip()]


def _numbers(one: Candidate) -> tuple[str | None, str]:
    """Return what decides the numbers that a candidate makes of a weight."""
    return one.rule.scheme, one.rule.scale


def usual(asked: str) -> str:
    """Return what is chosen from where nobody says it, in a container by name or `auto`: `USUAL`,
    or all schemes of a container that has none of these."""
    if asked == "auto":
        return USUAL
    held = container(asked).writes
    if any(one.rule.scheme in held for one in candidates(USUAL) if not one.keeps):
        return USUAL
    return ",".join([*held, KEEP])


def _candidate(word: str) -> Candidate:
    if word == KEEP:
        return Candidate(word, Rule.model_validate({"match": everything(), "keep": True}))
    name, colon, scale = word.partition(":")
    if name.lower() == KEEP:
        raise UsageError(f"{safe(word)} is no scheme", hint=f"{KEEP} leaves weights as they are")
    if colon and name in SUGAR:
        raise UsageError(f"{name} has its scale rule already", hint=f"--schemes {name}")
    if word in SUGAR:
        name, scale = SUGAR[word]
    chosen = scheme(name)
    if colon and scale not in chosen.rules:
        raise UsageError(
            f"{chosen.name} has no scale rule {scale!r}", hint=f"it has: {', '.join(chosen.rules)}"
        )
    usual = recipes.for_scheme(name).rules[0]
    said = {"match": everything(), "scheme": name, "activations": usual.activations}
    rule = Rule.model_validate({**said, "scale": scale or usual.scale})
    return Candidate(word, rule)


def everything() -> Text:
    """Return a pattern for every weight, of which none need be there."""
    text = Text("*")
    text.shipped = True
    return text


def told(found: Sequence[Candidate]) -> str:
    """Return the names of candidates as they are asked for."""
    return ",".join(one.name for one in found)


__all__ = ["KEEP", "USUAL", "Candidate", "candidates", "everything", "notes", "told", "usual"]
