"""End to end against the floor: how long a whole run takes, and how long its bytes alone would.

    python bench/pipeline.py --gb 4 --scheme nvfp4 --folder /dev/shm
    python bench/pipeline.py --gb 4 --folder /data --cold

| line | what it does |
|---|---|
| floor | moves every byte in and out and back, synced, with the run's slots, threads and calls |
| run | `lowbitcli.pipeline.run` in this process, everything imported |
| process | `lowbit quantize` from start to exit, and `import torch` alone beside it |
| peer | safetensors' `load_file`, the same kernels on whole tensors, `save_file` |

All in one go, one after the other, `--repeats` times; medians are shown, and ratios to the floor.
`--cold` drops the source from the page cache before each. One JSON line at the end has everything.
"""

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from lowbitcli.api import Request
from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.checkpoint.writer import StagedOutput
from lowbitcli.pipeline import memory
from lowbitcli.pipeline.arithmetic import device_of, ops_of
from lowbitcli.pipeline.read import buffer
from lowbitcli.pipeline.run import Options, run
from lowbitcli.plan.nouns import Plan
from lowbitcli.plan.prepare import quantization

LAYER = (  # an 8B model's, in billions of bytes 0.436
    ("self_attn.q_proj", 4096, 4096),
    ("self_attn.k_proj", 1024, 4096),
    ("self_attn.v_proj", 1024, 4096),
    ("self_attn.o_proj", 4096, 4096),
    ("mlp.gate_proj", 14336, 4096),
    ("mlp.up_proj", 14336, 4096),
    ("mlp.down_proj", 4096, 14336),
)
SHARD = 4 << 30


def shapes(size: float) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of a model of about `size` bytes; a small one has narrow layers."""
    shrink = 1
    while size / (436e6 / shrink**2) < 4 and shrink < 16:
        shrink *= 2
    number, left = 0, size
    while left > 0 or not number:
        for name, rows, cols in LAYER:
            shape = (rows // shrink, cols // shrink)
            left -= 2 * shape[0] * shape[1]
            yield f"model.layers.{number}.{name}.weight", shape
        yield f"model.layers.{number}.input_layernorm.weight", (4096 // shrink,)
        number += 1


def make(folder: Path, size: float) -> None:
    """Write a bf16 model in shards, with an index, a block of random numbers over and over."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    held = 0
    for name, shape in shapes(size):
        count = 2 * int(np.prod(shape))
        if held + count > SHARD:
            shards.append({})
            held = 0
        shards[-1][name] = shape
        held += count
    folder.mkdir(parents=True)
    block = (torch.randn(1 << 22) * 0.02).bfloat16().view(torch.uint8).numpy().tobytes()
    weight_map = {}
    for index, held_shapes in enumerate(shards):
        file = f"model-{index + 1:05}-of-{len(shards):05}.safetensors"
        header, offset = {}, 0
        for name, shape in held_shapes.items():
            count = 2 * int(np.prod(shape))
            header[name] = {
                "dtype": "BF16",
                "shape": shape,
                "data_offsets": [offset, offset + count],
            }
            offset += count
            weight_map[name] = file
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for start in range(0, offset, len(block)):
                out.write(block[: min(len(block), offset - start)])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))


def floor(plan: Plan, source: Checkpoint, output: Path, device: torch.device, cap: int) -> None:
    """Move the bytes of a run, and nothing else."""
    budget = memory.budget(plan, cap, device)
    slot = max(2 * budget.elements, 8 << 20)
    files = {file.name: file for file in plan.files}
    with StagedOutput(output, directory=True) as staged:
        with ThreadPoolExecutor(min(8, len(files))) as pool:
            list(pool.map(lambda x: staged.create(x.name, x.size), plan.files))

        def move(name: str, start: int, stop: int, writes: list[tuple[str, int, int]]) -> None:
            memory_of = buffer(max(stop - start, *(b - a for _, a, b in writes), 1), device)
            view = memory_of.numpy().data
            source.read_into(name, view[: stop - start], start)
            for file, first, last in writes:
                staged.write(file, first, view[: last - first])

        def back(file: str, start: int, stop: int) -> None:
            staged.read(file, start, stop - start)

        with ThreadPoolExecutor(budget.threads) as pool:
            for one in [pool.submit(move, *task) for task in _tasks(plan, files, slot)]:
                one.result()
            for name in files:
                staged.sync(name)
                staged.forget(name)
            pieces = [
                (file.name, start, min(start + slot, file.size))
                for file in plan.files
                for start in range(0, file.size, slot)
            ]
            list(pool.map(lambda piece: back(*piece), pieces))
        staged.publish()


