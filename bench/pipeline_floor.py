"""The floor of a run: its bytes in, out and back by its slots, threads and calls, no arithmetic."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.checkpoint.writer import StagedOutput
from lowbitcli.pipeline import memory
from lowbitcli.pipeline.read import buffer
from lowbitcli.plan.nouns import OutputFile, Plan


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
            for one in [pool.submit(move, *task) for task in tasks(plan, files, slot)]:
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


def tasks(
    plan: Plan, files: Mapping[str, OutputFile], slot: int
) -> Iterator[tuple[str, int, int, list[tuple[str, int, int]]]]:
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
