"""From bytes of a checkpoint to tensors in canonical layout, and from tensors to bytes."""

import math
import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lowbit_kernels import rounding
from lowbitcli.checkpoint.manifest import TensorHash
from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.pipeline.arithmetic import torch_dtype
from lowbitcli.pipeline.clock import Clock
from lowbitcli.pipeline.crew import Crew, Order
from lowbitcli.pipeline.slices import (
    Slice,
    extent,
    is_streamed,
    is_turned,
    row_bytes,
    rows_high,
)
from lowbitcli.plan.nouns import Part, Weight
from lowbitcli.tensors import TensorSpec


def tensor_of(raw: bytearray | Tensor, spec: TensorSpec) -> Tensor:
    """Return `raw` as the tensor that `spec` describes; E8M0 stays the byte that it is."""
    dtype = torch.uint8 if spec.dtype == "F8_E8M0" else torch_dtype(spec.dtype)
    if not len(raw):
        return torch.empty(spec.shape, dtype=dtype)
    flat = raw if isinstance(raw, Tensor) else torch.frombuffer(raw, dtype=torch.uint8)
    return flat.view(dtype).reshape(spec.shape)


def load(checkpoint: Checkpoint, part: Part, device: torch.device) -> Tensor:
    """Read one part of a weight and bring it into canonical layout on `device`."""
    tensor = tensor_of(checkpoint.read(part.spec.name), part.spec).to(device)
    return canonical(tensor, part)


def canonical(tensor: Tensor, part: Part) -> Tensor:
    """Return a stored tensor in canonical layout and dtype (other writers' dtypes go by value)."""
    if part.stored is None:
        return tensor
    return part.stored.layout.decode(by_value(tensor, part))


def picked(tensor: Tensor, part: Part) -> Tensor:
    """Return every row that is the part's own, of rows of which a view takes some."""
    if part.view is None or part.view.step == 1:
        return tensor
    return tensor[part.view.first :: part.view.step].contiguous()


def pick(raw: bytearray, part: Part) -> bytes:
    """Return the bytes of a view's own numbers, of the bytes that they are among."""
    if part.view is None or part.view.step == 1:
        return bytes(raw)
    size = TensorSpec("", part.spec.dtype, (1,)).nbytes
    every = np.frombuffer(raw, np.uint8).reshape(-1, size)
    return every[part.view.first :: part.view.step].tobytes()


def block_of(checkpoint: Checkpoint, part: Part, matrix: int) -> Tensor:
    """Return a matrix of a stack as it lies in the file; of a view its own."""
    rows, cols = part.spec.shape[-2:]
    size = TensorSpec("", part.spec.dtype, (rows, cols)).nbytes
    start = part.begin + (matrix * size if part.view is None else 0)
    raw = checkpoint.read(part.spec.name, start, start + size)
    return tensor_of(raw, TensorSpec("", part.spec.dtype, (rows, cols)))


def columns_of(block: Tensor, part: Part, start: int, stop: int) -> Tensor:
    """Return the columns of a block that are rows `start` to `stop` of the part, side by side:
    torch transposes what is contiguous ten times as fast."""
    columns = block if part.view is None else block[:, part.view.first :: part.view.step]
    return columns[:, start:stop].contiguous()


def by_value(tensor: Tensor, part: Part) -> Tensor:
    """Return a stored tensor in the dtype of its part, layout as stored."""
    if part.stored is None:
        return tensor
    wanted = torch_dtype(part.stored.dtype)
    if part.spec.dtype == "F8_E8M0" and wanted != torch.uint8:
        return rounding.e8m0_value(tensor).to(wanted)
    return tensor if tensor.dtype == wanted else tensor.to(wanted)


def as_stored(tensor: Tensor, part: Part) -> Tensor:
    """Return canonical scales in the dtype that a file has for them, where it is one that rounds:
    they were rounded to it already."""
    if part.stored is None or part.spec.dtype not in HALVES or tensor.dtype != torch.float32:
        return tensor
    return tensor.to(torch_dtype(part.spec.dtype))


def bytes_of(*tensors: Tensor) -> list[memoryview]:
    """Return the bytes of tensors of one device as they go into a file."""
    found: list[Tensor] = []
    device = torch.device("cpu")
    for tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1)
        flat = flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)
        if flat.device.type == "cuda":
            device = flat.device
            flat = buffer(flat.numel(), device).copy_(flat, non_blocking=True)
        found.append(flat)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return [flat.numpy().data if flat.numel() else memoryview(b"") for flat in found]


