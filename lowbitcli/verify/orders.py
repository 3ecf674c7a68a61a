"""Other orders in which codes and scales may lie than the one that is declared.

| words | how a writer comes to it |
|---|---|
| nibbles exchanged | the even column in the other four bits of a byte |
| transposed | codes of `[in, out]`, packed, under the shape of `[out, in]` |
| packed along rows | a byte holds two rows of one column |
| packed in halves | a byte holds a column of the left half and one of the right |
| scales linear, swizzled | in the order of rows where tiles of 128 x 4 are read, or the reverse |
"""

from collections.abc import Iterator

from torch import Tensor

from lowbit_kernels import rounding
from lowbitcli.containers.layouts import SWIZZLED32X16, SWIZZLED128X4
from lowbitcli.plan.nouns import Part

MOST = 64 << 20  # bytes of packed codes that are held at once
LINEAR, SWIZZLED = "linear", "swizzled"
ORDERS = ("identity", "swizzled128x4", "swizzled32x16")


def exchanged(packed: Tensor) -> Tensor:
    """Return bytes with their nibbles exchanged."""
    return (packed >> 4) | (packed << 4)


def laid_out_otherwise(packed: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield (words, packed codes) of a matrix of packed codes, were it packed otherwise."""
    rows, half = packed.shape
    if rows % 2 == 0:
        turned = rounding.unpack(packed.reshape(half * 2, rows // 2))
        yield "its codes lie transposed", rounding.pack(turned.t().contiguous())
        pairs = packed.reshape(rows // 2, half * 2)
        codes = packed.new_empty(rows, half * 2)
        codes[0::2], codes[1::2] = pairs & 15, pairs >> 4
        yield "its codes are packed along rows, not columns", rounding.pack(codes)
    codes = packed.new_empty(rows, half * 2)
    codes[:, :half], codes[:, half:] = packed & 15, packed >> 4
    yield "its codes are packed in halves of a row, not side by side", rounding.pack(codes)


def is_ordered(part: Part) -> bool:
    """May scales of this part lie in either order: a matrix of bytes, a scale for a block?"""
    name = part.stored.layout.name if part.stored is not None else "identity"
    single = part.spec.dtype in ("U8", "F8_E4M3", "F8_E8M0")
    return single and len(part.spec.shape) == 2 and part.view is None and name in ORDERS


def scales_otherwise(stored: Tensor, part: Part, rows: int, cols: int) -> tuple[str, Tensor] | None:
    """Return the order in which stored scales are not declared to lie, and the `[rows, cols]` they
    would then be; None where they cannot lie so."""
    name = part.stored.layout.name if part.stored is not None else "identity"
    if name == "identity":
        if rows % 128 or cols % 4 or stored.shape != (rows, cols):
            return None
        return SWIZZLED, SWIZZLED128X4.at((rows, cols)).decode(stored)
    high, wide = -(-rows // 128) * 128, -(-cols // 4) * 4
    return LINEAR, stored.reshape(high, wide)[:rows, :cols].contiguous()


def whole_scales(stored: Tensor, part: Part, rows: int, cols: int) -> Tensor:
    """Return stored scales as rows and columns with what pads them."""
    high, wide = -(-rows // 128) * 128, -(-cols // 4) * 4
    layout = SWIZZLED128X4 if part.stored and part.stored.layout.name[-5:] == "128x4" else None
    return (layout or SWIZZLED32X16).at((high, wide)).decode(stored)