def _tasks(plan: Plan, files, slot: int):
    """Yield (tensor, start, stop, [(file, start, stop)]): slots of the source and their share of
    what comes of them."""
    for weight in plan.weights:
        for read in weight.reads.values():
            size = read.spec.nbytes
            count = max(1, -(-size // slot))
            for i in range(count):
                writes = []
                for part in weight.writes.values():
                    entry = files[part.file].entries[part.spec.name]
                    length = entry.stop - entry.start
                    first, last = length * i // count, length * (i + 1) // count
                    writes.append((part.file, entry.start + first, entry.start + last))
                yield read.spec.name, size * i // count, size * (i + 1) // count, writes


def peer(plan: Plan, source: Path, output: Path, device: torch.device) -> None:
    """Do the same the plain way: whole files, whole tensors."""
    output.mkdir()
    targets = {weight.name: weight for weight in plan.weights}
    for file in plan.files:
        made = {}
        for name, w in load_file(source / file.name, device=str(device)).items():
            weight = targets[name]
            if weight.target is None:
                made[name] = w
                continue
            ops = ops_of(weight.target)
            parts = ops.quantize(w, ops.shared(ops.measure(w), weight.rule), weight.rule)
            made |= {weight.writes[p].spec.name: t.contiguous() for p, t in parts.items()}
        save_file(made, output / file.name)
        fd = os.open(output / file.name, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def process(source: Path, output: Path, scheme: str, device: str, cap: int) -> tuple[float, int]:
    """Return seconds and peak bytes of `lowbit quantize`, start to exit."""
    command = [sys.executable, "-m", "lowbitcli", "quantize", str(source), "-o", str(output), "-q"]
    command += ["--scheme", scheme, "--device", device, "--max-memory", str(cap), "--json"]
    started = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return time.perf_counter() - started, json.loads(done.stdout)["peak_rss"]


def import_torch() -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - started


def timed(action: Callable[[], object], output: Path, cold: list[Path]) -> float:
    """Return the seconds of `action`, which writes `output`; `cold` files are dropped before."""
    shutil.rmtree(output, ignore_errors=True)
    os.sync()
    for path in cold:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def measure(arguments: argparse.Namespace, source: Path, output: Path) -> dict:
    """Run everything and return the figures."""
    device = device_of(arguments.device)
    cold = sorted(source.glob("*.safetensors")) if arguments.cold else []
    found: dict[str, list[float]] = {}
    stages: dict[str, float] = {}
    peaks = []
    with quantization(source, output, Request(scheme=arguments.scheme)) as (plan, checkpoint, _):
        options = Options(force=True, max_memory=arguments.max_memory)

        def whole() -> None:
            stages.update(run(plan, checkpoint, output, device, options).stages)

        actions = {
            "floor": lambda: floor(plan, checkpoint, output, device, arguments.max_memory),
            "run": whole,
        }
        if not arguments.no_peer:
            actions["peer"] = lambda: peer(plan, source, output, device)
        for _ in range(arguments.repeats):
            for name, action in actions.items():
                found.setdefault(name, []).append(timed(action, output, cold))
            timed(lambda: None, output, cold)
            seconds, peak = process(
                source, output, arguments.scheme, arguments.device, arguments.max_memory
            )
            found.setdefault("process", []).append(seconds)
            peaks.append(peak)
            found.setdefault("import torch", []).append(import_torch())
        sizes = {"bytes_in": plan.bytes_in, "bytes_out": plan.bytes_out}
    return {
        "machine": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "scheme": arguments.scheme,
        "cold": arguments.cold,
        **sizes,
        "seconds": {name: statistics.median(times) for name, times in found.items()},
        "all": found,
        "stages": stages,
        "peak_rss_of_the_process": max(peaks),
        "peak_rss_of_this_one": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def show(found: dict) -> None:
    base = found["seconds"]["floor"]
    print(f"{found['bytes_in'] / 1e9:.2f} GB -> {found['bytes_out'] / 1e9:.2f} GB", end=", ")
    print(f"{found['scheme']}, {found['device']}, {found['cpus']} CPUs, torch {found['torch']}")
    for name, seconds in found["seconds"].items():
        rate = found["bytes_in"] / seconds / 1e9
        print(f"{name:13} {seconds:8.2f} s  {rate:7.3f} GB/s  {seconds / base:6.2f} x floor")
    allowed = base + found["seconds"]["import torch"] + 1.5
    print(f"process: {found['seconds']['process']:.2f} s of {allowed:.2f} s allowed", end=", ")
    print(f"peak {found['peak_rss_of_the_process'] / 2**20:.0f} MiB")
    print("stages:", {name: round(value, 2) for name, value in found["stages"].items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gb", type=float, default=1.0, help="size of the source [1]")
    parser.add_argument("--scheme", default="nvfp4")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--folder", type=Path, default=Path("/tmp"), help="where to work [/tmp]")
    parser.add_argument("--max-memory", type=int, default=memory.DEFAULT)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="drop the source from the page cache")
    parser.add_argument("--no-peer", action="store_true")
    arguments = parser.parse_args()
    root = arguments.folder / f"lowbit-bench-{os.getpid()}"
    try:
        make(root / "source", arguments.gb * 1e9)
        found = measure(arguments, root / "source", root / "output")
        show(found)
        print(json.dumps(found))
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
