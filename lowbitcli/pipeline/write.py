"""Put what was computed where the plan has it, and what stands beside the weights around it."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from lowbitcli import __version__
from lowbitcli.checkpoint import around, manifest
from lowbitcli.checkpoint.files import StagedFiles
from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.checkpoint.runs import Span, neighbours
from lowbitcli.plan.nouns import OutputFile, Part, Plan, made_of

JOINED = 1 << 20  # bytes of small tensors that are copied together, to be written or read at once


class Writer:
    """Puts tensors at their planned places; any number of threads may."""

    def __init__(self, plan: Plan, staged: StagedFiles, *, wait: bool = True) -> None:
        """Make the files of the plan, or find them where the run goes on; without `wait` in the
        background, to be settled before what was staged is let go of."""
        self._plan = plan
        self._staged = staged
        self._files: dict[str, OutputFile] = {file.name: file for file in plan.files}
        self._hashes: dict[str, dict[str, str]] = {file.name: {} for file in plan.files}
        if not staged.goes_on:  # else it is taken already
            staged.check_space(plan.bytes_out + _beside(plan))
        # Taking space is work where a file system is memory: files side by side.
        self._pool = ThreadPoolExecutor(min(8, max(1, len(plan.files))), "lowbit-space")
        self._made = {
            file.name: self._pool.submit(staged.create, self.name_of(file.name), file.size)
            for file in plan.files
        }
        if wait:
            self.settle()

    def settle(self) -> None:
        """Wait until all files are there.

        Raises:
            OutputError: there is no room or no permission for one.
        """
        self._pool.shutdown()
        for made in self._made.values():
            made.result()

    def name_of(self, file: str) -> str:
        """A single file is called what the output is called, whatever the source was."""
        return file if self._plan.directory else self._staged.target.name

    def write(self, part: Part, offset: int, data: memoryview) -> None:
        """Write bytes of a tensor from `offset` on."""
        entry = self._files[part.file].entries[part.spec.name]
        self._made[part.file].result()
        self._staged.write(self.name_of(part.file), entry.start + offset, data)

    def write_all(self, pieces: Iterable[tuple[Part, memoryview]]) -> None:
        """Write whole tensors; small ones that follow each other in a file by one call."""
        spans: dict[str, list[Span[memoryview]]] = {}
        for part, data in pieces:
            start, stop = self._place(part)
            if data.nbytes != stop - start:
                raise AssertionError(f"{part.spec.name}: {data.nbytes} bytes, not as planned")
            spans.setdefault(part.file, []).append((start, stop, data))
        for file, found in spans.items():
            self._made[file].result()
            for run in neighbours(found, JOINED):
                data = run[0][2] if len(run) == 1 else b"".join(one for _, _, one in run)
                self._staged.write(self.name_of(file), run[0][0], data)

    def read_all(self, parts: Iterable[Part]) -> Iterator[tuple[Part, memoryview]]:
        """Yield whole tensors, in any order, with their bytes as they are in the files now; small
        ones that follow each other are read by one call."""
        spans: dict[str, list[Span[Part]]] = {}
        for part in parts:
            spans.setdefault(part.file, []).append((*self._place(part), part))
        for file, found in spans.items():
            for run in neighbours(found, JOINED):
                first = run[0][0]
                data = memoryview(self._staged.read(self.name_of(file), first, run[-1][1] - first))
                for start, stop, part in run:
                    yield part, data[start - first : stop - first]

    def _place(self, part: Part) -> tuple[int, int]:
        """Return where a tensor begins and ends in its file."""
        entry = self._files[part.file].entries[part.spec.name]
        return entry.start, entry.stop

    def read_into(self, part: Part, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with bytes of a tensor, from `start` on, as they are in the file now."""
        entry = self._files[part.file].entries[part.spec.name]
        self._staged.read_into(self.name_of(part.file), entry.start + start, buffer)

    def prove(self, part: Part, checksum: str) -> None:
        """Keep the checksum of a tensor that is written."""
        self._hashes[part.file][part.spec.name] = checksum

    def finish(self, checkpoint: Checkpoint, source: str) -> None:
        """Write headers, then what stands beside the weights, the manifest last; `source` is the
        digest of what was read."""
        for constant in self._plan.constants:
            part = Part(constant.spec, constant.file)
            self.write(part, 0, memoryview(constant.data))
            checksum = manifest.TensorHash()
            checksum.update(constant.data)
            self.prove(part, checksum.hexdigest())
        for name, file in self._files.items():
            header = file.header
            if not self._plan.directory:
                header = manifest.seal(header, self._hashes[name], source)
            self._staged.write(self.name_of(name), 0, header)
        if not self._plan.directory:
            return
        made = dict(self._plan.documents)
        if self._plan.config is not None:
            made["config.json"] = self._plan.config
        if self._plan.index is not None:
            made[self._plan.index_name] = self._plan.index
        for name in self._plan.sidecars:
            self._staged.copy_file(name, checkpoint.root / name)
        for name, text in made.items():
            self._staged.write_file(name, text)
        beside = {name: self._digest(name) for name in (*self._plan.sidecars, *made)}
        self._staged.write_file(manifest.MANIFEST, self._manifest(source, beside))

    def _digest(self, name: str) -> str:
        """Return the digest of a file beside the weights, as it can be read now."""
        return around.digest(self._staged.size(name), partial(self._staged.read, name))

    def _manifest(self, source: str, beside: Mapping[str, str]) -> bytes:
        headers: Mapping[str, str] = {
            name: manifest.header_digest(file.header) for name, file in self._files.items()
        }
        return manifest.build(
            self._hashes,
            recipe=self._plan.recipe,
            version=__version__,
            plan_digest=self._plan.digest,
            headers=headers,
            source=source,
            made=made_of(self._plan.weights),
            beside=beside,
        )


def _beside(plan: Plan) -> int:
    """Return about how many bytes will stand beside the weights, the manifest's hashes among
    them."""
    if not plan.directory:
        return 0
    known = (plan.config or b"", plan.index or b"", *plan.documents.values())
    names = [len(name) + manifest.HASH_DIGITS for file in plan.files for name in file.entries]
    size = sum(map(len, known)) + sum(names)
    for name in plan.sidecars:
        with contextlib.suppress(OSError):
            size += (plan.source / name).stat().st_size
    return size
