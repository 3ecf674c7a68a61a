"""The JSON schema of recipe files, with which editors complete and check them as they are written.

What it takes is what `load` takes, but for what needs the checkpoint, other recipes, or the bounds
of expressions; `load` also takes null where a key of a rule is left empty.
"""

import itertools
import re
from typing import Any

from lowbitcli.containers import CONTAINERS
from lowbitcli.containers.inputs import LARGEST
from lowbitcli.containers.reading import CONSUMERS
from lowbitcli.containers.stacks import WORDS
from lowbitcli.recipe.defaults import load_defaults
from lowbitcli.recipe.model import ACTIVATIONS, AUTO, LEAST, MOST, SUGAR, Recipe
from lowbitcli.schemes import BY_NAME, SCHEMES

DIALECT = "https://json-schema.org/draft/2020-12/schema"

WHAT = {
    "description": "a line that says what it is",
    "extends": "another recipe, by name or file, whose rules come after these",
    "container": "how weights are stored, where the command line does not say it",
    "consumer": "who is to load the output, as in vllm or vllm@0.33: refused is what it cannot",
    "rules": "the first rule that takes a weight decides",
    "keep": "weights that stay as they are, besides the kinds that do by default",
    "ignore": "means keep",
    "exclude": "means keep",
    "defaults": "what becomes of kinds of tensors: keep or quantize",
    "quantize": "kinds that are kept by default and shall not be",
    "fuse": "weights that are served as one matrix, besides those that are known",
    "layout": "how stacks of experts and matrices lie in the source: pattern -> words",
    "thresholds": "what weights may lose, for lowbit verify --recipe",
    "kv_scale": "one scale for all keys and values of an FP8 cache",
    "fake": "store what the quantized weights decode to, unquantized, as --fake does",
    "nonfinite": "a weight with NaN or Inf: stop, or keep it as it is",
    "measured": "error against bits, by which lowbit recipe auto chose; it decides nothing",
}
WHAT_OF_RULES = {
    "match": "which weights: names, globs, or re: and an expression",
    "scheme": "what they become",
    "keep": "they stay as they are",
    "scale": "how scales are chosen",
    "activations": "what readers are told to do with activations",
    "activation_scale": "a constant for static activations, where no file has their amax",
    "exclude": "which of them are left to the next rules",
    "ignore": "means exclude",
}


def schema() -> dict[str, Any]:
    """Return the JSON schema of a recipe file."""
    result = Recipe.model_json_schema()
    kinds = [kind.name for kind in load_defaults().kinds]
    definitions, properties = result["$defs"], result["properties"]
    for name in ("Lie", "Consumer", "Pattern", "FuseGroup", "Rule"):
        definitions.pop(name, None)
    definitions["Pattern"] = {"type": "string", "minLength": 1, "maxLength": 512}
    definitions["Patterns"] = _one_or_more({"$ref": "#/$defs/Pattern"}, empty=True)
    definitions["Rule"] = _rule()
    definitions["Threshold"]["properties"]["match"] = _patterns(empty=False)
    definitions["Threshold"]["anyOf"] = [
        {"required": [key]} for key in ("fail_under_db", "max_rel_error")
    ]
    properties.pop("name")
    properties |= {
        "extends": {"type": "string", "minLength": 1},
        "container": {"enum": [AUTO, *(one.name for one in CONTAINERS)], "default": AUTO},
        "consumer": _one_or_more(
            {
                "type": "string",
                "pattern": f"^({'|'.join(map(re.escape, CONSUMERS))})(@v?[\\w.]+)?$",
            },
            empty=True,
        ),
        "rules": {"type": "array", "items": {"$ref": "#/$defs/Rule"}},
        "defaults": {
            "type": "object",
            "propertyNames": {"enum": kinds},
            "additionalProperties": {"enum": ["keep", "quantize"]},
        },
        "quantize": {"type": "array", "items": {"enum": kinds}},
        "fuse": {"type": "array", "items": _group()},
        "layout": _one_or_more(
            {
                "type": "object",
                "propertyNames": {"minLength": 1, "maxLength": 512},
                "additionalProperties": {"enum": list(WORDS)},
            }
        ),
        "kv_scale": _constant(),
    }
    properties |= {key: _patterns() for key in ("keep", "ignore", "exclude")}
    for key, what in WHAT.items():
        properties[key].pop("title", None)
        # A key without a value, whose list was commented out, says nothing.
        properties[key] = {"anyOf": [properties[key], {"type": "null"}], "description": what}
    result["anyOf"] = [
        {"required": ["extends"], "properties": {"extends": {"type": "string"}}},
        {"required": ["rules"], "properties": {"rules": {"type": "array", "minItems": 1}}},
    ]
    pairs = itertools.combinations(("keep", "ignore", "exclude"), 2)
    result["allOf"] = [_fake(), *({"not": _both(pair)} for pair in pairs)]
    return {"$schema": DIALECT, **result, "title": "Recipe of lowbit"}


