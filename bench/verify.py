"""What a verification costs: its time against that of reading both checkpoints, and its memory.

    python bench/verify.py --mb 256 --schemes nvfp4 mxfp8
    python bench/verify.py --mb 512 2048 --memory
    python bench/verify.py --mb 4096 --device cuda

| column | what it is |
|---|---|
| read | every byte of source and output with `pread`, in pieces of 16 MB, one after the other |
| alone | `verify OUT`: structure, scales, order of codes, hashes of the manifest |
| against | `verify OUT --against SRC`: all of that, and every element |
| CPU | against / read, both in seconds of all threads: what load leaves as it is |
| of reading | against / read |

All in this process, one after the other, `--repeats` times; medians of times, and the median of
the ratios of one round, which load moves less. `--memory` measures VmHWM instead, each in a process
that did nothing before: it must not grow with the checkpoint. One JSON line at the end has all.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from lowbitcli import api
from lowbitcli.pipeline.memory import peak

ROWS, COLS = 4096, 2048  # of a weight: 16 MiB in BF16
PIECE = 16 << 20


def source(folder: Path, megabytes: int) -> Path:
    """Write a model of BF16 weights in shards of at most 512 MB."""
    root = folder / f"source-{megabytes}"
    root.mkdir()
    (root / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["L"]}))
    count = max(1, megabytes * 1_000_000 // (ROWS * COLS * 2))
    generator = torch.Generator().manual_seed(megabytes)
    places = {}
    for first in range(0, count, 30):
        names = [
            f"model.layers.{n}.mlp.down_proj.weight" for n in range(first, min(count, first + 30))
        ]
        file = f"model-{first // 30 + 1:05d}.safetensors"
        tensors = {x: torch.randn(ROWS, COLS, generator=generator).bfloat16() * 0.02 for x in names}
        save_file(tensors, root / file, {"format": "pt"})
        places |= dict.fromkeys(names, file)
    total = count * ROWS * COLS * 2
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))
    return root


def read(*roots: Path) -> tuple[float, float]:
    """Return the seconds that reading every tensor file takes, by the clock and of the CPU."""
    start, busy, buffer = time.perf_counter(), time.process_time(), bytearray(PIECE)
    for root in roots:
        for path in sorted(root.glob("*.safetensors")):
            with open(path, "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
    return time.perf_counter() - start, time.process_time() - busy


def timed(output: Path, against: Path | None, device: str) -> tuple[float, float]:
    """Return the seconds that a verification takes, by the clock and of the CPU; refuse one that
    finds something."""
    start, busy = time.perf_counter(), time.process_time()
    found = api.verify(output, against=against, device=device)
    if found.failures:
        raise SystemExit(f"{output}: {found.failures[0].message}")
    return time.perf_counter() - start, time.process_time() - busy


def size(*roots: Path) -> int:
    return sum(path.stat().st_size for root in roots for path in root.glob("*.safetensors"))


def speed(model: Path, scheme: str, repeats: int, folder: Path, device: str) -> dict[str, object]:
    output = folder / f"{model.name}-{scheme}"
    api.quantize(model, output, api.Request(scheme=scheme), device=device)
    read(model, output)  # into the page cache
    timed(output, model, device)  # compile, and start the device
    rounds = [
        (read(model, output), timed(output, None, device), timed(output, model, device))
        for _ in range(repeats)
    ]
    reads, alone, against = (
        statistics.median(one[0] for one in column) for column in zip(*rounds, strict=True)
    )
    ratio = statistics.median(one[2][0] / one[0][0] for one in rounds)
    busy = statistics.median(one[2][1] for one in rounds)
    cpu = busy / statistics.median(one[0][1] for one in rounds)
    gigabytes = size(model, output) / 1e9
    print(
        f"{scheme:14} {gigabytes:6.2f} GB  read {reads:7.2f} s  alone {alone:7.2f} s  "
        f"against {against:7.2f} s ({busy:.2f} s of CPU)  CPU {cpu:6.1f}  of reading {ratio:6.1f}"
    )
    result = {"scheme": scheme, "gb": gigabytes, "rounds": rounds}
    return {**result, "ratio": ratio, "cpu": cpu, "busy": busy}


CHILD = """
import sys
from lowbitcli import api
from lowbitcli.pipeline.memory import peak
found = api.verify(sys.argv[1], against=sys.argv[2], device=sys.argv[3])
assert not found.failures, found.failures[0]
print(peak())
"""


def memory(model: Path, scheme: str, folder: Path, device: str) -> dict[str, object]:
    output = folder / f"{model.name}-{scheme}"
    if not output.exists():
        api.quantize(model, output, api.Request(scheme=scheme), device=device)
    words = [sys.executable, "-c", CHILD, str(output), str(model), device]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    before = subprocess.run(
        [sys.executable, "-c", "import lowbitcli.api; from lowbitcli.pipeline.memory import peak; "
         "print(peak())"], capture_output=True, text=True, check=True,
    )  # fmt: skip
    most, base = int(done.stdout), int(before.stdout)
    print(f"{scheme:14} {size(model, output) / 1e9:6.2f} GB  VmHWM {most / 1e6:7.0f} MB, "
          f"of which imports {base / 1e6:5.0f} MB")  # fmt: skip
    return {"scheme": scheme, "gb": size(model, output) / 1e9, "peak": most, "imports": base}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mb", type=int, nargs="+", default=[256])
    parser.add_argument("--schemes", nargs="+", default=["nvfp4", "mxfp8", "fp8_channel"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--folder", type=Path, default=None)
    asked = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        results = []
        for megabytes in asked.mb:
            model = source(Path(name), megabytes)
            for scheme in asked.schemes:
                if asked.memory:
                    results.append(memory(model, scheme, Path(name), asked.device))
                else:
                    results.append(speed(model, scheme, asked.repeats, Path(name), asked.device))
    print(json.dumps({"results": results, "peak": peak(), "threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main()
