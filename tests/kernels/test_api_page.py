"""docs/api.md can be believed: its examples run, its signatures are those of the code."""

import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
SECTIONS = dict(
    re.findall(r"^## [^\n]*: `(\w+)`$(.*?)(?=^## |\Z)", PAGE, flags=re.DOTALL | re.MULTILINE)
)


def signatures(name):
    """Yield each public function of a module as it is called."""
    module = importlib.import_module(f"lowbit_kernels.{name}")
    for function, value in vars(module).items():
        if not inspect.isfunction(value) or function.startswith("_"):
            continue
        if value.__module__ == module.__name__ or function in getattr(module, "__all__", ()):
            parameters = inspect.signature(value).parameters.values()
            said = [
                p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters
            ]
            yield f"`{function}({', '.join(said)})`"


@pytest.mark.parametrize("name", ["dequantizers", "fake_quant", "kv_nvfp4"])
def test_every_signature_is_on_the_page(name):
    found = list(signatures(name))
    assert len(found) >= 2
    assert [s for s in found if s not in SECTIONS[name]] == []


@pytest.mark.parametrize("i", range(len(EXAMPLES)))
def test_example(i):
    torch.manual_seed(i)
    exec(compile(EXAMPLES[i], f"docs/api.md, example {i}", "exec"), {})


def test_there_are_examples():
    assert len(EXAMPLES) == PAGE.count("```python") >= 5
