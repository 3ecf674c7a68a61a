"""Reads recipes: by name from those that ship with lowbit, or from a file."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from lowbitcli.errors import RecipeError
from lowbitcli.recipe import document, shelf
from lowbitcli.recipe.document import Mapping, Text, did_you_mean, place
from lowbitcli.recipe.model import AUTO, SUGAR, Recipe, Rule
from lowbitcli.schemes import SCHEMES, scheme

MAX_EXTENDS = 8


@dataclass(frozen=True)
class Shipped:
    """A recipe that ships with lowbit."""

    name: str
    description: str


def load(name_or_path: str) -> Recipe:
    """Return the shipped recipe of this name, or the one in this file.

    Raises RecipeError, with file:line:col, where it cannot be used.
    """
    return _load(name_or_path, "", Path(), ())


def for_scheme(
    scheme_name: str,
    scale: str | None = None,
    activations: str | None = None,
    container: str | None = None,
) -> Recipe:
    """Return what `--scheme` means: the shipped recipe of that scheme, or one rule.

    Raises UsageError where no such scheme is known, RecipeError where it does not take the options.
    """
    chosen = scheme(SUGAR[scheme_name][0] if scheme_name in SUGAR else scheme_name)
    shelved = shelf.recipes()
    name = next((n for n in (chosen.name, *chosen.aliases) if n in shelved), "")
    recipe = load(name) if name else Recipe(name=chosen.name)
    options = {"scale": scale, "activations": activations}
    said = {key: value for key, value in options.items() if value is not None}
    if not name or said or scheme_name in SUGAR or scheme_name.upper().endswith("A16"):
        rule = Rule.model_validate({"match": _everything(), "scheme": scheme_name, **said})
        recipe = recipe.model_copy(update={"rules": (rule,)})
    if container is not None:
        Recipe.model_validate({"container": container})
        recipe = recipe.model_copy(update={"container": container})
    return recipe


def names() -> list[Shipped]:
    """Return the recipes that ship with lowbit, each with a line that says what it is."""
    return [Shipped(name, load(name).description) for name in shelf.recipes()]


def init(model_names: Iterable[str] = ()) -> str:
    """Return the text of a recipe to start from."""
    count = len(list(model_names))
    known = ", ".join(one.name for one in SCHEMES)
    seen = f"# Written for a checkpoint of {count} tensors.\n" if count else ""
    return _STARTER.format(seen=seen, schemes=known)


def _everything() -> Text:
    text = Text("*")
    text.shipped = True
    return text


def _load(name_or_path: str, where: str, beside: Path, chain: tuple[str, ...]) -> Recipe:
    if len(chain) == MAX_EXTENDS:
        raise RecipeError(f"recipes extend each other more than {MAX_EXTENDS} times", where=where)
    path, shown, shipped = _find(name_or_path, where, beside)
    if str(path.resolve()) in chain:
        raise RecipeError(f"{name_or_path!r} extends itself", where=where)
    chain = (*chain, str(path.resolve()))
    data = document.parse(document.read(path, shown), shown, shipped=shipped)
    if not isinstance(data, Mapping):
        raise RecipeError("a recipe is a mapping", where=f"{shown}:1:1", hint=_EXAMPLE)
    base = data.pop("extends", None)
    recipe = _validated(data).model_copy(update={"name": path.stem})
    if base is not None:
        place_of_base = place(data, ["extends"])
        if not isinstance(base, str):
            raise RecipeError("extends names a recipe or a file", where=place_of_base)
        base_where = getattr(base, "where", place_of_base)
        recipe = recipe.over(_load(base, base_where, path.parent, chain))
    if not recipe.rules:
        raise RecipeError("a recipe needs rules, or extends", where=f"{shown}:1:1", hint=_EXAMPLE)
    return recipe


def _find(name: str, where: str, beside: Path) -> tuple[Path, str, bool]:
    shelved = shelf.recipes()
    if name in shelved:
        return shelved[name], f"recipe {name} (built in)", True
    path = beside / name
    is_path = name.endswith((".yaml", ".yml")) or "/" in name or os.sep in name
    try:
        exists = path.is_file()
    except (OSError, ValueError):
        exists = False
    if exists or (is_path and "\0" not in name and not _is_directory(path)):
        return path, str(path), False
    if _is_directory(path):
        message = f"{name!r} is a directory, and no recipe"
        hint = "" if where else "a recipe is named first, then a checkpoint"
        raise RecipeError(message, where=where, hint=hint)
    raise RecipeError(
        f"no recipe is called {name!r}", where=where, hint=did_you_mean(name, shelved)
    )


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _validated(data: Mapping) -> Recipe:
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = [part for part in first["loc"] if part != "[key]"]
        words = ".".join(str(part) for part in path)
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] in _WORDS:
            message = _WORDS[first["type"]].format(**first.get("ctx", {}))
        where = place(data, path)
        raise RecipeError(f"{words}: {message}", where=where) from error


# What pydantic calls wrong, in the words of someone who writes YAML.
_WORDS = {
    "bool_type": "is true or false",
    "dict_type": "is a mapping",
    "float_type": "is a number",
    "greater_than": "is more than {gt}",
    "greater_than_equal": "is {ge} or more",
    "less_than": "is less than {lt}",
    "less_than_equal": "is {le} or less",
    "literal_error": "is {expected}",
    "missing": "is missing",
    "model_type": "is a mapping",
    "string_type": "is text",
    "too_short": "has at least one item",
    "tuple_type": "is a list",
}

_EXAMPLE = 'the shortest recipe is: rules: [{match: "*", scheme: nvfp4}]'

_STARTER = """\
# A recipe for `lowbit quantize SRC --recipe FILE`.
{seen}description: my recipe

# The first rule that matches a weight wins. Schemes: {schemes}.
rules:
  - match: "*"            # a glob, a list of them, or "re:" and a regular expression
    scheme: nvfp4
    # exclude: ["*.layers.0.*"]   # what this rule leaves to the next

# Weights that stay as they are, besides embeddings, heads, norms, routers and the like.
# keep: ["*.o_proj.weight"]

# Kinds that are kept by default and shall not be:
# quantize: [heads]

# Who is to load it; what that would not is refused:
# consumer: vllm

# How stacks of experts lie, where the model's type does not say it:
# layout: {{"*.experts.gate_up_proj": in_out interleaved, "*.experts.down_proj": in_out}}
"""

__all__ = ["AUTO", "Shipped", "for_scheme", "init", "load", "names"]
