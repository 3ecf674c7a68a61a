"""Places beyond 32 bits: matrices too large to fill here, of which kernels touch a corner in the
interpreter. Memory that nothing touches is not there.
"""

import subprocess
import sys

import pytest

from lowbit_kernels import layout
from tests.kernels.test_alone import KERNELS

pytest.importorskip("triton", reason="triton is not installed")

CORNERS = """
import torch
from lowbit_kernels import fp8_block, integer


COLS = 2**24 + 2**18  # the last of 128 rows lies beyond 2^31
w = torch.empty(128, COLS, dtype=torch.float16)
w[:, :128] = torch.randn(128, 128).half()
data = torch.empty(128, COLS, dtype=torch.uint8)
scale = torch.empty(1, COLS // 128)
near, near_scale = fp8_block.quantize(w[:, :128])
fp8_block._quantize_kernel[(1,)](
    w, data, scale, 128, COLS, 1, COLS // 128, BF16=False, ALIGNED=True, NATIVE=False,
    ELEMENT="E4M3", RULE="amax", HIGH=128, PER_ROW=False, FAR=128 * COLS >= 2**31,
)
assert torch.equal(data[:, :128], near.view(torch.uint8)) and scale[0, 0] == near_scale

COLS = 2**26 + 2**22
data = torch.empty(32, COLS, dtype=torch.uint8)
data[:, :128] = near.view(torch.uint8)[:32]
out = torch.empty(32, COLS, dtype=torch.float16)
fp8_block._dequantize_kernel[(1,)](
    data, near_scale.contiguous(), out, 32, COLS, 1, COLS // 128, ELEMENT="E4M3", ALIGNED=True,
    NATIVE=False, HIGH=128, FAR=32 * COLS >= 2**31,
)
want = fp8_block.dequantize(near[:32].contiguous(), near_scale, torch.float16)
assert torch.equal(out[:, :128], want)
"""


def test_blocks_of_rows_that_lie_far_apart():
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            f"import sys; sys.path.insert(0, {str(KERNELS)!r})\n" + CORNERS,
        ],
        capture_output=True,
        text=True,
        env={"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", "PATH": ""},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("rows", "across", "matrices", "fused"),
    [
        (4096, 256, 128, True),
        (16384, 448, 256, True),  # 2^35 / 2.3 elements of NVFP4
        (16384, 512, 256, False),  # 2^31 blocks
        (2**20, 2**11 - 4, 1, True),
        (2**29, 1, 1, False),  # four columns of scales to a block
        (1, 2**21, 1, False),  # words of a tile
    ],
)
def test_scales_are_stored_swizzled_where_32_bits_count_them(rows, across, matrices, fused):
    assert layout.can_fuse(rows, across, matrices) is fused
