"""F17: 8 GB of weights under `--max-memory 1GiB`; the source is a file of holes.

Only with `FAULTS=all`: it writes 2.4 GB. Smaller ones are in tests/pipeline/test_slices.py.
"""

import os
import struct
import subprocess
import sys

import pytest

from lowbitcli.checkpoint.header import lay_out
from lowbitcli.tensors import TensorSpec
from tests.faults.shim import LONG

ROWS = COLS = 32768
LIMIT = 1 << 30


@pytest.mark.skipif(not LONG, reason="with FAULTS=all: it takes minutes")
def test_f17_eight_gigabytes_under_one_of_memory(tmp_path):
    names = [f"model.layers.{n}.mlp.down_proj.weight" for n in range(4)]
    header, entries = lay_out([TensorSpec(name, "BF16", (ROWS, COLS)) for name in names], {})
    source = tmp_path / "model.safetensors"
    with open(source, "wb") as file:
        file.write(header)
        file.truncate(max(entry.stop for entry in entries.values()))
        for number, entry in enumerate(entries.values()):  # some numbers that are not zero
            file.seek(entry.start)
            file.write(struct.pack("<H", 0x3F80 + number) * COLS)
    assert source.stat().st_size > 8 << 30
    line = [sys.executable, "-m", "lowbitcli", "quantize", str(source), "--scheme", "nvfp4"]
    line += ["-o", str(tmp_path / "out.safetensors"), "--device", "cpu", "--max-memory", "1GiB"]
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    peak = used.ru_maxrss * 1024
    took = used.ru_utime + used.ru_stime
    print(
        f"F17: {source.stat().st_size / 1e9:.1f} GB, peak {peak / 1e6:.0f} MB, {took:.0f} s of CPU"
    )
    assert process.returncode == 0
    assert peak <= LIMIT
