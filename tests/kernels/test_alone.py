"""`kernels/` works by itself: a Python with torch (and triton) and nothing else of ours."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "kernels"

GUARD = """
import builtins, sys
allowed = set(sys.stdlib_module_names) | {"lowbit_kernels", ALLOWED}
true_import = builtins.__import__

def guarded(name, globals=None, locals=None, fromlist=(), level=0):
    importer = (globals or {}).get("__name__", "")
    if importer.split(".")[0] == "lowbit_kernels" and not level:
        if name.split(".")[0] not in allowed:
            raise ImportError(f"{importer} imports {name}")
    return true_import(name, globals, locals, fromlist, level)

builtins.__import__ = guarded
import lowbit_kernels
from lowbit_kernels import formats, ops
assert "torch" not in sys.modules and "triton" not in sys.modules, "the package is not lazy"
"""

USE = """
import importlib
for name in lowbit_kernels.MODULES:
    importlib.import_module("lowbit_kernels." + name)
assert "lowbitcli" not in sys.modules
import torch
from lowbit_kernels import fp8, jit, mx, nvfp4
w = torch.randn(4, 64)
for ops in (fp8.TENSOR, fp8.CHANNEL, mx.MXFP8, mx.MXFP4, nvfp4.NVFP4):
    parts = ops.quantize(w, ops.shared(ops.measure(w), "amax"), "amax")
    assert ops.dequantize(parts, torch.float32).shape == w.shape
"""


def run(folder: Path, code: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run `code` with `folder` as the only path beside the installed packages."""
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r})\n" + code],
        capture_output=True,
        text=True,
        env={"OMP_NUM_THREADS": "1", "PATH": "", **env},
        cwd=folder,
        check=False,
    )


def test_references_need_torch_alone():
    code = GUARD.replace("ALLOWED", '"torch"') + USE + "assert not jit.HAS_TRITON\n"
    done = run(KERNELS, code + 'assert "triton" not in sys.modules', {"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr


def test_kernels_need_torch_and_triton_alone():
    pytest.importorskip("triton", reason="triton is not installed")
    code = GUARD.replace("ALLOWED", '"torch", "triton"') + USE + "assert jit.HAS_TRITON\n"
    done = run(KERNELS, code, {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("planted", ["numpy", "lowbitcli.errors", "triton"])
def test_a_planted_import_is_found(tmp_path, planted):
    shutil.copytree(KERNELS / "lowbit_kernels", tmp_path / "lowbit_kernels")
    module = tmp_path / "lowbit_kernels" / "amax.py"
    module.write_text(
        module.read_text().replace("import torch\n", f"import {planted}\nimport torch\n", 1)
    )
    done = run(tmp_path, GUARD.replace("ALLOWED", '"torch"') + USE, {"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode != 0
    assert f"lowbit_kernels.amax imports {planted}" in done.stderr
