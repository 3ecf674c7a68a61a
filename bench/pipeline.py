"""End to end against the floor: how long a whole run takes, and how long its bytes alone would.

    python bench/pipeline.py --gb 1 4 16 --scheme nvfp4 --folder /dev/shm
    python bench/pipeline.py --gb 4 --folder /data --cold
    python bench/pipeline.py --gb 4 --experts
    python bench/pipeline.py --gb 4 --devices cuda:0,cuda:0
    bench/gpu.sh OUT                                       # all that an H200 is asked, in 4 minutes

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
Peaks are VmHWM of processes that did nothing else. One JSON line at the end has everything.
"""

import argparse
import ctypes
import itertools
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
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
from lowbitcli.pipeline import memory, together
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
EXPERT = (("gate_proj", 768, 2048), ("up_proj", 768, 2048), ("down_proj", 2048, 768))
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


def experts(size: float) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of about `size` bytes of experts, of 3 MB; of few bytes smaller."""
    shrink = 1 if size >= 1e9 else 8
    number, left = 0, size
    while left > 0:
        stem = f"model.layers.{number // 128}.mlp.experts.{number % 128}."
        for name, rows, cols in EXPERT:
            shape = (rows // shrink, cols // shrink)
            left -= 2 * shape[0] * shape[1]
            yield f"{stem}{name}.weight", shape
        number += 1


def make(folder: Path, size: float, *, small: bool = False) -> None:
    """Write a bf16 model in shards, with an index, a block of random numbers over and over."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    held = 0
    for name, shape in (experts if small else shapes)(size):
        count = 2 * int(np.prod(shape))
        if held + count > SHARD:
            shards.append({})
            held = 0
        shards[-1][name] = shape
        held += count
    folder.mkdir(parents=True)
    block = (torch.randn(1 << 22) * 0.02).bfloat16().view(torch.uint8).numpy().tobytes()
    weight_map, parts = {}, []
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
        parts.append((folder / file, len(text).to_bytes(8, "little") + text, offset))

    def write(part: tuple[Path, bytes, int]) -> None:
        path, head, size = part
        with path.open("wb") as out:
            out.write(head)
            for start in range(0, size, len(block)):
                out.write(memoryview(block)[: min(len(block), size - start)])
            out.flush()
            os.fsync(out.fileno())

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, parts))
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


def process(
    source: Path,
    output: Path,
    arguments: argparse.Namespace,
    cache: str | None = None,
    devices: str | None = None,
) -> tuple[float, int]:
    """Return seconds and peak bytes of `lowbit quantize`, start to exit."""
    command = [sys.executable, "-m", "lowbitcli", "quantize", str(source), "-o", str(output), "-q"]
    command += ["--devices", devices] if devices else ["--device", arguments.device]
    command += ["--scheme", arguments.scheme, "--json"]
    command += ["--max-memory", str(arguments.max_memory)]
    environment = os.environ | ({} if cache is None else {"TRITON_CACHE_DIR": cache})
    started = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment)
    return time.perf_counter() - started, json.loads(done.stdout)["peak_rss"]


def peer_alone(source: Path, output: Path, arguments: argparse.Namespace) -> tuple[float, int]:
    """Return seconds, without its imports, and peak bytes of a process that is the peer."""
    command = [sys.executable, __file__, "--peer", str(source), str(output)]
    command += ["--scheme", arguments.scheme, "--device", arguments.device]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    found = json.loads(done.stdout)
    return found["seconds"], found["peak"]


def as_peer(source: Path, output: Path, arguments: argparse.Namespace) -> None:
    """Be the peer, and print what it took."""
    device = device_of(arguments.device)
    with quantization(source, output, Request(scheme=arguments.scheme)) as (plan, _, _):
        weight = next(weight for weight in plan.weights if weight.target is not None)
        if weight.target is not None:  # compiled before the clock starts
            ops, w = ops_of(weight.target), torch.ones(128, 1024).bfloat16().to(device)
            ops.quantize(w, ops.shared(ops.measure(w), weight.rule), weight.rule)
        started = time.perf_counter()
        peer(plan, source, output, device)
        print(json.dumps({"seconds": time.perf_counter() - started, "peak": memory.peak()}))


def import_torch() -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - started


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


def timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def measure(arguments: argparse.Namespace, source: Path, output: Path) -> dict:
    """Run everything for one size and return the figures."""
    device = device_of(arguments.device)
    cold = sorted(source.glob("*.safetensors")) if arguments.cold else []
    found: dict[str, list[float]] = {}
    stages: dict[str, float] = {}
    peaks: dict[str, int] = {}
    stayed = []
    with quantization(source, output, Request(scheme=arguments.scheme)) as (plan, checkpoint, _):
        options = Options(force=True, max_memory=arguments.max_memory)

        def whole(*devices: str) -> None:
            kept, together.DEVICES = together.DEVICES, frozenset(devices) or together.DEVICES
            try:
                found = run(plan, checkpoint, output, device, options).stages
            finally:
                together.DEVICES = kept
            stages.update(found | {"start": 0.0})  # this process's own start is none of it

        actions = {
            "floor": lambda: floor(plan, checkpoint, output, device, arguments.max_memory),
            "run": whole,
        }
        if arguments.experts:
            actions["one by one"] = lambda: whole("none")
            actions["together"] = lambda: whole(device.type)
        for _ in range(arguments.repeats):
            for name, action in actions.items():
                stayed.append(prepare(output, cold))
                found.setdefault(name, []).append(timed(action))
            stayed.append(prepare(output, cold))
            seconds, peaks["process"] = process(source, output, arguments)
            found.setdefault("process", []).append(seconds)
            found.setdefault("import torch", []).append(import_torch())
            if arguments.devices:
                stayed.append(prepare(output, cold))
                seconds, peaks["devices"] = process(
                    source, output, arguments, devices=arguments.devices
                )
                found.setdefault("devices", []).append(seconds)
        if not arguments.no_peer:
            stayed.append(prepare(output, cold))
            seconds, peaks["peer"] = peer_alone(source, output, arguments)
            found["peer"] = [seconds]
        sizes = {"bytes_in": plan.bytes_in, "bytes_out": plan.bytes_out}
    prepare(output, [])
    return {
        **sizes,
        "seconds": {name: statistics.median(times) for name, times in found.items()},
        "all": found,
        "stages": stages,
        "peaks": peaks,
        "stayed_in_page_cache": max(stayed),
    }


def warm_up(arguments: argparse.Namespace, root: Path) -> float:
    """Compile and pin once, on a small model; return the seconds of a process that compiles."""
    make(root / "small", 1e8)
    device = device_of(arguments.device)
    planned = quantization(root / "small", root / "out", Request(scheme=arguments.scheme))
    with planned as (plan, checkpoint, _):
        floor(plan, checkpoint, root / "out", device, arguments.max_memory)
        shutil.rmtree(root / "out")
        run(plan, checkpoint, root / "out", device, Options(force=True))
        shutil.rmtree(root / "out")
    with tempfile.TemporaryDirectory() as cache:
        seconds, _ = process(root / "small", root / "out", arguments, cache)
    shutil.rmtree(root / "small")
    return seconds


def show(found: dict) -> None:
    base = found["seconds"]["floor"]
    print(f"\n{found['bytes_in'] / 1e9:.2f} GB -> {found['bytes_out'] / 1e9:.2f} GB", end="")
    print(f", {100 * found['stayed_in_page_cache']:.0f} % of the source in the page cache")
    for name, seconds in found["seconds"].items():
        rate = found["bytes_in"] / seconds / 1e9
        peak = f"  peak {found['peaks'][name] / 2**20:6.0f} MiB" if name in found["peaks"] else ""
        print(f"{name:13} {seconds:8.2f} s  {rate:7.3f} GB/s  {seconds / base:6.2f} x floor{peak}")
    allowed = base + found["seconds"]["import torch"] + 1.5
    print(f"process: {found['seconds']['process']:.2f} s of {allowed:.2f} s allowed")
    print("stages:", {name: round(value, 2) for name, value in found["stages"].items()}, flush=True)


def show_line(found: list[dict]) -> None:
    """Show how time grows with size, and that memory does not."""
    for less, more in itertools.pairwise(found):
        bytes_in = more["bytes_in"] / less["bytes_in"]
        seconds = more["seconds"]["run"] / less["seconds"]["run"]
        peaks = [x["peaks"]["process"] / 2**20 for x in (less, more)]
        print(f"{bytes_in:.2f} x the bytes: {seconds:.2f} x the time of the run", end=", ")
        print(f"peak {peaks[0]:.0f} and {peaks[1]:.0f} MiB")


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
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--peer", nargs=2, type=Path, metavar=("SRC", "DST"), help="be the peer")
    return parser.parse_args(line)


def main() -> None:
    arguments = arguments_of(sys.argv[1:])
    if arguments.peer:
        as_peer(arguments.peer[0], arguments.peer[1], arguments)
        return
    root = arguments.folder / f"lowbit-bench-{os.getpid()}"
    device = device_of(arguments.device)
    about = {
        "cpus": len(os.sched_getaffinity(0)),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "scheme": arguments.scheme,
        "cold": arguments.cold,
        "experts": arguments.experts,
        "load": os.getloadavg()[0],
        "max_memory": arguments.max_memory,
    }
    print(" ".join(f"{name}={value}" for name, value in about.items()), flush=True)
    try:
        first = warm_up(arguments, root)
        print(f"first: {first:.2f} s for a process that compiles its kernels, 0.1 GB")
        found = []
        for size in arguments.gb:
            make(root / "source", size * 1e9, small=arguments.experts)
            found.append(measure(arguments, root / "source", root / "output"))
            shutil.rmtree(root / "source")
            show(found[-1])
        show_line(found)
        print(json.dumps({**about, "first": first, "sizes": found}))
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
