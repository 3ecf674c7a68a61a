"""Do codes and scales lie as they are declared to? What numbers tell by themselves, of a sample.

NVFP4 scales its blocks so that the largest code of each is 6, but where the scale is subnormal: in
another order of codes a quarter of all blocks have none. Where the declared order has blocks
without and another has none, that is the order of the writer. Bytes of FP8 are known by their
halves, whose distributions differ. Scales of weights have rows and columns that are larger than
others: an order in which rows and columns tell much more of a scale is the order of the writer;
scales of noise are alike in any order, and nothing is said. What pads a matrix is zero.

Exchanged nibbles leave every block what it was: only the source tells them, see `diagnose`.
"""

from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor

from lowbit_kernels import rounding
from lowbit_kernels.formats import E2M1, E8M0
from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.containers.layouts import is_cropped
from lowbitcli.errors import CheckpointError
from lowbitcli.pipeline.read import tensor_of
from lowbitcli.plan.source import Source, SourceWeight
from lowbitcli.tensors import DATA, SCALE, TensorSpec
from lowbitcli.verify import orders
from lowbitcli.verify.nouns import WARN, Problem, Step
from lowbitcli.verify.rows import Rows, UnreadableError

SPANS, HIGH = 4, 32  # runs of rows that are looked at of a matrix, and rows of each
BLOCKS = 64  # of fewer nothing is said
ALIKE = 512  # bytes; fewer may be the same by chance, or of a small weight of zeros
LEAST = 0.02  # share of blocks without a 6 that asks for a look at other orders
NORMAL = 0x10  # E4M3 scales below are rounded too far to say what their blocks hold
APART = 0.2  # total variation between the halves of bytes that are no two codes
EVEN = 0.12  # largest share of one of 16 values that are nearly alike often
TELLS = 0.2  # how much more rows and columns must tell of scales in the other order


def plausible(
    checkpoint: Checkpoint,
    target: Source,
    device: torch.device,
    tell: Callable[[str, int], None],
    *,
    alone: bool = True,
) -> Step:
    """Look for codes and scales that lie in another order than the declared one and, where there is
    no source to hold them against (`alone`), for codes that are all the same."""
    problems: list[Problem] = []
    count = 0
    for weight in target.weights.values():
        if weight.scheme is None or len(weight.shape) < 2:
            continue
        count += 1
        tell(weight.name, 0)
        try:
            problems += _of_weight(checkpoint, weight, device)
            problems += _alike(checkpoint, weight, device) if alone else ()
        except (CheckpointError, UnreadableError) as error:
            problems.append(Problem("unreadable", weight.name, str(error), weight.file))
    problems += shapes(checkpoint, target)
    what = "codes and scales lie in the declared order (weights)"
    return Step(what, count, tuple(problems))


def _of_weight(
    checkpoint: Checkpoint, weight: SourceWeight, device: torch.device
) -> Iterator[Problem]:
    for name, message in (
        *_padding(checkpoint, weight),
        *_scale_order(checkpoint, weight, device),
        *_codes(checkpoint, weight, device),
    ):
        part = weight.reads[name]
        yield Problem("layout", part.spec.name, message, part.file)


def _codes(
    checkpoint: Checkpoint, weight: SourceWeight, device: torch.device
) -> Iterator[tuple[str, str]]:
    """NVFP4: is there a 6 in every block, and are halves of bytes two codes?"""
    scheme, part = weight.scheme, weight.reads[DATA]
    if scheme is None or scheme.name != "nvfp4":
        return
    rows = Rows(checkpoint, weight, device, tested=True)
    matrix = [rows.parts(0, start, stop) for start, stop in _spans(weight.shape[-2])]
    packed = torch.cat([parts[DATA] for parts in matrix])
    scale = torch.cat([parts[SCALE] for parts in matrix]).view(torch.uint8)
    without, blocks = _without(packed, scale)
    if blocks < BLOCKS or without <= max(4, LEAST * blocks):
        return
    if _is_fp8(packed):
        yield (
            DATA,
            "its bytes look like FP8, not like two codes: the halves of a byte are distributed "
            f"differently, and {without} of {blocks} blocks have no code of 6",
        )
        return
    if part.spec.nbytes > orders.MOST or len(weight.shape) != 2:
        return
    whole = rows.parts(0, 0, weight.shape[-2])[DATA]
    places = torch.cat([torch.arange(*span) for span in _spans(weight.shape[-2])]).to(device)
    fits = {}
    for words, other in orders.laid_out_otherwise(whole):
        left, _ = _without(other[places], scale)
        if left <= without / 10:
            fits[words] = left
    if fits:
        told = f"{' or '.join(fits)}: as declared {without} of {blocks} blocks have no code of 6"
        yield DATA, f"{told}, so {min(fits.values())}"


