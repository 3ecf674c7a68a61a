"""What `error_codes` sees, on the CPU in torch, a piece that fits the cache at a time.

| pass | instead of |
|---|---|
| two codes looked up at once | a conversion, which takes torch nine times as long |
| min(q - low, high - q) >= 0 | comparisons, which take twenty times as long as arithmetic |
| sums of sixteen whole numbers in fp32 | sums of 64 bits |
| two bins counted at once | one |
| sums in any order; in that of the reference where a block may be the worst | trees of all blocks |

A band in which an element is outside, is no number, or has a step of 0 goes to the reference.
"""

import torch
from torch import Tensor
from torch.nn import functional

from lowbit_kernels.error_codes import (
    BINS,
    FAR,
    INWARD,
    UNIT,
    Look,
    Ruler,
    Worst,
    errors_of,
    joined,
    reference,
)

PIECE = 65536  # elements: six fp32 buffers fit a core's cache
_WIDE = 512  # columns of a piece of blocks that are many rows high


def values(
    data: Tensor, step: Tensor, ruler: Ruler, block: tuple[int | None, int | None]
) -> Tensor:
    """Return the fp32 values `[rows, cols]` of canonical `data` on the CPU, looked up two at once;
    torch takes nine times as long to convert FP8."""
    shape = torch.Size((data.shape[0], data.shape[1] * ruler.element.per_byte))
    wide = block[1] or shape[1]
    found = torch.empty(shape)
    tall = max(1, PIECE // shape[1])
    for top in range(0, shape[0], tall):
        here = slice(top, top + tall)
        some = _looked_up(ruler.values, data[here], found[here].shape)
        steps = (step if step.shape[0] == 1 else step[here]).unsqueeze(-1)
        if shape[1] % wide:
            steps = steps.expand(-1, -1, wide).flatten(1)[:, : shape[1]]
            torch.mul(some, steps, out=found[here])
        else:
            into = found[here].unflatten(1, (-1, wide))
            torch.mul(some.unflatten(1, (-1, wide)), steps, out=into)
    return found


def of_band(
    w: Tensor,
    v: Tensor,
    data: Tensor,
    step: Tensor,
    ruler: Ruler,
    high: int,
    wide: int,
    start: int,
) -> Look:
    """Look at a band on the CPU: in pieces, or whole where something is out of the ordinary."""
    found = None
    if w.shape[1] % wide == 0 and not bool((step == 0).any()):
        found = _in_pieces(w, v, data, step, ruler, high, wide)
    if found is None:
        found = reference(w, v, data, step, ruler, high, wide)
    first = None if found.first is None else (found.first[0] + start, found.first[1])
    moved = tuple(one._replace(down=one.down + start // high) for one in found.worst)
    return found._replace(first=first, worst=moved)


def _in_pieces(
    w: Tensor, v: Tensor, data: Tensor, step: Tensor, ruler: Ruler, high: int, wide: int
) -> Look | None:
    """Look at whole blocks with steps above 0; None where an element is outside or no number."""
    rows, cols = w.shape
    tall = rows if high > 1 else max(1, PIECE // cols)
    broad = cols if high == 1 else min(cols, max(wide, _WIDE // wide * wide))
    found, worst = [], Worst(-1.0, 0, 0)
    for top in range(0, rows, tall):
        for left in range(0, cols, broad):
            here = slice(top, top + tall), slice(left, left + broad)
            codes = slice(left // ruler.element.per_byte, (left + broad) // ruler.element.per_byte)
            steps = step if step.shape[0] == 1 else step[here[0]]
            steps = steps[:, left // wide : (left + broad) // wide]
            piece = w[here].float(), v[here], data[here[0], codes], steps
            one = _piece(*piece, ruler, high, wide)
            if one is None:
                return None
            found.append(one)
            (most,) = one.worst
            if most.error > worst.error:
                place = most.down + top // high, most.across + left // wide
                worst = Worst(most.error, *place)
    return joined(found)._replace(worst=(worst,))


def _piece(
    x: Tensor, v: Tensor, data: Tensor, step: Tensor, ruler: Ruler, high: int, wide: int
) -> Look | None:
    """Look at a piece in as few passes as torch needs: comparisons take it twenty times as long as
    arithmetic, so that none is made where a reduction says enough."""
    shape, steps = x.shape, step.unsqueeze(-1)
    q = (x.unflatten(1, (-1, wide)) / steps).view(shape)
    low, above = (_looked_up(table, data, shape) for table in (ruler.lows, ruler.highs))
    torch.minimum(torch.sub(q, low, out=low), torch.sub(above, q, out=above), out=low)
    if not low.amin().item() >= 0:  # NaN too
        return None
    most = max(abs(side.item()) for side in torch.aminmax(q))
    clipped = int((q.abs_() > ruler.largest).sum()) if most > ruler.largest else 0
    t = torch.sub(v, x, out=q).unflatten(1, (-1, wide)).div_(steps).view(shape)
    worst, blocks = _largest(t, step, high, wide)
    far, bias = _added(t.mul_(1 / ruler.half))
    zeros = _filled(x) - _filled(v)
    counts = _histogram(t.mul_(INWARD).add_(BINS // 2 + 1).clamp_(0, BINS + 1))
    return Look(0, None, clipped, 0, zeros, 0, blocks, far, bias, counts, (worst,))


def _looked_up(table: Tensor, data: Tensor, shape: torch.Size) -> Tensor:
    """Return fp32 `shape` of codes from a table of pairs of them."""
    flat = data.view(torch.uint8).reshape(-1)
    size = shape.numel()
    if table.numel() > 256:
        if size % 2:
            flat = functional.pad(flat, (0, 1))
        elif flat.storage_offset() % 2:
            flat = flat.clone()
        flat = flat.view(torch.uint16)
    found = torch.index_select(table, 0, flat.to(torch.int32))
    return found.view(torch.float32)[:size].view(shape)


def _added(t: Tensor) -> tuple[int, int]:
    """Return the sums of |n| and of n."""
    flat = t.flatten() * UNIT
    least, most = torch.aminmax(flat)
    near = max(-least.item(), most.item()) <= UNIT
    flat.clamp_(-FAR * UNIT, FAR * UNIT).round_()
    if near and flat.numel() % 16 == 0:  # sixteen of them are whole numbers of 24 bits at most
        flat = flat.view(16, -1)
        bias = flat.sum(0).double().sum()
        return int(flat.abs_().sum(0).double().sum()), int(bias)
    flat = flat.double()
    bias = flat.sum()
    return int(flat.abs_().sum()), int(bias)


def _filled(x: Tensor) -> int:
    """Return how many elements are not 0."""
    patterns = x.contiguous().view(torch.int32) & 0x7FFFFFFF
    return int(patterns.clamp_(max=1).sum())


def _histogram(place: Tensor) -> tuple[int, ...]:
    """Return how many of the places, with what comes after the point, are in each bin."""
    bins, flat = BINS + 2, place.flatten().trunc_()
    if flat.numel() % 2:
        return tuple(torch.bincount(flat.to(torch.int32), minlength=bins).tolist())
    left, right = flat.view(2, -1)
    pairs = left.mul_(bins).add_(right).to(torch.int32)
    both = torch.bincount(pairs, minlength=bins * bins).view(bins, bins)
    return tuple((both.sum(0) + both.sum(1)).tolist())


def _largest(e: Tensor, step: Tensor, high: int, wide: int) -> tuple[Worst, int]:
    """Return the block with the largest error, and how many there are: only those that rounding may
    have made the largest are summed in the order that the module describes."""
    squares = e * e
    if wide < 64:
        across = torch.mv(squares.view(-1, wide), torch.ones(wide)).view(e.shape[0], -1)
    else:
        across = squares.unflatten(1, (-1, wide)).sum(-1)
    down = -(-e.shape[0] // high)
    if high > 1:
        across = functional.pad(across, (0, 0, 0, -e.shape[0] % high))
        across = across.unflatten(0, (down, high)).sum(1)
    errors = across.double().mul_(step[::high].double().square())
    most = errors.max().item()
    if most == 0:
        return Worst(0.0, 0, 0), errors.numel()
    rivals = torch.nonzero(errors >= most * (1 - 1e-4))
    found = Worst(-1.0, 0, 0)
    for row, col in rivals.tolist():
        rows = slice(row * high, (row + 1) * high)
        of_rows = step if step.shape[0] == 1 else step[rows]
        one = errors_of(
            e[rows, col * wide : (col + 1) * wide], of_rows[:, col : col + 1], high, wide
        )
        if one.item() > found.error:
            found = Worst(one.item(), row, col)
    return found, errors.numel()


__all__ = ["of_band", "values"]
