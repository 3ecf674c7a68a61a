"""The kernel of fake quantization against torch, in Triton's interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lowbit_kernels import fake_kernels

ROOT = Path(__file__).parents[2]


def test_kernel_equals_torch_in_the_interpreter():
    pytest.importorskip("triton", reason="triton is not installed")
    env = dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.kernels.agreement_fake"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == []


@pytest.mark.parametrize(
    ("shape", "scale", "share"),
    [
        ((6, 96), (), 576),
        ((6, 96), (1, 1), 576),
        ((6, 96), (6, 1), 96),
        ((6, 96), (6, 96), 1),
        ((2, 3, 32), (2, 1, 1), 96),
        ((2, 3, 32), (2, 3, 1), 32),
        ((1, 3, 32), (3, 1), 32),
        ((2, 3, 32), (3, 1), None),
        ((6, 96), (96,), None),
        ((6, 96), (1, 96), None),
        ((2, 3, 32), (2, 1, 32), None),
    ],
)
def test_elements_that_share_a_scale_lie_together(shape, scale, share):
    x, scale = torch.zeros(shape), torch.rand(scale) + 1
    assert fake_kernels.share_of(x, scale) == share
    if share is not None:
        each = scale.reshape(-1)[torch.arange(x.numel()) // share].reshape(shape)
        assert torch.equal(each, scale.expand(shape))


def test_only_what_goes_to_kernels_is_launched():
    assert fake_kernels.launch(torch.ones(4), None, None, "E2M1") is None