def _alike(checkpoint: Checkpoint, weight: SourceWeight, device: torch.device) -> Iterator[Problem]:
    """Warn of a weight whose codes are one byte, over and over."""
    rows, part = Rows(checkpoint, weight, device, tested=True), weight.reads[DATA]
    some = [rows.parts(0, start, stop)[DATA] for start, stop in _spans(weight.shape[-2])]
    codes = torch.cat(some).view(torch.uint8)
    if codes.numel() < ALIKE:
        return
    least, most = torch.aminmax(codes)
    if int(least) == int(most):
        message = f"every code that was looked at is the same, byte {int(most)}: is it a weight?"
        yield Problem("code", part.spec.name, message, part.file, WARN)


def _spans(rows: int) -> list[tuple[int, int]]:
    """Return some runs of rows, over all of the matrix."""
    if rows <= SPANS * HIGH:
        return [(0, rows)]
    step = (rows - HIGH) // (SPANS - 1)
    return [(number * step, number * step + HIGH) for number in range(SPANS)]


def _without(packed: Tensor, scale: Tensor) -> tuple[int, int]:
    """Return how many blocks have no code of 6, and how many there are that should."""
    largest = (rounding.unpack(packed) & 7).unflatten(1, (scale.shape[1], -1)).amax(-1)
    asked = (scale >= NORMAL) & (largest > 0)
    return int((asked & (largest < 7)).sum()), int(asked.sum())


def _is_fp8(packed: Tensor) -> bool:
    low = torch.bincount((packed & 15).flatten().int(), minlength=16) / packed.numel()
    high = torch.bincount((packed >> 4).flatten().int(), minlength=16) / packed.numel()
    apart = float((low - high).abs().sum()) / 2
    return apart > APART and float(min(low.max(), high.max())) < EVEN


def _scale_order(
    checkpoint: Checkpoint, weight: SourceWeight, device: torch.device
) -> Iterator[tuple[str, str]]:
    scheme, part = weight.scheme, weight.reads[SCALE]
    if scheme is None or not orders.is_ordered(part) or part.stored is None:
        return
    rows, cols = scheme.specs(weight.shape)[SCALE].shape[-2:]
    stored = tensor_of(checkpoint.read(part.spec.name), part.spec).to(device)
    other = orders.scales_otherwise(stored, part, rows, cols)
    if other is None or rows * cols < 8 * BLOCKS:
        return
    is_exponent = scheme.scale is E8M0
    if _told(other[1], is_exponent, rows * cols) <= TELLS:
        return
    declared = part.stored.layout.decode(stored)
    # Rows that repeat the one before, as those of tiles do, tell nothing of their own.
    own = min(_distinct(declared), _distinct(other[1])) * cols
    there = _told(other[1], is_exponent, own)
    if own < 8 * BLOCKS or there <= TELLS:
        return
    if stored.numel() > rows * cols and _zeros(other[1]) > _zeros(declared):
        return  # what pads the tiles would be scales
    here = _told(declared, is_exponent, own)
    if there > max(here, 0.0) + TELLS:
        yield (
            SCALE,
            f"its scales look {other[0]}, which this container's are not: rows and columns tell "
            f"{there:.0%} of how they vary in that order, {max(here, 0.0):.0%} in the declared one",
        )


def _zeros(scale: Tensor) -> int:
    return scale.numel() - int(_bytes(scale).clamp(max=1).sum())


def _distinct(scale: Tensor) -> int:
    """Return the number of rows that are not the same as the row before."""
    rows = _bytes(scale)
    return 1 + int((rows[1:] != rows[:-1]).any(1).sum())


def _told(scale: Tensor, is_exponent: bool, own: int) -> float:
    """Return how much of the variance of the logarithms rows and columns tell, for what noise
    would, where `own` scales are numbers of their own."""
    rows, cols = scale.shape
    table = _logarithms(is_exponent).to(scale.device)
    values = torch.index_select(table, 0, _bytes(scale).flatten().int())
    values = values.view(rows, cols).sub_(values.mean())
    free = own - rows - cols + 1
    square = float(values.square().sum())
    variance = square / max(own - 1, 1)
    if free < 1 or variance == 0:
        return 0.0
    # What is left beside the means of rows and columns, which are of numbers about 0.
    told = cols * values.mean(1).square().sum() + rows * values.mean(0).square().sum()
    return 1 - (square - float(told)) / free / variance


