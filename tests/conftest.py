"""What every test shares: `gpu` tests skip where there is no CUDA device, `slow` ones without
--slow; and `lowbit`, the program itself, called in this process.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from lowbitcli import program
from lowbitcli.cli import app


def _compute_alone():
    """Keep a fork to one thread: torch's threads stay behind in the parent, and it would wait for
    them.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


os.register_at_fork(after_in_child=_compute_alone)


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")


def pytest_collection_modifyitems(config, items):
    skip_slow = pytest.mark.skip(reason="slow: run with --slow")
    for item in items:
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(skip_slow)


def pytest_runtest_setup(item):
    if "gpu" in item.keywords:
        # Asked here and not at collection, so that a run without gpu tests imports no torch.
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")


@dataclass(frozen=True)
class Said:
    """What the program answered: its exit code, stdout and stderr."""

    code: int
    out: str
    err: str


@pytest.fixture
def lowbit(capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """Return a function that runs `lowbit ARGUMENTS` without a new process."""

    def run(*arguments: object) -> Said:
        capsys.readouterr()
        code = program.run(app, [str(argument) for argument in arguments])
        said = capsys.readouterr()
        return Said(code, said.out, said.err)

    return run
