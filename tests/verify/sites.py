"""Every place in the code where something is found wrong: a call of Problem, Found or Finding.

A site is called by its file, its function and what is found there: `structure.coverage:shape`, with
#2, #3 where a function finds the same kind several times. While sites are watched, it is known
which of them fired, and with which message.
"""

import ast
import importlib
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import lowbitcli

ROOT = Path(lowbitcli.__file__).parent
MAKERS = ("Problem", "Found", "Finding", "Difference", "Changed")
ROOMS = ("checkpoint", "verify", "plan", "containers")


class Site(NamedTuple):
    """A call, where it stands."""

    name: str
    module: str
    first: int
    last: int


@cache
def sites() -> tuple[Site, ...]:
    """Return every site, in the order of files and lines."""
    found = []
    for room in ROOMS:
        for path in sorted((ROOT / room).glob("*.py")):
            text = path.read_text()
            if any(f"{maker}(" in text for maker in MAKERS):
                found += _of_file(path, f"lowbitcli.{room}.{path.stem}")
    return tuple(found)


def _of_file(path: Path, module: str) -> Iterator[Site]:
    calls = []
    for node in ast.parse(path.read_text()).body:
        for inner in ast.walk(node):
            if isinstance(inner, ast.FunctionDef):
                calls += [(inner.name, call) for call in _calls(inner)]
    counts: Counter[str] = Counter()
    for function, call in sorted(calls, key=lambda one: one[1].lineno):
        first = call.args[0] if call.args else None
        is_kind = isinstance(first, ast.Constant) and call.func.id in ("Problem", "Finding")
        name = f"{path.stem}.{function}" + (f":{first.value}" if is_kind else "")
        counts[name] += 1
        number = f"#{counts[name]}" if counts[name] > 1 else ""
        yield Site(name + number, module, call.lineno, call.end_lineno or call.lineno)


def _calls(function: ast.FunctionDef) -> Iterator[ast.Call]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in MAKERS:
            yield node


@contextmanager
def watched() -> Iterator[list[tuple[str, str]]]:
    """Yield a list that (site, message) of all that is found is put into."""
    fired: list[tuple[str, str]] = []
    places = {(one.module, line): one.name for one in sites() for line in
              range(one.first, one.last + 1)}  # fmt: skip

    def watching(make, module):
        def made(*args, **options):
            found = make(*args, **options)
            line = sys._getframe(1).f_lineno
            fired.append((places[module, line], found.message))
            return found

        return made

    patches = []
    for name in dict.fromkeys(one.module for one in sites()):
        module = importlib.import_module(name)
        for maker in MAKERS:
            if hasattr(module, maker):
                patches.append(patch.object(module, maker, watching(getattr(module, maker), name)))
    for one in patches:
        one.start()
    try:
        yield fired
    finally:
        for one in patches:
            one.stop()
