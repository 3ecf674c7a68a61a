"""The floors of docs/adr/0001: imports go down only, and what else the code itself can tell.

`violations(root)` is a function over a tree, so that a tree with a planted fault can be shown to
it too.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

FLOORS = {
    "lowbit_kernels": 0,
    "lowbitcli": 0,  # the package's own __init__: the version, nothing else
    "lowbitcli.errors": 1,
    "lowbitcli.regex": 1,
    "lowbitcli.tensors": 1,
    "lowbitcli.schemes": 2,
    "lowbitcli.checkpoint": 2,
    "lowbitcli.containers": 3,
    "lowbitcli.recipe": 4,
    "lowbitcli.plan": 5,
    "lowbitcli.pipeline": 6,
    "lowbitcli.verify": 7,
    "lowbitcli.search": 7,
    "lowbitcli.importance": 7,
    "lowbitcli.doctor": 7,
    "lowbitcli.report": 8,
    "lowbitcli.api_arguments": 8,
    "lowbitcli.api_outcome": 8,
    "lowbitcli.console": 9,
    "lowbitcli.api": 9,
    "lowbitcli.onnx_export": 9,
    "lowbitcli.options": 10,
    "lowbitcli.progress": 10,
    "lowbitcli.program": 10,
    "lowbitcli.tables": 10,
    "lowbitcli.tables_inspection": 11,
    "lowbitcli.cli_recipe": 11,
    "lowbitcli.cli": 12,
    "lowbitcli.__main__": 13,
}
PAPER = 5  # up to this floor a checkpoint is headers, and no tensor library is loaded
TENSOR_LIBRARIES = {"torch", "triton", "numba"}
KERNELS_MAY_IMPORT = {"lowbit_kernels", *TENSOR_LIBRARIES}
SOURCES = (("kernels", "lowbit_kernels"), ("", "lowbitcli"))
# A command imports what it needs when it runs: start-up time.
LOCAL_IMPORTS = {"lowbitcli/cli.py", "lowbitcli/cli_recipe.py"}
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}
LINES = 350
LONG_FILES = {  # path -> why it is longer
    "tests/kernels/agreement.py": "the cases of every operation that has a kernel, one table",
    "kernels/lowbit_kernels/rounding.py": "each rounding twice, in torch and for kernels",
    "tests/recipe/test_load.py": "a bad recipe for each refusal, in one table",
    "tests/test_configs.py": "the names of many checkpoints, in one table",
    "tests/containers/test_disagreements.py": "a disagreement for each finding, in tables",
    "lowbitcli/cli.py": "nothing but commands, most lines are their options; one table of contents",
}


def modules(root: Path) -> Iterator[tuple[str, str, ast.Module]]:
    """Yield (dotted name, path from root, syntax tree) of each module of the two packages."""
    for folder, package in SOURCES:
        base = root / folder
        for path in sorted((base / package).rglob("*.py")):
            parts = path.relative_to(base).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            yield name, path.relative_to(root).as_posix(), ast.parse(path.read_text())


def room(module: str) -> str | None:
    """Return the entry of FLOORS that a module belongs to, None for a module of neither package."""
    top, *rest = module.split(".")
    if top != "lowbitcli":
        return top if top in FLOORS else None
    return ".".join([top, *rest[:1]])


def imports(tree: ast.AST, known: set[str]) -> Iterator[tuple[str, int]]:
    """Yield (module, line) of each import; `from package import module` is one of the module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield "." * node.level + (node.module or ""), node.lineno
                continue
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield (full if full in known else str(node.module)), node.lineno


def without_type_checking(tree: ast.Module) -> ast.Module:
    """Return what runs at import: the tree less `if TYPE_CHECKING:` blocks and functions."""

    class Drop(ast.NodeTransformer):
        def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
            if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                return node.orelse
            return self.generic_visit(node)

        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

    return Drop().visit(ast.parse(ast.unparse(tree)))


