"""Measure one source: the floor, the run and everything beside them, one after the other.

What has been measured is kept in a `Figures` as it comes, so that a bench that is cut short has it.
"""

import argparse
import ctypes
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from pipeline_floor import floor
from pipeline_peers import import_torch, peer_alone, process
from pipeline_source import make

from lowbitcli.api import Request
from lowbitcli.pipeline import together
from lowbitcli.pipeline.arithmetic import device_of
from lowbitcli.pipeline.run import Options, run
from lowbitcli.plan.prepare import quantization

RUN, TOGETHER = "run", "together"
ONE_BY_ONE = "one by one"
PROCESS, IMPORT, DEVICES, PEER = "process", "import torch", "devices", "peer"
ONCE = {"repeats": 1, "cold": False}


@dataclass
class Figures:
    """What one source took; peaks in bytes, and the share of it that stayed in the page cache."""

    bytes_in: int = 0
    bytes_out: int = 0
    all: dict[str, list[float]] = field(default_factory=dict)
    stages: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    stayed: list[float] = field(default_factory=list)
    quiet: bool = False

    @property
    def seconds(self) -> dict[str, float]:
        return {name: statistics.median(times) for name, times in self.all.items()}

    def add(self, name: str, seconds: float, peak: int | None = None) -> None:
        """Keep one measurement, and print it in case that it is the last one."""
        self.all.setdefault(name, []).append(seconds)
        if peak is not None:
            self.peaks[name] = max(peak, self.peaks.get(name, 0))
        if not self.quiet:
            print(f"  {name}: {seconds:.2f} s", flush=True)

    def document(self) -> dict:
        return {
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "seconds": self.seconds,
            "all": self.all,
            "stages": self.stages,
            "peaks": self.peaks,
            "stayed_in_page_cache": max(self.stayed, default=None),
        }


def measure(arguments: argparse.Namespace, source: Path, output: Path, figures: Figures) -> None:
    """Run everything for one source."""
    cold = files_of(source) if arguments.cold else []
    in_this_process(arguments, source, output, figures)
    for _ in range(0 if arguments.no_process else arguments.repeats):
        figures.stayed.append(prepare(output, cold))
        figures.add(PROCESS, *process(source, output, arguments))
        figures.add(IMPORT, import_torch())
    for _ in range(arguments.repeats if arguments.devices else 0):
        figures.stayed.append(prepare(output, cold))
        figures.add(DEVICES, *process(source, output, arguments, devices=arguments.devices))
    if not arguments.no_peer:
        figures.stayed.append(prepare(output, cold))
        figures.add(PEER, *peer_alone(source, output, arguments))
    shutil.rmtree(output, ignore_errors=True)


def in_this_process(
    arguments: argparse.Namespace, source: Path, output: Path, figures: Figures
) -> None:
    """Time the floor and the run, of small tensors with and without `together`."""
    cold = files_of(source) if arguments.cold else []
    device = device_of(arguments.device)
    options = Options(force=True, max_memory=arguments.max_memory)
    with quantization(source, output, Request(scheme=arguments.scheme)) as (plan, checkpoint, _):
        figures.bytes_in, figures.bytes_out = plan.bytes_in, plan.bytes_out

        def whole(*devices: str) -> dict[str, float]:
            kept, together.DEVICES = together.DEVICES, frozenset(devices) or together.DEVICES
            try:
                return run(plan, checkpoint, output, device, options).stages
            finally:
                together.DEVICES = kept

        def told(*devices: str) -> None:
            figures.stages = whole(*devices) | {"start": 0.0}  # of this process's start it has none

        actions = {
            "floor": lambda: floor(plan, checkpoint, output, device, arguments.max_memory),
            RUN: told,
        }
        if arguments.experts:  # the slowest last
            del actions[RUN]
            actions[TOGETHER] = lambda: told(device.type)
            actions[ONE_BY_ONE] = lambda: whole("none")
        for _ in range(arguments.repeats):
            for name, action in actions.items():
                figures.stayed.append(prepare(output, cold))
                figures.add(name, timed(action))


def warm_up(arguments: argparse.Namespace, root: Path) -> float | None:
    """Compile and pin once, on a small model; return the seconds of a process that compiles."""
    source, output = root / "small", root / "out"
    make(source, 1e8, small=arguments.experts)
    in_this_process(
        argparse.Namespace(**vars(arguments) | ONCE), source, output, Figures(quiet=True)
    )
    seconds = None
    if not arguments.no_first:
        with tempfile.TemporaryDirectory() as cache:
            seconds, _ = process(source, output, arguments, cache)
    shutil.rmtree(source)
    shutil.rmtree(output, ignore_errors=True)
    return seconds


def files_of(source: Path) -> list[Path]:
    return sorted(source.glob("*.safetensors"))


def prepare(output: Path, cold: list[Path]) -> float:
    """Remove the output, and `cold` files from the page cache; return the share that stayed."""
    shutil.rmtree(output, ignore_errors=True)
    if not cold:
        return 1.0
    os.sync()
    for path in cold:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    return statistics.mean(resident(path) for path in cold)


def resident(path: Path) -> float:
    """Return the share of a file that is in the page cache."""
    size = path.stat().st_size
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as mapped:
        pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        at = np.frombuffer(mapped, np.uint8).ctypes.data
        if libc.mincore(
            ctypes.c_void_p(at), ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data)
        ):
            return float("nan")
        return float((pages & 1).mean())


def timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started
