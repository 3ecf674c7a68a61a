"""Export to ONNX where its packages are not installed."""

import importlib
import sys

import pytest


def test_without_its_packages_the_import_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    for name in [name for name in sys.modules if name.startswith("lowbitcli.onnx_export")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=r"pip install 'lowbit\[onnx\]'"):
        importlib.import_module("lowbitcli.onnx_export")
