"""Time the CPU paths beside memcpy of the same run, and print a table.

    python kernels/bench/cpu.py [--threads 1 2] [--rows 2048] [--reference] [--json FILE]

A figure is GB/s of the wide tensor, bf16 or fp32: what quantize reads, what dequantize writes.
memcpy copies a tensor of the same bytes, and is timed again after each call, so that a ratio
compares neighbours in time: medians of both, by the clock, and per core by the processor time of
all threads, which other people's work on the machine distorts less. LOWBIT_NUMBA=0 times torch
alone; --reference times the whole-tensor references too. Bytes are held against the references
before anything is timed.
"""

import argparse
import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from lowbit_kernels import cpu, fp8, mx, nvfp4
from lowbit_kernels.jit import references

COLS = 4096
Timed = Callable[[], Any]


@dataclass(frozen=True)
class Row:
    """What was measured, in GB/s; `reference` for a core."""

    operation: str
    dtype: str
    threads: int
    clock: float
    copy_clock: float
    core: float
    copy_core: float
    reference: float | None


def _line(row: Row) -> str:
    whole = "" if row.reference is None else f"{row.reference:.2f}"
    return (
        f"| {row.operation} | {row.dtype} | {row.threads} | {row.clock:.2f} "
        f"| {100 * row.clock / row.copy_clock:.0f} | {row.core:.2f} | {row.copy_core:.1f} "
        f"| {100 * row.core / row.copy_core:.0f} | {whole} |"
    )


def _calls(w: torch.Tensor) -> dict[str, tuple[Timed, Timed]]:
    """Return (quantize, dequantize) by name; scales over a whole tensor are given."""
    scale, shared = torch.tensor(1e-3), torch.tensor(4e-5)

    def pair(forth: Timed, back: Callable[..., Any]) -> tuple[Timed, Timed]:
        with references():
            parts = forth()
        return forth, lambda: back(*parts, w.dtype)

    return {
        "fp8": pair(lambda: fp8.quantize_tensor(w, scale), fp8.dequantize_tensor),
        "fp8 per row": pair(lambda: fp8.quantize_channel(w), fp8.dequantize_channel),
        "mxfp8": pair(lambda: mx.quantize_mxfp8(w), mx.dequantize),
        "mxfp4": pair(lambda: mx.quantize_mxfp4(w), mx.dequantize),
        "nvfp4": pair(lambda: nvfp4.quantize(w, shared), nvfp4.dequantize),
    }


def _bytes(result: Any) -> list[bytes]:
    parts = result if isinstance(result, tuple) else (result,)
    return [part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts if part.dim()]


def _seconds(call: Timed) -> tuple[float, float]:
    """Return the seconds of `call` by the clock, and of all its threads on processors."""
    clock, processor = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - clock, time.process_time() - processor


def _measure(call: Timed, w: torch.Tensor, repeat: int) -> list[float]:
    """Return GB/s by the medians of `call` and of memcpy, timed in turn: by the clock and for a
    core (processor time), each of the call first.
    """
    target = torch.zeros_like(w)
    call()
    pairs = [(*_seconds(call), *_seconds(lambda: target.copy_(w))) for _ in range(repeat)]
    gigabytes = w.numel() * w.element_size() / 1e9
    clock, core, copy_clock, copy_core = (
        gigabytes / statistics.median(each) for each in zip(*pairs, strict=True)
    )
    return [clock, copy_clock, core, copy_core]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _rows(chosen: argparse.Namespace) -> Any:
    """Yield a row for each dtype, number of threads, scheme and direction."""
    for dtype in (torch.bfloat16, torch.float32):
        w = (torch.randn(chosen.rows, COLS) * 0.02).to(dtype)
        for threads in chosen.threads:
            torch.set_num_threads(threads)
            for name, calls in _calls(w).items():
                for way, call in zip(("quantize", "dequantize"), calls, strict=True):
                    with references():
                        want = _bytes(call())
                        whole = _measure(call, w, 3)[2] if chosen.reference else None
                    assert _bytes(call()) == want, f"{name} {way} differs from the reference"
                    yield Row(
                        f"{name} {way}",
                        str(dtype)[6:],
                        threads,
                        *_measure(call, w, chosen.repeat),
                        whole,
                    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--reference", action="store_true")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    head = {
        "date": datetime.date.today().isoformat(),
        "path": "torch" if cpu.compiled(torch.empty(cpu.LARGE)) is None else "numba",
        "processor": platform.processor() or platform.machine(),
        "shape": [chosen.rows, COLS],
        "python": platform.python_version(),
        **{package: _version(package) for package in ("torch", "numba", "numpy")},
    }
    print(json.dumps(head))
    print(
        "| operation | dtype | threads | GB/s | % of memcpy | GB/s of a core | memcpy | % | "
        "reference |\n|---|---|---|---|---|---|---|---|---|"
    )
    rows = []
    for row in _rows(chosen):
        rows.append(row)
        print(_line(row), flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps({"head": head, "rows": [asdict(r) for r in rows]}))


if __name__ == "__main__":
    main()
