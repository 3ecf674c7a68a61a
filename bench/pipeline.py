"""End to end against the floor: how long a whole run takes, and how long its bytes alone would.

    python bench/pipeline.py --gb 1 4 16 --scheme nvfp4 --folder /dev/shm
    python bench/pipeline.py --gb 4 --folder /data --cold
    python bench/pipeline.py --gb 1 --experts
    python bench/pipeline.py --gb 4 --devices cuda:0,cuda:0
    bench/gpu.sh OUT                                       # all that an H200 is asked

| line | what it does |
|---|---|
| floor | moves every byte in and out and back, synced, with the run's slots, threads and calls |
| run | `lowbitcli.pipeline.run` in this process, everything imported and compiled |
| together, one by one | with `--experts`, many tensors of 3 MB: `run` with and without `together` |
| process | `lowbit quantize` from start to exit, and `import torch` alone beside it |
| devices | the same with `--devices` |
| first | the same with an empty cache of compiled kernels, once |
| peer | safetensors' `load_file`, the same kernels on whole tensors, `save_file`; in a process |

All in one go, one after the other, `--repeats` times; medians are shown, and ratios to the floor.
`--cold` syncs and drops the source from the page cache before each, and says how much stayed there.
Peaks are VmHWM of processes that did nothing else. Each time is printed as it comes; SIGTERM ends
the bench with a table of what there is. One JSON line at the end has everything.
"""

import argparse
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import torch
from pipeline_measure import Figures, measure, warm_up
from pipeline_peers import as_peer
from pipeline_show import show, show_line
from pipeline_source import make

from lowbitcli.errors import StoppedError
from lowbitcli.pipeline import memory
from lowbitcli.pipeline.arithmetic import device_of


def arguments_of(line: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gb", type=float, nargs="+", default=[1.0], help="sizes of sources [1]")
    parser.add_argument("--scheme", default="nvfp4")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--folder", type=Path, default=Path("/tmp"), help="where to work [/tmp]")
    parser.add_argument("--max-memory", type=int, default=memory.DEFAULT)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--cold", action="store_true", help="drop the source from the page cache")
    parser.add_argument("--experts", action="store_true", help="a source of many small tensors")
    parser.add_argument("--devices", help="a process for each of these too")
    parser.add_argument("--no-first", action="store_true", help="none with an empty cache")
    parser.add_argument("--no-process", action="store_true")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--peer", nargs=2, type=Path, metavar=("SRC", "DST"), help="be the peer")
    return parser.parse_args(line)


def about(arguments: argparse.Namespace) -> dict:
    """Return what the figures are of."""
    device = device_of(arguments.device)
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "scheme": arguments.scheme,
        "cold": arguments.cold,
        "experts": arguments.experts,
        "load": os.getloadavg()[0],
        "max_memory": arguments.max_memory,
    }


def bench(arguments: argparse.Namespace, root: Path) -> None:
    """Measure every size, and show what there is of it even where that is cut short."""
    told, found = about(arguments), list[Figures]()
    print(" ".join(f"{name}={value}" for name, value in told.items()), flush=True)
    first = warm_up(arguments, root)
    if first is not None:
        print(f"first: {first:.2f} s for a process that compiles its kernels, 0.1 GB")
    try:
        for size in arguments.gb:
            make(root / "source", size * 1e9, small=arguments.experts)
            found.append(Figures())
            try:
                measure(arguments, root / "source", root / "output", found[-1])
            finally:
                show(found[-1])
            shutil.rmtree(root / "source")
    finally:
        show_line(found)
        print(json.dumps({**told, "first": first, "sizes": [one.document() for one in found]}))


def stop(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def main() -> None:
    arguments = arguments_of(sys.argv[1:])
    if arguments.peer:
        as_peer(arguments.peer[0], arguments.peer[1], arguments)
        return
    signal.signal(signal.SIGTERM, stop)
    root = arguments.folder / f"lowbit-bench-{os.getpid()}"
    try:
        bench(arguments, root)
    except StoppedError as error:  # the run had the signal
        raise SystemExit(128 + signal.SIGTERM) from error
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