@cache
def _logarithms(is_exponent: bool) -> Tensor:
    """Return fp32 of the logarithm of each byte: of E4M3, or an exponent."""
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    if is_exponent:
        return codes.float()
    return codes.view(torch.float8_e4m3fn).float().nan_to_num(0.0).clamp_min(2.0**-10).log2()


def _bytes(scale: Tensor) -> Tensor:
    return scale.view(torch.uint8)


def _padding(checkpoint: Checkpoint, weight: SourceWeight) -> Iterator[tuple[str, str]]:
    """Is what pads codes and scales to whole tiles zero?"""
    scheme = weight.scheme
    if scheme is None or len(weight.shape) != 2:
        return
    for name in (DATA, SCALE):
        part = weight.reads[name]
        layout = part.stored.layout.name if part.stored is not None else ""
        if layout.startswith("padded"):
            wrong = _beyond_codes(checkpoint, weight)
        elif layout.startswith("swizzled"):
            rows, cols = scheme.specs(weight.shape)[SCALE].shape
            stored = tensor_of(checkpoint.read(part.spec.name), part.spec)
            whole = orders.whole_scales(stored.view(torch.uint8), part, rows, cols)
            wrong = int((whole[rows:] != 0).sum() + (whole[:rows, cols:] != 0).sum())
            other = stored.view(torch.uint8).reshape(whole.shape)
            if wrong and not (other[rows:].any() or other[:rows, cols:].any()):
                message = "its scales look linear, which this container's are not: so they are "
                yield name, message + "padded with zeros, and swizzled they are not"
                continue
        else:
            continue
        if wrong:
            yield name, f"what pads it is not zero: {wrong} bytes"


def _beyond_codes(checkpoint: Checkpoint, weight: SourceWeight) -> int:
    """Return the number of stored bytes beyond the rows and columns of a weight that are not 0."""
    part = weight.reads[DATA]
    rows, cols = weight.shape
    if is_cropped(weight.plain) and weight.plain is not None:
        cols = weight.plain.spec(TensorSpec("", "U8", weight.shape)).shape[1]
    high, wide = part.spec.shape
    per_byte = 2 if weight.scheme is not None and weight.scheme.element is E2M1 else 1
    used = -(-cols // per_byte)
    wrong = sum(1 for byte in checkpoint.read(part.spec.name, rows * wide, high * wide) if byte)
    if used < wide:
        for start in range(0, rows, 4096):
            stop = min(rows, start + 4096)
            raw = checkpoint.read(part.spec.name, start * wide, stop * wide)
            data = torch.frombuffer(raw, dtype=torch.uint8).reshape(stop - start, wide)
            wrong += int((data[:, used:] != 0).sum())
    return wrong


def shapes(checkpoint: Checkpoint, target: Source) -> Iterator[Problem]:
    """Say what a scale is that has another shape than the declared scheme needs."""
    for finding in target.findings:
        stored = checkpoint.tensors.get(finding.tensor)
        stem = finding.tensor.removesuffix("_scale")
        data = checkpoint.tensors.get(stem) or checkpoint.tensors.get(stem + "_packed")
        if finding.kind != "mismatch" or stored is None or data is None or stored is data:
            continue
        if len(data.spec.shape) != 2 or len(stored.spec.shape) != 2:
            continue
        if stored.spec.dtype not in ("U8", "F8_E4M3", "F8_E8M0"):
            continue  # no scale of a block
        per_byte = 2 if data.spec.dtype == "U8" else 1
        block = 16 if stored.spec.dtype == "F8_E4M3" else 32
        rows, cols = data.spec.shape[0], data.spec.shape[1] * per_byte // block
        told = _of_shape(stored.spec.shape, rows, cols, block)
        if told:
            yield Problem("layout", finding.tensor, told, stored.file)


def _of_shape(shape: tuple[int, ...], rows: int, cols: int, block: int) -> str:
    high, wide = -(-rows // 128) * 128, -(-cols // 4) * 4
    if shape == (cols, rows) and rows != cols:
        return "the scales are stored transposed"
    if shape == (rows, cols // 2) and cols % 2 == 0:
        return f"half as many scales as there are blocks of {block}: blocks of {2 * block} columns?"
    if shape == (rows, 2 * cols):
        return f"twice as many scales as there are blocks of {block}: blocks of {block // 2}?"
    if shape == (high, wide):
        return "the scales are padded to tiles of 128 x 4, as those are that are swizzled"
    return ""
