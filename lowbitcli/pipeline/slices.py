"""Where a weight may be cut: rows that are read, computed and written together.

    unit    128 rows; of very wide weights fewer, but never less than may be cut apart
    slice   whole units of one matrix, as many as the memory allows

A unit follows from the weight's shape and schemes alone and is what error sums are kept over, so
that neither bytes nor figures depend on the slices that a run happens to use.
"""

import math
from dataclasses import dataclass

from lowbit_kernels.error import BAND
from lowbitcli.containers.layouts import IDENTITY, SIXTEENS, TRANSPOSED
from lowbitcli.plan.nouns import Part, Weight
from lowbitcli.schemes import Scheme
from lowbitcli.tensors import DATA, SCALE

ROW_BY_ROW = (IDENTITY, SIXTEENS)  # rows lie in the file as in memory
UNIT_ELEMENTS = 1 << 22  # a unit of more is halved where its schemes allow


@dataclass(frozen=True)
class Slice:
    """Rows `start` to `stop` of one matrix of a stack `[*, rows, cols]`, the `index`-th slice of
    the weight; `first` and `last` are whether it begins and ends its matrix."""

    index: int
    matrix: int
    start: int
    stop: int
    first: bool
    last: bool

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Extent:
    """The rows of a part that belong to a slice, counted through all matrices of the part's bytes;
    of a view that takes every other row, with the rows in between."""

    start: int
    stop: int


def unit_rows(weight: Weight) -> int:
    """Return how many rows of a weight are never taken apart."""
    least = 1
    for scheme in (weight.source, weight.target):
        if scheme is not None:
            least = math.lcm(least, scheme.row_multiple, scheme.block[0] or 1)
    unit = math.lcm(BAND, least)
    while unit * weight.shape[-1] > UNIT_ELEMENTS and unit % 2 == 0 and (unit // 2) % least == 0:
        unit //= 2
    return unit


def slices(weight: Weight, elements: int) -> list[Slice]:
    """Return the slices of a weight, each of about `elements` or of one unit."""
    rows, cols = weight.shape[-2:]
    unit = unit_rows(weight)
    high = max(unit, elements // max(cols, 1) // unit * unit)
    found: list[Slice] = []
    for matrix in range(math.prod(weight.shape[:-2])):
        for start in range(0, rows, high):
            stop = min(start + high, rows)
            found.append(Slice(len(found), matrix, start, stop, start == 0, stop == rows))
    return found


def is_streamed(scheme: Scheme | None, name: str, part: Part) -> bool:
    """Do rows of this part lie in the file as they lie in memory, one after the other?"""
    if part.stored is not None and part.stored.layout not in ROW_BY_ROW:
        return False
    return rows_high(scheme, name) is not None


def is_turned(part: Part) -> bool:
    """Does each matrix of this part lie transposed, so that a row is spread over all of it?"""
    return part.stored is not None and part.stored.layout == TRANSPOSED


def step_of(part: Part) -> int:
    """Return how many rows of a part's bytes there are for each of its own."""
    return 1 if part.view is None else part.view.step


def rows_high(scheme: Scheme | None, name: str) -> int | None:
    """Return how many rows of a weight one row of a part is for; None for all of a matrix."""
    if name == DATA:
        return 1
    return scheme.block[0] if name == SCALE and scheme is not None else None


def extent(
    scheme: Scheme | None, name: str, part: Part, shape: tuple[int, ...], some: Slice
) -> Extent:
    """Return the rows of a streamed part that belong to a slice of a weight of `shape`."""
    high = rows_high(scheme, name)
    if high is None:
        raise ValueError(f"{name} has no rows")
    base, step = some.matrix * -(-shape[-2] // high), step_of(part)
    return Extent((base + some.start // high) * step, (base + -(-some.stop // high)) * step)


def row_bytes(scheme: Scheme | None, name: str, part: Part, shape: tuple[int, ...]) -> int:
    """Return the bytes that one row of a streamed part takes in the file."""
    high = rows_high(scheme, name) or 1
    rows = math.prod(shape[:-2]) * -(-shape[-2] // high) * step_of(part)
    return part.nbytes // rows if rows else 0
