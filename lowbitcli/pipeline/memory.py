"""How much a run may hold at once, so that the whole process stays below `--max-memory`.

    cap = what is resident when the run begins + RESERVE + held + threads * slice * cost

`cost` is the bytes that an element of a slice takes at its worst, temporaries included, measured
on the torch references; on a GPU the host only holds what is read and what is written, in buffers
of powers of two.
"""

import contextlib
import ctypes
import math
import os
import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from lowbitcli.errors import UsageError
from lowbitcli.pipeline.read import BLOCKS
from lowbitcli.pipeline.slices import is_turned, unit_rows
from lowbitcli.plan.nouns import Part, Plan, Weight

GIB = 1 << 30
DEFAULT, LEAST = 2 * GIB, GIB
RESERVE = 128 << 20  # what allocators keep, threads' stacks, checksums, the manifest
M_MMAP_THRESHOLD, MAPPED = -3, 8 << 20  # of malloc.h; bytes
CPU_COST = 96  # bytes for each element of a slice
CPU_ELEMENTS, GPU_ELEMENTS = 1 << 19, 1 << 24
GPU_THREADS, GPU_FEW = 8, 4
GPU_RESERVE = 384 << 20  # kernels that are loaded and compiled while it runs
GPU_HELD = 8 << 30
GPU_LEAST = 256 << 20
GPU_APART = 64 << 20  # what its allocator rounds up and keeps for streams
# Bytes of the GPU for each element of a slice at its worst: by kernels, and by torch where a rule
# has no kernel.
ON_GPU_COST, ON_GPU_SEARCH_COST = 24, 96


@dataclass(frozen=True)
class Budget:
    """Threads, elements of a slice, and the bytes that may be held between two passes."""

    threads: int
    elements: int
    held: int


def budget(plan: Plan, cap: int, device: torch.device, gpu_cap: int | None = None) -> Budget:
    """Return what a run of `plan` may use, with `cap` bytes for the whole process and `gpu_cap` of
    the GPU.

    Raises:
        UsageError: a cap is below the least.
    """
    if cap < LEAST:
        raise UsageError(
            f"{cap} bytes of memory are too few", hint="--max-memory 1GiB is the least"
        )
    if gpu_cap is not None and gpu_cap < GPU_LEAST:
        raise UsageError(
            f"{gpu_cap} bytes of the GPU are too few", hint="--max-gpu-memory 256MiB is the least"
        )
    cuda = device.type == "cuda"
    if cuda:
        _give_back()
    else:
        _map_what_is_large()
    free = max(0, cap - resident() - (GPU_RESERVE if cuda else RESERVE))
    cost = _moved(plan) if cuda else CPU_COST
    threads = GPU_THREADS if cuda else len(os.sched_getaffinity(0))
    wanted = GPU_ELEMENTS if cuda else CPU_ELEMENTS
    unit = max((unit_rows(w) * w.shape[-1] for w in plan.weights if not w.copies), default=1)
    working = free * 3 // 4
    block = max((_block(weight) for weight in plan.weights if not weight.copies), default=0)
    if cuda:  # fewer threads before smaller slices: each costs a millisecond of Python
        threads = max(GPU_FEW, min(threads, working // (wanted * cost + block)))
    threads = max(1, min(threads, working // (unit * cost + block)))
    elements = max(1, min(wanted, (working // threads - block) // cost))
    if not cuda:
        held = max(0, free - threads * (max(elements, unit) * cost + block))
        return Budget(threads, elements, held)
    elements = 1 << (elements.bit_length() - 1)
    # What is held between two passes stays on the device.
    if gpu_cap is None:
        return Budget(threads, elements, min(GPU_HELD, torch.cuda.mem_get_info(device)[0] // 4))
    return within_gpu(plan, gpu_cap, Budget(threads, elements, 0))


def _map_what_is_large() -> None:
    """Have glibc map and unmap what is larger than MAPPED, for the whole process.

    By itself it stops to do so once such a piece has been freed, and then keeps slices of wide
    matrices in heaps that are given back only from their ends: one run in eight of a matrix of
    32768 x 32768 took 1.46 GB of 1 GiB, beside others.
    """
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MAPPED)


def _give_back() -> None:
    """Have torch give back the pinned memory that an earlier run of this process left with it."""
    empty = getattr(torch.accelerator, "empty_host_cache", None)
    empty = empty or getattr(torch._C, "_host_emptyCache", None)  # torch before 2.12
    if empty is not None:
        with contextlib.suppress(RuntimeError):  # it has no memory yet
            empty()


def within_gpu(plan: Plan, cap: int, wanted: Budget) -> Budget:
    """Return what may be used of what is wanted, and how much may be held, with `cap` bytes of the
    GPU."""
    computed = [weight for weight in plan.weights if not weight.copies]
    unit = max((unit_rows(weight) * weight.shape[-1] for weight in computed), default=1)
    searches = any(weight.rule not in ("", "amax") for weight in computed)
    cost = ON_GPU_SEARCH_COST if searches else ON_GPU_COST
    free = cap - GPU_APART
    threads = max(1, min(wanted.threads, free * 3 // 4 // (unit * cost)))
    elements = max(1, min(wanted.elements, free * 3 // 4 // (threads * cost)))
    return Budget(threads, elements, max(0, free - threads * max(elements, unit) * cost))


@contextlib.contextmanager
def gpu_limit(device: torch.device, cap: int | None) -> Iterator[None]:
    """Let torch reserve no more than `cap` bytes of a GPU in this `with`."""
    if cap is None or device.type != "cuda":
        yield
        return
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def _moved(plan: Plan) -> int:
    """Return the most bytes that are read and written for an element, as buffers take them."""
    moved = [(w.bytes_in + w.bytes_out) / w.numel for w in plan.weights if not w.copies and w.numel]
    return math.ceil(1.5 * max(moved, default=1.0))


def _block(weight: Weight) -> int:
    """Return the bytes of the matrices that are held whole, as they lie transposed: on the way in,
    and on the way out twice."""
    lead = math.prod(weight.shape[:-2])
    read = sum(BLOCKS * part.spec.nbytes // lead for part in _turned(weight.reads))
    if any(part.view is not None for part in weight.reads.values()):
        read = sum(part.nbytes for part in _turned(weight.reads))
    return read + sum(2 * part.spec.nbytes // lead for part in _turned(weight.writes))


def _turned(parts: Mapping[str, Part]) -> list[Part]:
    return [part for part in parts.values() if is_turned(part)]


def resident() -> int:
    """Return the bytes of this process that are in memory now."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def peak() -> int:
    """Return the most bytes of this process that were ever in memory.

    Not getrusage, whose figure a new program takes over from the process that started it.
    """
    with open("/proc/self/status", "rb") as file:
        said = next(line for line in file if line.startswith(b"VmHWM:"))
    return int(said.split()[1]) * 1024
