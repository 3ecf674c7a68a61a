"""Recipes: which weights get which scheme. YAML in, rules out.

The language is in `model`, the patterns over names in `patterns`.
"""

from lowbitcli.recipe.consumer import Consumer
from lowbitcli.recipe.defaults import FuseGroup, KeptKind
from lowbitcli.recipe.layout import Layouts
from lowbitcli.recipe.load import Shipped, for_scheme, init, load, names
from lowbitcli.recipe.matcher import Decision, Matcher
from lowbitcli.recipe.model import Recipe, Rule
from lowbitcli.recipe.patterns import Pattern
from lowbitcli.recipe.schema import schema

__all__ = [
    "Consumer",
    "Decision",
    "FuseGroup",
    "KeptKind",
    "Layouts",
    "Matcher",
    "Pattern",
    "Recipe",
    "Rule",
    "Shipped",
    "for_scheme",
    "init",
    "load",
    "names",
    "schema",
]
