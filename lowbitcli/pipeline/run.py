"""Do what a plan says: read, compute, write at planned offsets, prove, publish whole or not at
all."""

import resource
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lowbit_kernels.error import Sums
from lowbitcli import __version__
from lowbitcli.checkpoint import manifest
from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.checkpoint.writer import StagedOutput
from lowbitcli.errors import DeviceError
from lowbitcli.pipeline.compute import Computed, compute, non_finite, value_of
from lowbitcli.pipeline.read import bytes_of
from lowbitcli.plan.nouns import Job, OutputFile, Part, Plan, Weight

COPY_BYTES = 16 << 20  # what is read at once of a tensor that is only copied

# Called with bytes done, bytes in all, and the name of what is being worked on.
Progress = Callable[[int, int, str], None]


@dataclass
class Result:
    """What a run did: errors by weight, scales that moved by an ulp, seconds, memory in bytes."""

    errors: dict[str, Sums] = field(default_factory=dict)
    moved: int = 0
    seconds: float = 0.0
    peak_rss: int = 0
    peak_gpu: int = 0


def run(
    plan: Plan,
    checkpoint: Checkpoint,
    output: Path,
    device: torch.device,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> Result:
    """Carry out a plan; `output` appears whole, or not at all.

    Raises:
        NonFiniteError: a weight that is computed holds NaN or Inf.
        OutputError, BusyError, UsageError: see StagedOutput.
        DeviceError: the device has too little memory for one job.
    """
    started = time.perf_counter()
    if device.type == "cuda":
        torch.cuda.init()
        torch.cuda.reset_peak_memory_stats(device)
    result = Result()
    sources = [checkpoint.path, *(checkpoint.root / file for file in checkpoint.files)]
    with StagedOutput(output, directory=plan.directory, force=force, sources=sources) as staged:
        writer = _Writer(plan, staged)
        done = 0
        for job in plan.jobs:
            if progress is not None:
                progress(done, plan.bytes_in, job.weights[0].name)
            _run_job(job, checkpoint, device, writer, result)
            done += job.bytes_in
        writer.finish(checkpoint)
        staged.publish()
    if progress is not None:
        progress(done, plan.bytes_in, "")
    result.seconds = time.perf_counter() - started
    result.peak_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if device.type == "cuda":
        result.peak_gpu = torch.cuda.max_memory_reserved(device)
    return result


def _run_job(
    job: Job, checkpoint: Checkpoint, device: torch.device, writer: "_Writer", result: Result
) -> None:
    if len(job.weights) == 1 and job.weights[0].copies:
        writer.copy(job.weights[0], checkpoint)
        return
    try:
        computed = compute(job, checkpoint, device)
    except torch.OutOfMemoryError as error:
        raise DeviceError(
            f"{device} has too little memory for {job.weights[0].name}", hint="--device cpu"
        ) from error
    for done in computed:
        writer.write(done)
        result.moved += done.moved
        if done.error is not None:
            result.errors[done.weight.name] = done.error


def find_non_finite(
    plan: Plan, checkpoint: Checkpoint, progress: Progress | None = None
) -> dict[str, str]:
    """Return name -> what is wrong, of every weight to be quantized that holds NaN or Inf.

    This reads all weights that the plan rounds, once, before anything is written.
    """
    found = {}
    rounded = [weight for weight in plan.quantized if not weight.recodes]
    done, total = 0, sum(weight.bytes_in for weight in rounded)
    for weight in rounded:
        if progress is not None:
            progress(done, total, weight.name)
        done += weight.bytes_in
        w = value_of(weight, checkpoint, torch.device("cpu"))
        if not bool(torch.isfinite(w).all()):
            found[weight.name] = non_finite(weight.name, w).message
    return found


class _Writer:
    """Puts tensors at their planned places and keeps the checksum of each."""

    def __init__(self, plan: Plan, staged: StagedOutput) -> None:
        self._plan = plan
        self._staged = staged
        self._files: dict[str, OutputFile] = {file.name: file for file in plan.files}
        self._hashes: dict[str, dict[str, str]] = {file.name: {} for file in plan.files}
        staged.check_space(plan.bytes_out)
        for file in plan.files:
            staged.create(self._name(file.name), file.size)

    def _name(self, file: str) -> str:
        """A single file is called what the output is called, whatever the source was."""
        return file if self._plan.directory else self._staged.target.name

    def copy(self, weight: Weight, checkpoint: Checkpoint) -> None:
        """Copy a tensor byte for byte, a piece at a time."""
        for part, read in weight.reads.items():
            name, size = read.spec.name, read.spec.nbytes
            pieces = (
                checkpoint.read(name, start, min(start + COPY_BYTES, size))
                for start in range(0, size, COPY_BYTES)
            )
            self._put(weight.writes[part], pieces)

    def write(self, computed: Computed) -> None:
        """Write the parts of a computed weight."""
        for name, part in computed.weight.writes.items():
            self._put(part, [bytes_of(computed.parts[name])])

    def _put(self, part: Part, pieces: Iterable[bytes | bytearray | memoryview]) -> None:
        entry = self._files[part.file].entries[part.spec.name]
        checksum = manifest.TensorHash()
        offset = entry.start
        for piece in pieces:
            self._staged.write(self._name(part.file), offset, piece)
            checksum.update(piece)
            offset += len(piece)
        if offset != entry.stop:
            raise AssertionError(f"{part.spec.name}: {offset - entry.start} bytes, not as planned")
        self._hashes[part.file][part.spec.name] = checksum.hexdigest()

    def finish(self, checkpoint: Checkpoint) -> None:
        """Write headers, then what stands beside the weights, the manifest last."""
        for name, file in self._files.items():
            header = file.header
            if not self._plan.directory:
                header = manifest.seal(header, self._hashes[name])
            self._staged.write(self._name(name), 0, header)
        if not self._plan.directory:
            return
        for name in self._plan.sidecars:
            self._staged.copy_file(name, checkpoint.root / name)
        if self._plan.config is not None:
            self._staged.write_file("config.json", self._plan.config)
        if self._plan.index is not None:
            self._staged.write_file(self._plan.index_name, self._plan.index)
        self._staged.write_file(
            manifest.MANIFEST,
            manifest.build(
                self._hashes,
                recipe=self._plan.recipe,
                version=__version__,
                plan_digest=self._plan.digest,
                headers={
                    name: manifest.header_digest(file.header) for name, file in self._files.items()
                },
            ),
        )
