"""YAML of a recipe as plain values that know their place, `file:line:col`; nothing is trusted.

Only what a recipe needs is taken: one document of mappings, lists and scalars. Anchors, aliases,
tags, directives and duplicate keys are refused. ruamel.yaml 0.19 scans about 250 kB a second in the
worst case, so the limits below keep any input under a second.
"""

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)
from ruamel.yaml.reader import ReaderError

from lowbitcli.errors import RecipeError

MAX_BYTES = 128 * 1024
MAX_EVENTS = 5_000
MAX_DEPTH = 32

# The scalars of YAML 1.2's core schema that are not strings, but for octal and hexadecimal numbers.
_INTEGER = re.compile(r"[-+]?[0-9]{1,18}\Z")
_DECIMAL = re.compile(r"[-+]?(\.[0-9]+|[0-9]{1,18}(\.[0-9]*)?)([eE][-+]?[0-9]{1,3})?\Z")
_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}


class Text(str):
    """A string with its place; `shipped` where it comes from a file of this package."""

    where: str = ""
    shipped: bool = False


class Mapping(dict[str, Any]):
    """A mapping with its place; `places` are those of its values by key."""

    where: str = ""
    places: dict[str, str]


class Sequence(list[Any]):
    """A list with its place; `places` are those of its items."""

    where: str = ""
    places: list[str]


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return a hint with the known words nearest to `word`, or with all of them."""
    known = list(known)
    by_case: dict[str, str] = {}
    for name in known:
        by_case.setdefault(name.lower(), name)
    near = difflib.get_close_matches(word[:200].lower(), list(by_case), n=2, cutoff=0.6)
    if near:
        return f"did you mean {' or '.join(by_case[name] for name in near)}?"
    return otherwise or f"known: {', '.join(known)}"


def place_of(value: Any) -> str:
    """Return where a value stands, or "" where it does not come from a file."""
    return getattr(value, "where", "")


def place(value: Any, path: Iterable[int | str]) -> str:
    """Return where the value that `path` leads to stands, or its nearest parent in the file."""
    where = place_of(value)
    for step in path:
        if isinstance(value, Mapping) and step in value.places:
            where, value = value.places[str(step)], value.get(str(step))
        elif isinstance(value, Sequence) and isinstance(step, int) and step < len(value):
            where, value = value.places[step], value[step]
        else:
            break
    return where


def read(path: Path, shown: str) -> str:
    """Return the text of a recipe file; `shown` is what it is called in messages."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise RecipeError(
            f"cannot be read: {error.strerror or error}", where=f"{shown}:1:1"
        ) from error
    if len(data) > MAX_BYTES:
        raise RecipeError(
            f"a recipe has at most {MAX_BYTES // 1024} KiB",
            where=f"{shown}:1:1",
            hint="use patterns instead of listing names",
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        col = error.start - data.rfind(b"\n", 0, error.start)
        raise RecipeError("is not UTF-8 text", where=f"{shown}:{line}:{col}") from error


def parse(text: str, shown: str, *, shipped: bool = False) -> Any:
    """Return the document in `text`: Mapping, Sequence, Text, None, bool, int or float.

    Raises RecipeError where it is no YAML, or more than a recipe may use.
    """
    builder = _Builder(shown, shipped)
    try:
        for count, event in enumerate(YAML(typ="safe", pure=True).parse(text)):
            if count == MAX_EVENTS:
                raise builder.error(event, f"has more than {MAX_EVENTS} parts")
            builder.take(event)
    except RecipeError:
        raise
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = " ".join(str(error.problem or error.context or "malformed").split())
        hint = _QUOTE if str(error.context).startswith(_BEGUN) else ""
        hint = _SPACES if "'\\t'" in what else hint
        raise RecipeError(f"is not YAML: {what}", where=builder.at(mark), hint=hint) from error
    except ReaderError as error:
        before = text[: error.position]
        line, column = before.count("\n") + 1, error.position - before.rfind("\n")
        code = error.character if isinstance(error.character, int) else ord(error.character)
        message = f"is not YAML: the character U+{code:04X} cannot be in it"
        raise RecipeError(message, where=f"{shown}:{line}:{column}", hint=_ESCAPE) from error
    except (
        Exception
    ) as error:  # the scanner lets others through, such as ValueError for "\U00110000"
        raise RecipeError("is not YAML", where=builder.last) from error
    return builder.root


class _Builder:
    """Builds the document out of ruamel.yaml's events."""

    def __init__(self, shown: str, shipped: bool) -> None:
        self.shown, self.shipped = shown, shipped
        self.root: Any = None
        self.documents = 0
        self.last = f"{shown}:1:1"
        self.stack: list[Mapping | Sequence] = []
        self.keys: list[Text | None] = []

    def at(self, mark: Any) -> str:
        if self.shipped:
            return self.shown  # nobody who reads the message wrote that line
        return f"{self.shown}:{mark.line + 1}:{mark.column + 1}" if mark else self.last

    def error(self, event: Any, message: str, hint: str = "") -> RecipeError:
        return RecipeError(message, where=self.at(event.start_mark), hint=hint)

    def take(self, event: Any) -> None:
        self.last = self.at(event.start_mark)
        if isinstance(event, DocumentStartEvent):
            self.documents += 1
            if event.version or event.tags:
                raise self.error(event, "a recipe has no % directives")
            if self.documents > 1:
                raise self.error(event, "a recipe is one document", "remove the second ---")
        elif isinstance(event, AliasEvent) or getattr(event, "anchor", None):
            raise self.error(event, "a recipe has no anchors or aliases (& and *)", _QUOTE)
        elif getattr(event, "tag", None):
            raise self.error(event, "a recipe has no tags (!)", _QUOTE)
        elif isinstance(event, ScalarEvent):
            self.add(event, self.scalar(event))
        elif isinstance(event, MappingStartEvent | SequenceStartEvent):
            self.open(event)
        elif isinstance(event, MappingEndEvent | SequenceEndEvent):
            self.stack.pop()
            self.keys.pop()

    def open(self, event: Any) -> None:
        if len(self.stack) == MAX_DEPTH:
            raise self.error(event, f"is nested deeper than {MAX_DEPTH}")
        if isinstance(event, MappingStartEvent):
            value: Mapping | Sequence = Mapping()
            value.places = {}
        else:
            value = Sequence()
            value.places = []
        value.where = self.at(event.start_mark)
        self.add(event, value)
        self.stack.append(value)
        self.keys.append(None)

    def scalar(self, event: Any) -> Any:
        text = event.value
        if event.style is None:
            if text.lower() in _WORDS:
                return _WORDS[text.lower()]
            if _INTEGER.match(text):
                return int(text)
            if _DECIMAL.match(text):
                return float(text)
        value = Text(text)
        value.where, value.shipped = self.at(event.start_mark), self.shipped
        return value

    def add(self, event: Any, value: Any) -> None:
        where = self.at(event.start_mark)
        if not self.stack:
            self.root = value
            return
        parent, key = self.stack[-1], self.keys[-1]
        if isinstance(parent, Sequence):
            parent.append(value)
            parent.places.append(where)
        elif key is None:
            if not isinstance(value, Text):
                raise self.error(event, "a key is a word", 'put it in quotes: "..."')
            if value in parent:
                raise self.error(event, f"{str(value)!r} is there twice")
            self.keys[-1] = value
        else:
            parent[key] = value
            parent.places[key] = key.where if value is None else where
            self.keys[-1] = None


# What ruamel.yaml says that it was at where text begins with a sign of YAML's.
_BEGUN = ("while scanning an alias", "while scanning an anchor", "while parsing a tag")
_ESCAPE = 'write it as an escape in double quotes, such as "\\x07"'
_SPACES = "indent with spaces"
_QUOTE = 'put text that starts with *, & or ! in quotes: "*.weight"'
