"""What a quantized weight's numbers mean: a `Scheme` is what a reader of the file must know,
and nothing else."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lowbitcli.errors import UnsupportedError
from lowbitcli.tensors import DATA, GLOBAL_SCALE, SCALE, Shape, TensorSpec

if TYPE_CHECKING:
    from lowbit_kernels.formats import Format


@dataclass(frozen=True)
class Scheme:
    """One way of storing a weight `[*, rows, cols]` in few bits.

    `block` is the (rows, cols) that share one scale; None means all of that axis, so (1, None) is
    a scale per row and (None, None) one per matrix. `rules` are the ways a writer may choose
    scales, the first is the default. `ops` names the value of `lowbit_kernels` that does the
    arithmetic (`module:attribute`). `row_multiple` is where slices of a weight may be cut,
    `passes` is 2 where the largest magnitude of the whole matrix comes first, `shares` whether
    fused matrices (q/k/v, gate/up) must agree on that number. `scale_dtypes` are dtypes of weights
    whose scales are stored in them, and codes made for scales so rounded: `ops` with `_` and the
    dtype behind it. `weighs` are the rules that can weigh the errors of columns.
    """

    name: str
    aliases: tuple[str, ...]
    element: "Format"
    scale: "Format"
    block: tuple[int | None, int | None]
    rules: tuple[str, ...]
    ops: str
    row_multiple: int = 1
    passes: int = 1
    global_scale: "Format | None" = None
    shares: bool = False
    ragged: bool = False  # may the last block of a row or column be incomplete
    scale_dtypes: tuple[str, ...] = ()
    weighs: tuple[str, ...] = ()

    def check(self, shape: Shape) -> None:
        """Raise UnsupportedError, with a hint, where a weight of `shape` cannot be stored in
        this scheme."""
        if len(shape) < 2:
            raise UnsupportedError(f"{self.name} takes matrices, this has {len(shape)} dimensions")
        if math.prod(shape) == 0:
            raise UnsupportedError("it has no elements")
        multiple = self.block[1] or 1
        if self.ragged:
            multiple = self.element.per_byte
        if shape[-1] % multiple:
            raise UnsupportedError(
                f"{shape[-1]} columns are no multiple of {multiple}, which {self.name} needs",
                hint=f"keep it, or use a scheme without blocks of {multiple} columns: fp8_channel",
            )

    def specs(self, shape: Shape) -> dict[str, TensorSpec]:
        """Return the parts of a weight of `shape` on paper, in canonical layout; their names
        are empty."""
        self.check(shape)
        lead, (rows, cols) = shape[:-2], shape[-2:]
        high, wide = self.block
        if high is None:
            scale_shape = lead
        else:
            scale_shape = (*lead, -(-rows // high), 1 if wide is None else -(-cols // wide))
        parts = {
            DATA: TensorSpec("", self.element.dtype, (*lead, rows, cols // self.element.per_byte)),
            SCALE: TensorSpec("", self.scale.dtype, scale_shape),
        }
        if self.global_scale is not None:
            parts[GLOBAL_SCALE] = TensorSpec("", self.global_scale.dtype, lead)
        return parts

    def scale_dtype(self, dtype: str) -> str:
        """Return the dtype that scales of a weight of `dtype` are stored in."""
        return dtype if dtype in self.scale_dtypes else self.scale.dtype

    def shape_of(self, data: Shape) -> Shape:
        """Return the shape `[*, rows, cols]` of the weight whose canonical data part has the
        shape `data`."""
        return (*data[:-1], data[-1] * self.element.per_byte) if data else data