def _rule() -> dict[str, Any]:
    """Return the schema of a rule: it has a scheme with what that takes, or keeps."""
    scales = {rule for scheme in SCHEMES for rule in scheme.rules}
    properties: dict[str, Any] = {
        "match": _patterns(empty=False),
        "scheme": {"enum": [*BY_NAME, *SUGAR]},
        "keep": {"type": "boolean", "default": False},
        "scale": {"enum": sorted(scales)},
        "activations": {"enum": list(ACTIVATIONS)},
        "activation_scale": _constant(),
        "exclude": _patterns(),
        "ignore": _patterns(),
    }
    for key, what in WHAT_OF_RULES.items():
        properties[key]["description"] = what
    kept = dict.fromkeys(("scheme", "scale", "activations", "activation_scale"), False)
    return {
        "type": "object",
        "properties": properties,
        "required": ["match"],
        "additionalProperties": False,
        "oneOf": [
            {"required": ["scheme"], "properties": {"keep": {"const": False}}},
            {"required": ["keep"], "properties": {"keep": {"const": True}, **kept}},
        ],
        "allOf": [*_scales(), _static()],
    }


def _both(pair: tuple[str, str]) -> dict[str, Any]:
    """Return what takes recipes that say something under both of two keys."""
    said = {key: {"not": {"type": "null"}} for key in pair}
    return {"required": list(pair), "properties": said}


def _fake() -> dict[str, Any]:
    """Return that what is fake stores no scales of activations."""
    rule = {"properties": {"activation_scale": False}}
    return {
        "if": {"properties": {"fake": {"const": True}}, "required": ["fake"]},
        "then": {"properties": {"kv_scale": False, "rules": {"items": rule}}},
    }


def _scales() -> list[dict[str, Any]]:
    """Return which scale rules go with which scheme."""
    return [
        {
            "if": {
                "properties": {"scheme": {"enum": [scheme.name, *scheme.aliases]}},
                "required": ["scheme"],
            },
            "then": {"properties": {"scale": {"enum": list(scheme.rules)}}},
        }
        for scheme in SCHEMES
    ] + [
        {
            "if": {"properties": {"scheme": {"const": word}}, "required": ["scheme"]},
            "then": {"properties": {"scale": {"const": rule}}},
        }
        for word, (_, rule) in SUGAR.items()
    ]


def _static() -> dict[str, Any]:
    """Return that only some schemes have static activations, and only those a constant."""
    names = [name for key in LARGEST for name in (key, *BY_NAME[key].aliases)]
    names += [word for word, (name, _) in SUGAR.items() if name in LARGEST]
    return {
        "if": {
            "properties": {"scheme": {"enum": names}, "activations": {"const": "static"}},
            "required": ["scheme"],
        },
        "else": {
            "properties": {"activation_scale": False, "activations": {"not": {"const": "static"}}}
        },
    }


def _group() -> dict[str, Any]:
    member = {"type": "string", "pattern": r"^[^{}]*\{\}\.[^{}]+$"}
    return {"type": "array", "items": member, "minItems": 2, "uniqueItems": True}


def _constant() -> dict[str, Any]:
    return {"type": "number", "minimum": LEAST, "maximum": MOST}


def _patterns(*, empty: bool = True) -> dict[str, Any]:
    if empty:
        return {"$ref": "#/$defs/Patterns"}
    return _one_or_more({"$ref": "#/$defs/Pattern"})


def _one_or_more(one: dict[str, Any], *, empty: bool = False) -> dict[str, Any]:
    several = {"type": "array", "items": one, **({} if empty else {"minItems": 1})}
    return {"anyOf": [one, several]}