def on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of one device in memory of the CPU, after one wait for all of them."""
    if not tensors or tensors[0].device.type == "cpu":
        return list(tensors)
    found = []
    for tensor in tensors:
        flat = tensor.contiguous().reshape(-1).view(torch.uint8)
        copied = buffer(flat.numel(), flat.device).copy_(flat, non_blocking=True)
        found.append(copied.view(tensor.dtype).reshape(tensor.shape))
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return found


def buffer(size: int, device: torch.device) -> Tensor:
    """Return `size` bytes to read into, pinned where they go on to a GPU.

    The allocators keep what is given back, so that a run touches few pages however long it is.
    """
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")


HALVES = ("BF16", "F16")
BLOCKS = 2  # matrices of a turned stack that are held at once


class Rows:
    """Reads a weight slice by slice; what cannot be cut is read whole, once, and a stack whose
    matrices lie transposed matrix by matrix.

    `hashes` has the checksum of each tensor read so far, `source` those that are complete: slices
    are hashed in order, whichever thread reads them.
    """

    def __init__(
        self, weight: Weight, checkpoint: Checkpoint, device: torch.device, crew: Crew | None = None
    ) -> None:
        """Prepare to read `weight`; without a `crew` nothing is hashed."""
        self.weight = weight
        self._checkpoint = checkpoint
        self._device = device
        self._order = None if crew is None else Order(crew)
        self._clock = Clock() if crew is None else crew.clock
        self._hashes: dict[str, TensorHash] = {}
        self._whole: dict[str, Tensor] = {}
        self._blocks: OrderedDict[tuple[str, int], Tensor] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def source(self) -> dict[str, str]:
        """Return the checksum of every tensor read; right only after the last slice."""
        return {name: found.hexdigest() for name, found in sorted(self._hashes.items())}

    def hash(self, part: Part, data: memoryview) -> None:
        """Take the checksum of a part of which these are all bytes."""
        found = self._hashes[part.key] = TensorHash()
        found.update(data)

    def parts(self, some: Slice, *, again: bool = False) -> dict[str, Tensor]:
        """Return the parts of a slice in canonical layout; `again` where it was hashed before.

        Raises:
            CheckpointError: the file changed or cannot be read.
        """
        found, raw = {}, {}
        with self._clock.stage("read"):
            self._read(some, found, raw)
        if self._order is not None and not again:
            with self._order.turn(some.index), self._clock.stage("hash"):
                for name, data in raw.items():
                    self._hashes.setdefault(name, TensorHash()).update(data)
        return found

    def _read(self, some: Slice, found: dict[str, Tensor], raw: dict[str, memoryview]) -> None:
        for name, part in self.weight.reads.items():
            if is_streamed(self.weight.source, name, part):
                raw[part.key], found[name] = self._rows(name, part, some)
            elif is_turned(part):
                block = self._block(name, part, some.matrix)
                found[name] = self._turned(part, block, some)
                if some.first:
                    raw[part.key] = block.reshape(-1).view(torch.uint8).numpy().data
            else:
                found[name] = self._cut(name, self._all(name, part), some)

    def _rows(self, name: str, part: Part, some: Slice) -> tuple[memoryview, Tensor]:
        shape, scheme = self.weight.shape, self.weight.source
        place = extent(scheme, name, part, shape, some)
        step = row_bytes(scheme, name, part, shape)
        memory = buffer((place.stop - place.start) * step, self._device)
        raw = memory.numpy().data
        self._checkpoint.read_into(part.spec.name, raw, part.begin + place.start * step)
        cols = step // TensorSpec("", part.spec.dtype, (1,)).nbytes
        rows = TensorSpec("", part.spec.dtype, (place.stop - place.start, cols))
        tensor = tensor_of(memory, rows).to(self._device, non_blocking=True)
        return raw, by_value(picked(tensor, part), part)

    def _block(self, name: str, part: Part, matrix: int) -> Tensor:
        """Return a matrix of a turned part as it lies in the file, in memory of the CPU."""
        with self._lock:
            key = (name, matrix)
            if key not in self._blocks:
                self._blocks[key] = block_of(self._checkpoint, part, matrix)
                while len(self._blocks) > BLOCKS:
                    self._blocks.popitem(last=False)
            self._blocks.move_to_end(key)
            return self._blocks[key]

    def _turned(self, part: Part, block: Tensor, some: Slice) -> Tensor:
        """Return rows of a matrix that lies transposed."""
        return canonical(columns_of(block, part, some.start, some.stop).to(self._device), part)

    def _all(self, name: str, part: Part) -> Tensor:
        with self._lock:
            if name not in self._whole:
                raw = self._checkpoint.read(part.spec.name)
                tensor = canonical(tensor_of(raw, part.spec).to(self._device), part)
                if self._device.type == "cuda":  # other streams will read it
                    torch.cuda.current_stream(self._device).synchronize()
                if self._order is not None:
                    self._hashes[part.key] = TensorHash()
                    self._hashes[part.key].update(raw)
                self._whole[name] = tensor
            return self._whole[name]

    def _cut(self, name: str, whole: Tensor, some: Slice) -> Tensor:
        """Return a slice of a canonical part that is in memory as a whole."""
        view = self.weight.reads[name].view
        if view is not None:
            return whole[view.matrix]
        lead = self.weight.shape[:-2]
        matrix = whole.reshape(math.prod(lead), *whole.shape[len(lead) :])[some.matrix]
        high = rows_high(self.weight.source, name)
        return matrix if high is None else matrix[some.start // high : -(-some.stop // high)]
