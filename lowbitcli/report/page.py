"""A verification as one HTML page that needs nothing else: no script, no font, no image from
outside."""

import json
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from lowbitcli.report import bits, layers, loss, method, plots, words
from lowbitcli.tensors import safe
from lowbitcli.verify.nouns import Verification

PROBLEMS = 200  # that are listed
FIRST = 4  # kinds of them on the first screen
NAMES = 400  # of tensors that were kept, over all reasons
WEIGHTS = 200  # of the table of all figures


def page(found: Verification) -> str:
    """Return the whole report as HTML."""
    every = found.worst(WEIGHTS)
    number = len(loss.measured(found))
    parts: dict[str, Any] = {
        "problems": found.problems[:PROBLEMS],
        "fixed": words.fixed(found)[:PROBLEMS],
        "unfixed": words.unfixed(found)[:PROBLEMS],
        "maps": layers.maps(found),
        "errors": plots.errors(found),
        "scales": plots.scales(found),
        "budget": bits.budget(found),
        "worst": words.worst(found),
        "schemes": words.schemes(found),
        "kept": _kept(found),
    }
    return template("page.html.j2").render(
        title=words.title(found.target),
        verdict=words.verdict(found),
        tone=words.tone(found),
        scope=words.scope(found),
        tiles=words.tiles(found),
        first=words.kinds(found)[:FIRST],
        sections=_sections(parts),
        more=max(0, len(found.problems) - PROBLEMS),
        fixed_more=words.beyond(found, PROBLEMS),
        number=f"{number:,}",
        blocks=words.blocks(found),
        every_head=words.EVERY_HEAD,
        every=[words.figures(row) for row in every],
        every_more=number - len(every),
        checks=words.checks(found),
        facts=words.facts(found),
        recipe=_recipe(found),
        method=method.FIGURES,
        exact=method.EXACT,
        **parts,
    )


def _sections(parts: dict[str, Any]) -> list[tuple[str, str]]:
    named = (
        ("layers", "maps", "Layers and kinds"),
        ("errors", "errors", "Errors"),
        ("scales", "scales", "Scales"),
        ("budget", "budget", "Error against bits"),
        ("worst", "worst", "Largest errors"),
        ("sizes", "schemes", "Sizes"),
        ("kept", "kept", "Not quantized"),
    )
    there = [(id_, name) for id_, part, name in named if parts[part]]
    if parts["fixed"] or parts["unfixed"]:
        there.insert(0, ("fixed", "Put right"))
    return [("problems", "Problems"), *there, ("evidence", "Evidence")]


@cache
def template(name: str):
    """Return a template in which every value is text: escaped, with nothing invisible in it."""
    environment = Environment(
        loader=PackageLoader("lowbitcli", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: safe(value) if type(value) is str else value,
    )
    return environment.get_template(name)


def _kept(found: Verification) -> list[tuple[str, int, list[str]]]:
    """Return (reason, number, names) with no more than NAMES names in all."""
    left, rows = NAMES, []
    for reason, tensors in words.kept(found):
        names = [f"{one.name}  {one.dtype} {list(one.shape)}" for one in tensors[:left]]
        left -= len(names)
        rows.append((reason, len(tensors), names))
    return rows


def _recipe(found: Verification) -> list[str]:
    """Return what the checkpoint says of its recipe, line by line; the curve is drawn."""
    said = (found.manifest or {}).get("recipe")
    if isinstance(said, dict):
        said = {key: value for key, value in said.items() if key != "measured"}
    return json.dumps(said, indent=2, ensure_ascii=False).splitlines() if said else []
