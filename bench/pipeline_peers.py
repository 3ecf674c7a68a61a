"""What a run is compared with: the command in a process of its own, and the same the plain way."""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from lowbitcli.api import Request
from lowbitcli.pipeline import memory
from lowbitcli.pipeline.arithmetic import device_of, ops_of
from lowbitcli.plan.nouns import Plan
from lowbitcli.plan.prepare import quantization

COMMAND = Path(__file__).with_name("pipeline.py")


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
    command = [sys.executable, str(COMMAND), "--peer", str(source), str(output)]
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