def violations(root: Path) -> list[str]:
    """Return a line for each place where the tree below `root` breaks a rule of the house."""
    found: list[str] = []
    trees = list(modules(root))
    known = {name for name, _, _ in trees}
    runs = {
        name: {imported for imported, _ in imports(without_type_checking(tree), known)}
        for name, _, tree in trees
    }
    for name, path, tree in trees:
        found += [f"{path}:{line}: {what}" for line, what in _import_faults(name, tree, known)]
        found += [f"{path}:{line}: {what}" for line, what in _local_imports(path, tree)]
        own = room(name)
        if own in FLOORS and 0 < FLOORS[own] <= PAPER:
            loaded = sorted(_reaches(name, runs) & TENSOR_LIBRARIES)
            found += [f"{path}: loads {library} when it is imported" for library in loaded]
    return found + _file_faults(root)


def _import_faults(name: str, tree: ast.Module, known: set[str]) -> Iterator[tuple[int, str]]:
    own = room(name)
    if own not in FLOORS:
        yield 1, f"{own} has no floor"
        return
    for imported, line in imports(tree, known):
        other = room(imported)
        if imported.startswith("."):
            yield line, f"a relative import, {imported}"
        elif own == "lowbit_kernels":
            top = imported.split(".")[0]
            if top not in KERNELS_MAY_IMPORT and top not in sys.stdlib_module_names:
                yield line, f"the kernels import {top}"
        elif other == own or other is None:
            continue
        elif other not in FLOORS:
            yield line, f"{other} has no floor"
        elif FLOORS[other] >= FLOORS[own]:
            yield line, f"{own} (floor {FLOORS[own]}) imports {other} (floor {FLOORS[other]})"


