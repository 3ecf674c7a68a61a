"""docs/api.md can be believed: every public name is on it as it is called, every example runs, and
docstrings say what is taken and raised.
"""

import ast
import dataclasses
import functools
import importlib
import inspect
import re
import textwrap
from pathlib import Path

import pytest
import torch

import lowbit_kernels
from lowbit_kernels import fp8, fp8_block, hadamard, layout, mx, nvfp4
from lowbit_kernels.error import Sums
from lowbit_kernels.formats import Format
from lowbit_kernels.ops import Ops
from lowbitcli import api, errors
from lowbitcli.containers.container import Finding
from lowbitcli.plan.nouns import Weight
from lowbitcli.plan.source import SourceWeight
from lowbitcli.search.nouns import Chosen
from lowbitcli.verify.nouns import Check, Figures, Problem, WeightRow

PAGE = (Path(__file__).parents[1] / "docs" / "api.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
SECTIONS = dict(
    re.findall(r"^## [^\n]*: `([\w.]+)`$(.*?)(?=^## |\Z)", PAGE, flags=re.DOTALL | re.MULTILINE)
)
PLACES = r"\b(?:[a-z_\d]+\.)+(?=[A-Z])"  # the modules before a class
OWN_SECTION = ("dequantizers", "fake_quant", "kv_nvfp4")
IN_TABLES = ("nvfp4", "mx", "fp8", "fp8_block", "integer", "hadamard", "layout", "grouped")
IN_TABLES += ("amax", "importance", "error")
# What a module has without underscore for its neighbours alone.
FOR_NEIGHBOURS = {
    "error": {"figures", "figures_of_bands", "figures_of_parts", "total_of_bands"},
    "amax": {"check_weight", "scale_from_bits", "launch_scale"},
    "fake_quant": {"StraightThrough"},
    "fp8": {"scale_of", "cast_tile"},
    "fp8_block": {"scale_of"},
    "integer": {"scale_of"},
    "layout": {"store_scales", "can_fuse", "room", "check", "arrange"},
    "nvfp4": {"scales_of", "encode"},
}
NEIGHBOURS = {"fake_blocks", "fake_checks", "fake_kernels", "fake_plain", "formats"}
NEIGHBOURS |= {"nvfp4_search", "nvfp4_te", "ops", "rounding", "tensor_file", "typed"}
FOLLOW_NOBODY = {"amax", "error", "grouped", "importance"}
REFUSE_NOTHING = {"importance.values_of", "nvfp4.global_scale_of"}


def default(value):
    if isinstance(value, Format):
        return value.name
    return "SIGNS" if value is hadamard.SIGNS else repr(value)


def said(name, function):
    """Return how a function is called, as the page has it."""
    words, star = [], False
    for p in inspect.signature(function).parameters.values():
        if p.kind is p.KEYWORD_ONLY and not star:
            words, star = [*words, "*"], True
        words.append(p.name if p.default is p.empty else f"{p.name}={default(p.default)}")
    return f"`{name}({', '.join(words)})`"


def functions(name):
    """Yield each public function of a module, with its name."""
    module = importlib.import_module(f"lowbit_kernels.{name}")
    for function, value in vars(module).items():
        public = not function.startswith("_") and function not in FOR_NEIGHBOURS.get(name, ())
        own = getattr(value, "__module__", "") == module.__name__
        listed = function in getattr(module, "__all__", ())
        if not inspect.isfunction(value) or not public or not (own or listed):
            continue
        if not any(p.endswith("_ptr") for p in inspect.signature(value).parameters):
            yield function, value  # what takes pointers is part of a kernel


def test_every_module_has_a_place():
    modules = {name for name in lowbit_kernels.MODULES if not name.startswith("error_")}
    assert modules == {*OWN_SECTION, *IN_TABLES, *NEIGHBOURS}
    for name, apart in FOR_NEIGHBOURS.items():
        module = importlib.import_module(f"lowbit_kernels.{name}")
        assert apart <= set(vars(module)), name


@pytest.mark.parametrize("name", OWN_SECTION)
def test_every_signature_is_in_the_section_of_its_module(name):
    found = [said(*each) for each in functions(name)]
    assert len(found) >= 2
    assert [s for s in found if s not in SECTIONS[name]] == []
    assert "Source: " in SECTIONS[name] and "ValueError" in SECTIONS[name]


@pytest.mark.parametrize("name", IN_TABLES)
def test_every_signature_is_in_the_table(name):
    found = [said(f"{name}.{function}", value) for function, value in functions(name)]
    assert found and [s for s in found if s not in PAGE] == []
    assert re.search(rf"^\| [^|]*`{name}`[^|]* \| \S", PAGE, flags=re.MULTILINE), "no source"


def test_what_parameters_may_be():
    """Every rule, layout, order of nibbles, element and scheme is in the table, and no other."""
    rules = {"nvfp4": nvfp4.LARGEST_SCALE, "mx": mx.RULES, "fp8_block": fp8_block.RULES}
    for name, known in rules.items():
        (row,) = re.findall(rf"^\| `rule` of `{name}` \| ([^|(]*)", PAGE, flags=re.MULTILINE)
        assert re.findall(r"`(\w+)`", row) == list(known)
    (row,) = re.findall(r"^\| `layout` of scales \| (.*)", PAGE, flags=re.MULTILINE)
    assert re.findall(r"`(\w+)`[:,]", row) == list(layout.LAYOUTS)
    (row,) = re.findall(r"^\| `nibbles` \| (.*)", PAGE, flags=re.MULTILINE)
    assert re.findall(r"`(\w+)`", row) == list(layout.NIBBLES)
    (row,) = re.findall(r"^\| `ops` of `grouped` \| (.*)", PAGE, flags=re.MULTILINE)
    found = {
        f"{name}.{attribute}"
        for name in IN_TABLES
        for attribute, value in vars(importlib.import_module(f"lowbit_kernels.{name}")).items()
        if isinstance(value, Ops)
    }
    # fp8 hands on those of fp8_block.
    assert set(re.findall(r"`([\w.]+)`", row)) == found - {"fp8.BLOCK128"}
    (row,) = re.findall(r"^\| `element`, of [^|]* \| (.*)", PAGE, flags=re.MULTILINE)
    assert {*fp8.FP8_DTYPES, *mx.TORCH} < set(re.findall(r"`([A-Z]\w+)`", row))


def test_signatures_on_the_page_are_there():
    """What the page calls exists: no name has stayed behind."""
    for module, function in re.findall(r"`(\w+)\.(\w+)\(", PAGE):
        if module in lowbit_kernels.MODULES:
            assert hasattr(importlib.import_module(f"lowbit_kernels.{module}"), function)


@pytest.mark.parametrize("name", [*OWN_SECTION, *IN_TABLES])
def test_docstrings_say_what_is_taken_and_refused(name):
    module = importlib.import_module(f"lowbit_kernels.{name}")
    for function, value in functions(name):
        text = inspect.getdoc(value) or ""
        assert text, f"{name}.{function} says nothing"
        if f"{name}.{function}" not in REFUSE_NOTHING:
            assert "Raises" in text, f"{name}.{function} does not say what it raises"
        both = text + (module.__doc__ or "")
        if name not in FOLLOW_NOBODY:
            assert re.search(r"Sources?:|(ModelOpt|DeepGEMM|TransformerEngine) [\d`]", both), (
                f"{name} does not say its source"
            )
        assert re.search(r"\[|shape", both), f"{name}.{function} names no shape"
        assert re.search("fp32|fp64|byte|E4M3|dtype", both), f"{name}.{function} names no dtype"


def test_what_refuses_nothing_raises_nothing():
    for name in REFUSE_NOTHING:
        module, function = name.split(".")
        value = getattr(importlib.import_module(f"lowbit_kernels.{module}"), function)
        tree = ast.parse(textwrap.dedent(inspect.getsource(value)))
        assert not any(isinstance(node, ast.Raise) for node in ast.walk(tree)), name


def test_every_name_of_the_front_door_is_on_the_page():
    section = SECTIONS["lowbitcli.api"]
    for name in api.__all__:
        value = getattr(api, name)
        if inspect.isfunction(value):
            assert said(name, value) in section, said(name, value)
            text = inspect.getdoc(value) or ""
            assert "Raises:" in text or name == "is_finished", f"{name} does not say what it raises"
        else:
            assert f"`{name}" in section, name


def row(value):
    """Return the row of a value on the page: its fields with their types, what else it has."""
    kinds = []
    given = {f.name: f.default for f in dataclasses.fields(value)} if value in ASKED else {}
    for name, annotation in value.__annotations__.items():
        kind = re.sub(PLACES, "", inspect.formatannotation(annotation)).replace("|", "or")
        kinds.append(f"`{name}: {kind}{f' = {given[name]!r}' if name in given else ''}`")
    properties = (property, functools.cached_property)
    more = [f"`{n}`" for n, v in vars(value).items() if n[0] != "_" and isinstance(v, properties)]
    for name, method in vars(value).items():
        if name[0] != "_" and inspect.isfunction(method):
            names = [f"{p.name}" for p in inspect.signature(method).parameters.values()]
            more.append(f"`{name}({', '.join(names[1:])})`")
    return f"| `{value.__name__}` | {', '.join(kinds)} | {', '.join(more)} |"


ASKED = (api.Request, api.Wanted, api.Allowed, api.Spread)  # fields of these have defaults
VALUES = [v for v in vars(api).values() if getattr(v, "__name__", "") in api.__all__]
VALUES = [*filter(dataclasses.is_dataclass, VALUES), Weight, SourceWeight, Finding]
VALUES += [Problem, Check, WeightRow, Figures, Chosen, Sums]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: value.__name__)
def test_every_field_of_a_value_is_on_the_page(value):
    assert row(value) in SECTIONS["lowbitcli.api"], row(value)
    assert inspect.getdoc(value)


