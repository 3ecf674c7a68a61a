"""Print what was measured, of one source and from one to the next."""

import itertools
from collections.abc import Sequence

from pipeline_measure import DEVICES, IMPORT, ONE_BY_ONE, PROCESS, RUN, TOGETHER, Figures


def show(figures: Figures) -> None:
    """Print a line for each that was measured; ratios to the floor."""
    seconds = figures.seconds
    print(f"\n{figures.bytes_in / 1e9:.2f} GB -> {figures.bytes_out / 1e9:.2f} GB", end="")
    print(f", {100 * max(figures.stayed, default=1):.0f} % of the source in the page cache")
    base = seconds.get("floor", float("nan"))
    for name, one in seconds.items():
        rate = figures.bytes_in / one / 1e9
        peak = f"  peak {figures.peaks[name] / 2**20:6.0f} MiB" if name in figures.peaks else ""
        print(f"{name:13} {one:8.2f} s  {rate:7.3f} GB/s  {one / base:6.2f} x floor{peak}")
    if IMPORT in seconds:
        allowed = base + seconds[IMPORT] + 1.5
        print(f"process: {seconds[PROCESS]:.2f} s of {allowed:.2f} s allowed")
    if TOGETHER in seconds and ONE_BY_ONE in seconds:
        print(f"one by one takes {seconds[ONE_BY_ONE] / seconds[TOGETHER]:.2f} x together")
    if PROCESS in seconds and DEVICES in seconds:
        print(f"devices take {seconds[DEVICES] / seconds[PROCESS]:.2f} x process")
    stages = {name: round(value, 2) for name, value in figures.stages.items()}
    print("stages:", stages, flush=True)


def show_line(found: Sequence[Figures]) -> None:
    """Print how time grows with size, and that memory does not."""
    for less, more in itertools.pairwise(found):
        name = TOGETHER if TOGETHER in more.seconds else RUN
        if name not in more.seconds:
            return
        bytes_in = more.bytes_in / less.bytes_in
        seconds = more.seconds[name] / less.seconds[name]
        print(f"{bytes_in:.2f} x the bytes: {seconds:.2f} x the time of the run", end="")
        if PROCESS in more.peaks:
            peaks = [one.peaks[PROCESS] / 2**20 for one in (less, more)]
            print(f", peak {peaks[0]:.0f} and {peaks[1]:.0f} MiB", end="")
        print()
