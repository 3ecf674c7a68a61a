"""Kernels agree with their references bit for bit in Triton's interpreter, on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from tests.kernels.agreement import CASES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def differences():
    """Run all cases once in a process whose triton is the interpreter."""
    env = dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.agreement", "cpu"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", CASES)
def test_kernel_equals_reference(differences, name):
    assert differences[name] == []
