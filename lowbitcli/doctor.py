"""What would run on this machine: interpreter, tensor libraries, devices, and the path each takes.

| device | path |
|---|---|
| CUDA, with triton | compiled kernels |
| CUDA, without triton | torch references |
| CPU | torch references |

Both paths give the same bytes.
"""

import importlib.metadata
import os
import platform
import sys
from typing import Any

import torch

from lowbit_kernels.jit import HAS_TRITON, INTERPRETED
from lowbitcli import __version__

PACKAGES = ("torch", "triton", "numpy", "safetensors", "pydantic", "numba")
SAFE_TORCH = (2, 10)  # older ones run code from a pickle that says weights_only: CVE-2026-24747


def examine() -> dict[str, Any]:
    """Return versions, devices and advice, as plain values."""
    devices = [_cuda(index) for index in range(torch.cuda.device_count())]
    processor = platform.processor() or platform.machine()
    return {
        "lowbit": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "devices": [*devices, {"name": "cpu", "what": processor, "path": _path("cpu")}],
        "advice": _advice(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cuda(index: int) -> dict[str, Any]:
    found = torch.cuda.get_device_properties(index)
    return {
        "name": f"cuda:{index}",
        "what": f"{found.name}, sm_{found.major}{found.minor}, {found.total_memory / 1e9:.0f} GB",
        "path": _path("cuda"),
    }


def _path(kind: str) -> str:
    if INTERPRETED:
        return "Triton's interpreter (TRITON_INTERPRET=1), for tests"
    return "compiled kernels" if kind == "cuda" and HAS_TRITON else "torch references"


def _advice() -> list[str]:
    advice = []
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < SAFE_TORCH:
        advice.append(f"torch {torch.__version__} has CVE-2026-24747: install 2.11 or newer")
    if torch.cuda.is_available() and not HAS_TRITON:
        advice.append("triton is missing: the GPU runs torch references, which are slower")
    return advice


def lines(found: dict[str, Any]) -> list[str]:
    """Return what `examine` found as lines of text."""
    versions = [f"{name} {version or 'missing'}" for name, version in found["packages"].items()]
    return [
        f"lowbit {found['lowbit']}, Python {found['python']}, {found['system']}, "
        f"{found['cores']} cores",
        ", ".join(versions) + (f", CUDA {found['cuda']}" if found["cuda"] else ""),
        *(f"{device['name']}: {device['what']}: {device['path']}" for device in found["devices"]),
        *(f"advice: {advice}" for advice in found["advice"]),
    ]
