"""Time every kernel beside its peers and the copy bandwidth of the same run, and print a table.

    python kernels/bench/run.py [--only nvfp4 mx] [--shapes 4096x4096] [--alone] [--json FILE]

Needs a CUDA device, and `lowbit_kernels` installed or on PYTHONPATH. Peers (torchao, comfy-
kitchen) take part where they are installed.
"""

import argparse
import datetime
import importlib
import json
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from roofline import Row, copy_bandwidth, measure

FAMILIES = ("fp8", "mx", "nvfp4", "kv", "fakes", "grouped", "stores", "searches", "errors")
SHAPES = ("4096x4096", "14336x4096", "16384x16384", "128x2048x768")
PACKAGES = ("torch", "triton", "torchao", "comfy-kitchen")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _line(row: Row) -> str:
    if row.problem:
        return f"| {row.operation} | {row.shape} | {row.contender} | | | {row.problem} |"
    moved = "" if row.share_moved is None else f"{100 * row.share_moved:.1f}"
    figures = f"{row.milliseconds:.4f} | {100 * row.share:.1f} | {moved}"
    return f"| {row.operation} | {row.shape} | {row.contender} | {figures} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=FAMILIES, choices=FAMILIES)
    parser.add_argument("--shapes", nargs="*", default=SHAPES)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--alone", action="store_true", help="leave out all contenders but ours")
    chosen = parser.parse_args()
    bandwidth = copy_bandwidth()
    head = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "copy_gb_s": round(bandwidth, 1),
        **{package: _version(package) for package in PACKAGES},
    }
    print(json.dumps(head))
    print(
        "| operation | shape | who | ms | % of copy | % by bytes moved |\n|---|---|---|---|---|---|"
    )
    rows: list[Row] = []
    for family in chosen.only:
        for operation in importlib.import_module(family).OPERATIONS:
            for shape in operation.shapes or chosen.shapes:
                sides = [int(n) for n in shape.split("x")]
                for row in measure(operation, sides, bandwidth, alone=chosen.alone):
                    rows.append(row)
                    print(_line(row), flush=True)
                torch.cuda.empty_cache()
            torch.compiler.reset()
    if chosen.json:
        chosen.json.write_text(json.dumps({"head": head, "rows": [asdict(r) for r in rows]}))


if __name__ == "__main__":
    main()
