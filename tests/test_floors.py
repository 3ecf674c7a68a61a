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
    "lowbitcli.tensors": 1,
    "lowbitcli.schemes": 2,
    "lowbitcli.checkpoint": 2,
    "lowbitcli.containers": 3,
    "lowbitcli.recipe": 4,
    "lowbitcli.plan": 5,
    "lowbitcli.pipeline": 6,
    "lowbitcli.verify": 7,
    "lowbitcli.search": 7,
    "lowbitcli.doctor": 7,
    "lowbitcli.report": 8,
    "lowbitcli.console": 9,
    "lowbitcli.api": 9,
    "lowbitcli.options": 10,
    "lowbitcli.program": 10,
    "lowbitcli.tables": 10,
    "lowbitcli.cli": 11,
}
PAPER = 5  # up to this floor a checkpoint is headers, and no tensor library is loaded
TENSOR_LIBRARIES = {"torch", "triton", "numba"}
KERNELS_MAY_IMPORT = {"lowbit_kernels", *TENSOR_LIBRARIES}
SOURCES = (("kernels", "lowbit_kernels"), ("", "lowbitcli"))
LOCAL_IMPORTS = {"lowbitcli/cli.py"}  # a command imports what it needs when it runs: start-up time
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}
LINES = 350
LONG_FILES = {  # path -> why it is longer
    "lowbitcli/cli.py": "nothing but commands, most lines are their options; one table of contents",
}
