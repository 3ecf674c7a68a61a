"""Time the CPU paths beside memcpy of the same run, and print them as tables.

    python kernels/bench/cpu.py [--threads 1 2] [--rows 2048] [--dtypes bfloat16] [--json FILE]

A figure is GB/s of the wide tensor, bf16 or fp32: what quantize reads, what dequantize writes; in
parentheses the share of memcpy. memcpy copies a tensor of the same bytes, and is timed again after
each call, so that a share compares neighbours in time: medians of both. The first table goes by the
clock; the second by the processor time of all threads, which other people's work on the machine
distorts less, and is for a core. Every path's bytes are held against the reference before it is
timed. Searches take a sixteenth of the rows.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from lowbit_kernels import cpu, error, error_figures, fp8, fp8_block, integer, mx, nvfp4
from lowbit_kernels.jit import only_references, references

COLS = 4096
SECONDS = 0.3  # for one cell, and three repetitions at least
Timed = Callable[[], Any]


@dataclass(frozen=True)
class Cell:
    """What was measured, in GB/s: by the clock, and of a core."""

    operation: str
    dtype: str
    path: str
    threads: int
    clock: float
    copy_clock: float
    core: float
    copy_core: float


def _pairs(w: torch.Tensor) -> Iterator[tuple[str, Timed]]:
    """Yield each scheme's two directions by name; scales over a whole tensor are given."""
    scale, shared = torch.tensor(1e-3), torch.tensor(4e-5)
    for name, forth, back in (
        ("fp8", lambda: fp8.quantize_tensor(w, scale), fp8.dequantize_tensor),
        ("fp8 per row", lambda: fp8.quantize_channel(w), fp8.dequantize_channel),
        ("fp8 128x128", lambda: fp8_block.quantize(w), fp8_block.dequantize),
        ("int8 per row", lambda: integer.quantize_channel(w), integer.dequantize_channel),
        ("mxfp8", lambda: mx.quantize_mxfp8(w), mx.dequantize),
        ("mxfp4", lambda: mx.quantize_mxfp4(w), mx.dequantize),
        ("nvfp4", lambda: nvfp4.quantize(w, shared), nvfp4.dequantize),
    ):
        with references():
            parts = forth()
        yield f"{name} quantize", forth
        yield f"{name} dequantize", lambda back=back, parts=parts: back(*parts, w.dtype)


def _searches(w: torch.Tensor) -> Iterator[tuple[str, Timed]]:
    shared = torch.tensor(4e-5)
    for rule in ("mse", "mse_all", "four_over_six", "2d"):
        yield f"nvfp4 {rule}", lambda rule=rule: nvfp4.quantize(w, shared, rule)
    yield "mxfp8 mse", lambda: mx.quantize_mxfp8(w, "mse")


def _sums(w: torch.Tensor) -> Iterator[tuple[str, Timed]]:
    v = w.float() * 1.01

    def call() -> Any:
        if only_references():
            return error_figures.figures(w, v)[:, 0].tolist()
        return [band.error for band in error.bands(w, v)]

    yield "error sums", call


def _bytes(result: Any) -> Any:
    if isinstance(result, list):
        return result
    parts = result if isinstance(result, tuple) else (result,)
    return [part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts if part.dim()]


def _seconds(call: Timed) -> tuple[float, float]:
    """Return the seconds of `call` by the clock, and of all its threads on processors."""
    clock, processor = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - clock, time.process_time() - processor


def _measure(call: Timed, w: torch.Tensor) -> list[float]:
    """Return GB/s by the medians of `call` and of memcpy, timed in turn: by the clock and for a
    core, each of the call first.
    """
    target = torch.zeros_like(w)
    pairs, end = [], time.perf_counter() + SECONDS
    while len(pairs) < 3 or (time.perf_counter() < end and len(pairs) < 99):
        pairs.append((*_seconds(call), *_seconds(lambda: target.copy_(w))))
    gigabytes = w.numel() * w.element_size() / 1e9
    clock, core, copy_clock, copy_core = (
        gigabytes / statistics.median(each) for each in zip(*pairs, strict=True)
    )
    return [clock, copy_clock, core, copy_core]


def _paths(threads: list[int]) -> Iterator[tuple[str, int]]:
    yield "reference", 1
    found = cpu.compiled(torch.empty(cpu.LARGE)) is not None
    for path in ("slices", "numba") if found else ("slices",):
        for count in threads:
            yield path, count


def _cells(name: str, call: Timed, w: torch.Tensor, paths: list[tuple[str, int]]) -> list[Cell]:
    found, want = [], []
    for path, threads in paths:
        torch.set_num_threads(threads)
        os.environ["LOWBIT_NUMBA"] = "1" if path == "numba" else "0"
        if path == "reference":
            with references():
                want = _bytes(call())
                measured = _measure(call, w)
        else:
            assert _bytes(call()) == want, f"{name} by {path} differs from the reference"
            measured = _measure(call, w)
        found.append(Cell(name, str(w.dtype)[6:], path, threads, *measured))
    return found


def _table(cells: list[Cell], paths: list[tuple[str, int]], core: bool) -> Iterator[str]:
    """Yield the lines of a table: a row for each operation and dtype, a column for each path."""
    heads = [f"{path}, {threads} thread{'s' * (threads > 1)}" for path, threads in paths]
    yield f"| operation | dtype | {' | '.join(heads)} | memcpy |"
    yield "|---" * (len(paths) + 3) + "|"
    for name, dtype in dict.fromkeys((cell.operation, cell.dtype) for cell in cells):
        row = [c for c in cells if (c.operation, c.dtype) == (name, dtype)]
        texts = []
        for path in paths:
            cell = next((c for c in row if (c.path, c.threads) == path), None)
            if cell is None:
                texts.append("")
                continue
            speed = cell.core if core else cell.clock
            copy = cell.copy_core if core else cell.copy_clock
            texts.append(f"{speed:.2f} ({100 * speed / copy:.0f})")
        copies = [c.copy_core if core else c.copy_clock for c in row if c.threads == 1]
        copy = statistics.median(copies) if copies else float("nan")
        yield f"| {name} | {dtype} | {' | '.join(texts)} | {copy:.1f} |"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _head(chosen: argparse.Namespace) -> dict[str, Any]:
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "date": datetime.date.today().isoformat(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load before": load,
        "shape": [chosen.rows, COLS],
        "python": platform.python_version(),
        **{package: _version(package) for package in ("torch", "numba", "numpy")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16", "float32"])
    parser.add_argument("--only", default="", help="operations whose names hold this")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    head, cells = _head(chosen), []
    print(json.dumps(head))
    paths = list(_paths(chosen.threads))
    for dtype in chosen.dtypes:
        w = (torch.randn(chosen.rows, COLS) * 0.02).to(getattr(torch, dtype))
        few = w[: max(chosen.rows // 16, cpu.LARGE // COLS)]
        for calls, weight in ((_pairs(w), w), (_searches(few), few), (_sums(w), w)):
            for name, call in calls:
                if chosen.only in name:
                    cells += _cells(name, call, weight, paths)
    for title, core in (("By the clock", False), ("By processor time, for a core", True)):
        print(f"\n{title}, GB/s (% of memcpy):\n")
        print("\n".join(_table(cells, paths, core)))
    if chosen.json:
        found = [asdict(cell) for cell in cells]
        chosen.json.write_text(json.dumps({"head": head, "cells": found}))


if __name__ == "__main__":
    main()
