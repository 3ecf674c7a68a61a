"""What a run of a plan will need of the machine: disk to the byte, memory about.

    memory = what a process with torch holds + what the plan and the journal hold of each weight
             + elements of the largest job * bytes an element takes

A job of more than a slice for each thread takes that much and what is held between two passes, and
nothing takes more than the cap. The bytes of an element were measured, temporaries of the
arithmetic included: on a CPU, and beside a GPU, where only what is read and written is here.
"""

import contextlib
import ctypes
import heapq
import os
from pathlib import Path

from lowbitcli.checkpoint.manifest import HASH_DIGITS, MANIFEST
from lowbitcli.plan.nouns import Plan, made_of

BASE = 300_000_000
PER_WEIGHT, PER_COPY = 10_000, 4_000  # 30,000 weights of NVFP4 took 294 MB more than few do
CAP = 2 << 30  # --max-memory where it is not given
SLICE, BAND = 1 << 19, 128  # elements that a thread works on; at least this many rows
PER_ELEMENT = {"nvfp4": 34, "mxfp8": 13, "fp8_tensor": 8, "fp8_channel": 8}
MOST_PER_ELEMENT = max(PER_ELEMENT.values())  # of a scheme that was not measured
GPU_DRIVER = "libcuda.so.1"
GPU_BASE = 750_000_000  # of this machine's memory, with a GPU's context and kernels
GPU_SLICE, GPU_THREADS, GPU_PER_ELEMENT = 1 << 24, 8, 5
ON_GPU_PER_ELEMENT = 4  # of the GPU's memory


def memory(plan: Plan, cap: int | None = None, *, gpu: bool = False) -> int:
    """Return about how many bytes of memory a run takes at its peak, within `cap`."""
    copies = sum(weight.copies for weight in plan.weights)
    known = PER_COPY * copies + PER_WEIGHT * (len(plan.weights) - copies)
    if gpu:
        slices = GPU_PER_ELEMENT * _at_once(plan, GPU_THREADS, GPU_SLICE)
        return min(cap or CAP, GPU_BASE + known + slices)
    most, threads = 0, len(os.sched_getaffinity(0))
    for job in plan.jobs:
        names = [w.target or w.source for w in job.weights if not w.copies]
        cost = max((PER_ELEMENT.get(s.name, MOST_PER_ELEMENT) for s in names if s), default=0)
        numel = sum(weight.numel for weight in job.weights)
        wide = max((w.shape[-1] for w in job.weights if not w.copies), default=0)
        cut = threads * max(SLICE, BAND * wide)
        held = 0 if numel <= cut else job.bytes_in
        most = max(most, cost * min(numel, cut) + held)
    return min(cap or CAP, BASE + known + most)


def gpu_memory(plan: Plan, cap: int | None = None) -> int:
    """Return about how many bytes of a GPU's memory a run takes at its peak, within `cap`: slices,
    and what each thread holds between two passes."""
    twice = [j for j in plan.jobs if any(w.target and w.target.passes > 1 for w in j.weights)]
    held = sum(heapq.nlargest(GPU_THREADS, (job.bytes_in for job in twice)))
    needed = held + ON_GPU_PER_ELEMENT * _at_once(plan, GPU_THREADS, GPU_SLICE)
    return min(needed, cap) if cap else needed


def _at_once(plan: Plan, threads: int, size: int) -> int:
    """Return the most elements that so many threads work on, each on a slice of at most `size`."""
    numels = sorted((w.numel for w in plan.weights if not w.copies), reverse=True)
    return min(sum(numels), threads * min(size, numels[0])) if numels else 0


def has_gpu() -> bool:
    """Is there the driver of a GPU on this machine? No tensor library is asked."""
    try:
        ctypes.CDLL(GPU_DRIVER)
    except OSError:
        return False
    return True


def beside(plan: Plan) -> dict[str, int]:
    """Return the files that will stand beside the weights, with their sizes: those of the manifest
    and of what is copied are about what they will be, all others are exact."""
    if not plan.directory:
        return {}
    made = dict(plan.documents)
    if plan.config is not None:
        made["config.json"] = plan.config
    if plan.index is not None:
        made[plan.index_name] = plan.index
    sizes = {name: len(text) for name, text in made.items()}
    for name in plan.sidecars:
        with contextlib.suppress(OSError):
            sizes[name] = (plan.source / name).stat().st_size
    return {**dict(sorted(sizes.items())), MANIFEST: _manifest(plan, sizes)}


def _manifest(plan: Plan, files: dict[str, int]) -> int:
    """Return about how long lowbit.json will be: a line for each tensor, weight and file."""
    made = made_of(plan.weights)
    tensors = sum(len(name) + HASH_DIGITS + 12 for file in plan.files for name in file.entries)
    weights = sum(len(name) + 8 for said in (made.rounded, made.kept) for name in said)
    digests = sum(len(name) + 75 for name in files) + 230 * len(plan.files)
    return 600 + len(repr(dict(plan.recipe))) + tensors + weights + digests


def disk_free(path: Path) -> int | None:
    """Return the free bytes of the file system that `path` is or will be on, None where that cannot
    be told."""
    where = Path(os.path.abspath(path))
    for folder in (where, *where.parents):
        try:
            found = os.statvfs(folder)
        except FileNotFoundError:
            continue
        except OSError:
            return None
        return found.f_bavail * found.f_frsize
    return None