def test_every_error_is_on_the_page():
    found = {
        (name, value.__base__.__name__)
        for name, value in vars(errors).items()
        if inspect.isclass(value) and value is not errors.LowbitError
    }
    rows = re.findall(r"^\| `(\w+Error)` \| `(\w+)` \| \S", PAGE, flags=re.MULTILINE)
    assert set(rows) == found and len(rows) == len(found)
    assert {"message", "hint", "exit_code"} <= {
        *vars(errors.UsageError("x")),
        *dir(errors.LowbitError),
    }


def test_there_are_values_of_all_kinds():
    assert {"Request", "Outcome", "Plan", "Verification"} < {v.__name__ for v in VALUES}
    assert row(Check) == (
        "| `Check` | `what: str`, `count: int`, `ok: bool or None`, `note: str` |  |"
    )


def test_signatures_of_the_export_to_onnx():
    reason = "the packages of the extra onnx are not installed"
    pytest.importorskip("onnxscript", reason=reason)
    onnx_export = importlib.import_module("lowbitcli.onnx_export")
    for name in onnx_export.__all__:
        assert said(name, getattr(onnx_export, name)) in SECTIONS["onnx_export"]


@pytest.mark.parametrize("i", range(len(EXAMPLES)))
def test_example(i, capsys):
    torch.manual_seed(i)
    if "onnx" in EXAMPLES[i]:
        pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    exec(compile(EXAMPLES[i], f"docs/api.md, example {i}", "exec"), {})


def test_there_are_examples():
    assert len(EXAMPLES) == PAGE.count("```python") >= 6
