"""Why are so many elements outside the interval of their code? In which other order would they be
inside: what the source tells of exchanged nibbles, of transposed codes, of the order of scales, and
of values that are all wrong by one factor."""

from collections.abc import Iterator

from torch import Tensor

from lowbit_kernels.formats import E2M1
from lowbitcli.pipeline.read import tensor_of
from lowbitcli.tensors import DATA, SCALE
from lowbitcli.verify import orders
from lowbitcli.verify.bound import FP32_WRITER, fit
from lowbitcli.verify.rows import Rows

MANY = 0.05  # share of elements outside that no single flipped code explains
ROWS = 64  # that are looked at
FEW = 0.01  # share outside in the order that explains it
FACTOR = 0.03  # relative, of a factor that is told


def is_asked(outside: int, count: int) -> bool:
    """Are so many elements outside that there must be one reason for all?"""
    return outside > MANY * count


def reason(ours: Rows, theirs: Rows) -> str:
    """Return what explains that most elements of a weight are outside, "" where nothing known does.

    Raises:
        UnreadableError, CheckpointError: see `rows`.
    """
    scheme, shape = ours.weight.scheme, ours.weight.shape
    if scheme is None:
        raise ValueError("only a quantized weight has codes")
    stop = min(ROWS, shape[-2])
    w = theirs.values(theirs.parts(0, 0, stop))
    parts = ours.parts(0, 0, stop)
    for words, data in _codes(ours, parts[DATA], stop):
        for more, scale in _scales(ours, parts[SCALE], stop):
            tried = {**parts, DATA: data, SCALE: scale}
            told = " and ".join(word for word in (words, more) if word)
            found = fit(scheme, w, tried, 0, FP32_WRITER)
            if told and found.outside <= FEW * w.numel():
                return told
            factor = _factor(w, ours.values(tried))
            if factor and _fits(ours, w, tried, factor):
                words = f"all values are {1 / factor:.6g} times the source's"
                return f"{told}, and {words}" if told else words
    return ""


def _codes(ours: Rows, data: Tensor, stop: int) -> Iterator[tuple[str, Tensor]]:
    yield "", data
    scheme, part = ours.weight.scheme, ours.weight.reads[DATA]
    if scheme is None or scheme.element is not E2M1:
        if len(ours.weight.shape) == 2 and part.spec.nbytes <= orders.MOST:
            whole = ours.parts(0, 0, ours.weight.shape[-2])[DATA]
            turned = whole.reshape(whole.shape[1], whole.shape[0]).t()
            yield "its codes lie transposed", turned[:stop].contiguous()
        return
    yield "the nibbles of its bytes are exchanged", orders.exchanged(data)
    if len(ours.weight.shape) == 2 and part.spec.nbytes <= orders.MOST:
        whole = ours.parts(0, 0, ours.weight.shape[-2])[DATA]
        for words, other in orders.laid_out_otherwise(whole):
            yield words, other[:stop]


def _scales(ours: Rows, scale: Tensor, stop: int) -> Iterator[tuple[str, Tensor]]:
    yield "", scale
    scheme, part = ours.weight.scheme, ours.weight.reads[SCALE]
    if scheme is None or not orders.is_ordered(part) or scheme.block[0] != 1:
        return
    rows, cols = scheme.specs(ours.weight.shape)[SCALE].shape[-2:]
    stored = tensor_of(ours.checkpoint.read(part.spec.name), part.spec).to(scale.device)
    other = orders.scales_otherwise(stored, part, rows, cols)
    if other is not None:
        yield f"its scales are {other[0]}, not as declared", other[1][:stop]


def _factor(w: Tensor, values: Tensor) -> float:
    """Return what the values must be multiplied with to be the source's, 0.0 where one factor does
    not do."""
    x, v = w.double(), values.double()
    square = float((v * v).sum())
    if not 0 < square < float("inf"):
        return 0.0
    factor = float((x * v).sum()) / square
    return factor if factor > 0 and abs(factor - 1) > FACTOR else 0.0


def _fits(ours: Rows, w: Tensor, parts: dict[str, Tensor], factor: float) -> bool:
    """Is the error that of rounding alone, were the values `factor` times as large?"""
    values = ours.values(parts).double() * factor
    wrong = float((w.double() - values).norm() / w.double().norm())
    coarse = ours.weight.scheme is not None and ours.weight.scheme.element.bits < 8
    return wrong < (0.15 if coarse else 0.05)