def _local_imports(path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    if path in LOCAL_IMPORTS:
        return
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    yield node.lineno, f"an import inside {function.name}()"


def _reaches(name: str, runs: dict[str, set[str]]) -> set[str]:
    """Return the packages from outside that importing `name` loads through modules of ours."""
    outside: set[str] = set()
    seen: set[str] = set()
    todo = [name]
    while todo:
        module = todo.pop()
        if module in seen:
            continue
        seen.add(module)
        parents = [module.rsplit(".", n)[0] for n in range(1, module.count(".") + 1)]
        for imported in (*runs.get(module, ()), *parents):
            if imported in runs:
                todo.append(imported)
            else:
                outside.add(imported.split(".")[0])
    return outside


def _file_faults(root: Path) -> list[str]:
    found = []
    for folder in ("lowbitcli", "kernels", "tests", "docs", "configs"):
        for path in sorted((root / folder).rglob("*")):
            name = path.relative_to(root).as_posix()
            if "__pycache__" in path.parts or not path.is_file():
                continue
            if path.stem in FORBIDDEN_NAMES or path.parent.name in FORBIDDEN_NAMES:
                found.append(f"{name}: the name says nothing")
            if path.suffix == ".py" and name not in LONG_FILES:
                lines = path.read_text().count("\n")
                found += [f"{name}: {lines} lines, of {LINES}"] if lines > LINES else []
    if (root / "kernels" / "__init__.py").exists():
        found.append("kernels/__init__.py: `kernels` would be a package that shadows another")
    return found


def test_the_tree_keeps_the_rules_of_the_house():
    assert violations(ROOT) == []


def test_a_long_file_with_a_reason_is_long():
    short = [path for path in LONG_FILES if (ROOT / path).read_text().count("\n") <= LINES]
    assert short == []


def test_every_floor_is_known_to_the_checker():
    names = {name for name, _, _ in modules(ROOT)}
    assert {"lowbitcli.schemes.scheme", "lowbit_kernels.formats", "lowbitcli"} <= names


PLANTED = {
    "an import that goes up": (
        "lowbitcli/schemes/bad.py",
        "from lowbitcli.recipe import Recipe\n",
        "lowbitcli/schemes/bad.py:1: "
        "lowbitcli.schemes (floor 2) imports lowbitcli.recipe (floor 4)",
    ),
    "an import that goes up for its types": (
        "lowbitcli/tensors.py",
        "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from lowbitcli import plan\n",
        "lowbitcli/tensors.py:4: lowbitcli.tensors (floor 1) imports lowbitcli.plan (floor 5)",
    ),
    "an import across a floor": (
        "lowbitcli/checkpoint/bad.py",
        "import lowbitcli.schemes\n",
        "lowbitcli/checkpoint/bad.py:1: "
        "lowbitcli.checkpoint (floor 2) imports lowbitcli.schemes (floor 2)",
    ),
    "a module without a floor": (
        "lowbitcli/extra.py",
        "",
        "lowbitcli/extra.py:1: lowbitcli.extra has no floor",
    ),
    "a relative import": (
        "lowbitcli/plan/bad.py",
        "from . import build\n",
        "lowbitcli/plan/bad.py:1: a relative import, .",
    ),
    "a kernel that knows the tool": (
        "kernels/lowbit_kernels/bad.py",
        "import lowbitcli.errors\n",
        "kernels/lowbit_kernels/bad.py:1: the kernels import lowbitcli",
    ),
    "an import inside a function": (
        "lowbitcli/verify/bad.py",
        "def f():\n    import json\n\n    return json\n",
        "lowbitcli/verify/bad.py:2: an import inside f()",
    ),
    "torch on a floor of paper": (
        "lowbitcli/containers/bad.py",
        "try:\n    import torch.nn\nexcept ImportError:\n    pass\n",
        "lowbitcli/containers/bad.py: loads torch when it is imported",
    ),
    "torch through a kernel": (
        "lowbitcli/plan/bad.py",
        "from lowbit_kernels import arithmetic\n",
        "lowbitcli/plan/bad.py: loads torch when it is imported",
    ),
    "a file that is too long": (
        "lowbitcli/report/long.py",
        "\n" * 351,
        "lowbitcli/report/long.py: 351 lines, of 350",
    ),
    "a name that says nothing": (
        "lowbitcli/verify/utils.py",
        "",
        "lowbitcli/verify/utils.py: the name says nothing",
    ),
    "a package called kernels": (
        "kernels/__init__.py",
        "",
        "kernels/__init__.py: `kernels` would be a package that shadows another",
    ),
}


@pytest.mark.parametrize("case", PLANTED)
def test_a_planted_fault_is_found(tmp_path, case):
    sound = {
        "kernels/lowbit_kernels/__init__.py": "",
        "kernels/lowbit_kernels/arithmetic.py": "import torch\n",
        "lowbitcli/__init__.py": "",
        "lowbitcli/errors.py": "",
        "lowbitcli/recipe.py": "from lowbitcli import errors\n",
        "lowbitcli/schemes/__init__.py": "",
        "lowbitcli/plan/__init__.py": "from lowbitcli.schemes import x\n",
        "lowbitcli/pipeline/__init__.py": "import torch\nfrom lowbit_kernels import arithmetic\n",
        "lowbitcli/cli.py": "def f():\n    import lowbitcli.pipeline\n",
    }
    for path, text in sound.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert violations(tmp_path) == []
    path, text, message = PLANTED[case]
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text(text)
    assert violations(tmp_path) == [message]


def test_floors_of_paper_load_no_tensor_library():
    """What the syntax trees promise, held against the interpreter."""
    names = [
        name
        for name, _, _ in modules(ROOT)
        if name.startswith("lowbitcli") and FLOORS.get(str(room(name)), 99) <= PAPER
    ]
    code = f"""
import importlib, sys
for name in {[*names, "lowbitcli.cli"]!r}:
    importlib.import_module(name)
    loaded = {TENSOR_LIBRARIES!r} & set(sys.modules)
    if loaded:
        sys.exit(f"{{name}} loads {{sorted(loaded)}}")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
