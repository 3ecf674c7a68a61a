"""Read a weight a band of rows at a time, as it is stored or as the values that it stands for."""

import math
import threading
from collections.abc import Iterator, Mapping
from functools import cached_property

import torch
from torch import Tensor

from lowbit_kernels.error import BAND
from lowbit_kernels.formats import F32
from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.errors import CheckpointError
from lowbitcli.pipeline.arithmetic import ops_of
from lowbitcli.pipeline.read import (
    block_of,
    buffer,
    by_value,
    canonical,
    columns_of,
    load,
    picked,
    tensor_of,
)
from lowbitcli.pipeline.slices import is_streamed, is_turned, rows_high, step_of
from lowbitcli.plan.nouns import Part
from lowbitcli.plan.source import SourceWeight
from lowbitcli.tensors import DATA, GLOBAL_SCALE, SCALE, Shape, TensorSpec

CHUNK = 1 << 20  # elements that are looked at together: a few MB in fp32
LAUNCH = 1 << 23  # on a GPU, where each step of a look is a kernel of its own: 0.5 GB


def _past_bf16(values: Tensor) -> Tensor:
    """Return how many ulps fp32 values lie above (or below) the nearest bf16 number."""
    return ((values.view(torch.int32) + 0x8000) & 0xFFFF) - 0x8000


class UnreadableError(Exception):
    """A tensor of the checkpoint under test cannot be read."""


class Rows:
    """The rows of a weight `[*, rows, cols]`; scales are read whole, data a band at a time.

    `tested` is whether this is the checkpoint under test, whose failures are findings.
    """

    def __init__(
        self, checkpoint: Checkpoint, weight: SourceWeight, device: torch.device, *, tested: bool
    ) -> None:
        self.weight = weight
        self._checkpoint = checkpoint
        self._device = device
        self._tested = tested
        self._held: tuple[int, Tensor] | None = None
        self._one_at_a_time = threading.Lock()

    @property
    def checkpoint(self) -> Checkpoint:
        """What the weight is read from."""
        return self._checkpoint

    def bands(self) -> Iterator[tuple[int, int, int]]:
        """Yield (matrix, first row, row after the last) over all matrices of the stack."""
        rows, cols = self.weight.shape[-2:]
        chunk = CHUNK if self._device.type == "cpu" else LAUNCH
        high = max(BAND, chunk // max(cols, 1) // BAND * BAND)
        for matrix in range(math.prod(self.weight.shape[:-2])):
            for start in range(0, rows, high):
                yield matrix, start, min(start + high, rows)

    def parts(self, matrix: int, start: int, stop: int) -> dict[str, Tensor]:
        """Return the parts of some rows of a matrix, in canonical layout.

        Raises:
            UnreadableError, CheckpointError: they cannot be read; see `tested`.
        """
        found = {DATA: self._data(matrix, start, stop)}
        if self.weight.scheme is None:
            return found
        lead = math.prod(self.weight.shape[:-2])
        scale = self._whole[SCALE]
        high = self.weight.scheme.block[0]
        scale = scale.reshape(lead, *scale.shape[len(self.weight.shape) - 2 :])[matrix]
        found[SCALE] = scale if high is None else scale[start // high : -(-stop // high)]
        if GLOBAL_SCALE in self._whole:
            found[GLOBAL_SCALE] = self._whole[GLOBAL_SCALE].reshape(lead)[matrix]
        return found

    def values(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the numbers that parts stand for: as stored, or dequantized to fp32."""
        if self.weight.scheme is None:
            return parts[DATA]
        return ops_of(self.weight.scheme).dequantize(parts, torch.float32)

    @property
    def is_from_bf16(self) -> bool:
        """Do the scales show that the codes were computed in bf16 (or fp16)?

        They are stored so, or they are bf16 numbers. Of a global scale it is the reciprocal that
        tells, which is what such writers store; it may have moved by an ulp since. (The scale
        itself is a bf16 number wherever the largest element is 21 times one.) Scales of FP32 that
        are all powers of two show nothing: dividing by them is exact.

        Raises:
            UnreadableError, CheckpointError: they cannot be read; see `tested`.
        """
        scheme = self.weight.scheme
        if scheme is None:
            return False
        if self.weight.reads[SCALE].spec.dtype in ("BF16", "F16"):
            return True
        if GLOBAL_SCALE in self._whole:
            scale = self._whole[GLOBAL_SCALE].float()
            return bool(_past_bf16(1 / scale).abs().le(1).all())
        if scheme.scale is not F32:
            return False
        scale = self._whole[SCALE].float()
        return bool(_past_bf16(scale).eq(0).all() and (scale.frexp().mantissa != 0.5).any())

    @cached_property
    def _whole(self) -> dict[str, Tensor]:
        reads = self.weight.reads
        return {name: self._seen(name, part) for name, part in reads.items() if name != DATA}

    def _seen(self, name: str, part: Part) -> Tensor:
        """Return a part other than data, of a view of a stack its own."""
        if part.view is None:
            return self._load(part)
        if part.span is None:
            return self._load(part._replace(view=None))[part.view.matrix]
        start, stop = part.span
        rows = -(-self.weight.shape[-2] // (rows_high(self.weight.scheme, name) or 1))
        return self._some(part, start, stop, (rows * step_of(part), part.spec.shape[-1]))

    @cached_property
    def _whole_data(self) -> Tensor:
        return self._load(self.weight.reads[DATA])

    def _data(self, matrix: int, start: int, stop: int) -> Tensor:
        part = self.weight.reads[DATA]
        if is_turned(part):
            columns = columns_of(self._block(matrix), part, start, stop)
            return canonical(columns.to(self._device), part)
        if not is_streamed(self.weight.scheme, DATA, part):
            data = self._whole_data
            return data.reshape(-1, *data.shape[-2:])[matrix, start:stop]
        times = step_of(part)
        step = part.nbytes // max(1, math.prod(self.weight.shape[:-1]) * times)
        first = matrix * self.weight.shape[-2]
        begin, end = ((first + row) * times * step + part.begin for row in (start, stop))
        cols = step // TensorSpec("", part.spec.dtype, (1,)).nbytes
        return self._some(part, begin, end, ((stop - start) * times, cols))

    def _block(self, matrix: int) -> Tensor:
        """Return a matrix that lies transposed, as it lies; the last one is kept."""
        with self._one_at_a_time:
            if self._held is None or self._held[0] != matrix:
                try:
                    self._held = matrix, block_of(self._checkpoint, self.weight.reads[DATA], matrix)
                except CheckpointError as error:
                    if self._tested:
                        raise UnreadableError(error.message) from error
                    raise
            return self._held[1]

    def _some(self, part: Part, start: int, stop: int, shape: Shape) -> Tensor:
        """Return bytes of a part as numbers `[rows, cols]`, layout as stored; on their way to a GPU
        they are in pinned memory, which takes the CPU no copy of its own."""
        memory = buffer(stop - start, self._device)
        try:
            self._checkpoint.read_into(part.spec.name, memory.numpy().data, start)
        except CheckpointError as error:
            if self._tested:
                raise UnreadableError(error.message) from error
            raise
        spec = TensorSpec(part.spec.name, part.spec.dtype, shape)
        found = tensor_of(memory, spec).to(self._device, non_blocking=True)
        return by_value(picked(found, part), part)

    def _load(self, part: Part) -> Tensor:
        try:
            return load(self._checkpoint, part, self._device)
        except CheckpointError as error:
            if self._tested:
                raise UnreadableError(error.message) from error
            raise
