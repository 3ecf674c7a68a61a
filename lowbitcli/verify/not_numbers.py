"""Do tensors that are not quantized hold NaN?

Asked where no source is named, which they would be held to byte for byte. Inf is no fault: masks
have it.
"""

from collections.abc import Callable

import torch

from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.errors import CheckpointError
from lowbitcli.pipeline.arithmetic import torch_dtype
from lowbitcli.plan.source import Source, SourceWeight
from lowbitcli.tensors import DATA
from lowbitcli.verify.nouns import WARN, Problem, Step

PIECE = 16 << 20
DTYPES = ("F32", "BF16", "F16", "F64")


def nan_in_kept(
    checkpoint: Checkpoint, target: Source, tell: Callable[[str, int], None], *, alone: bool
) -> Step:
    """Warn of tensors in floating point that hold NaN."""
    what = "tensors that are not quantized hold no NaN"
    if not alone:
        return Step(what, skipped="they are held to the source")
    weights = [one for one in target.weights.values() if one.scheme is None and one.dtype in DTYPES]
    problems = []
    for weight in weights:
        tell(weight.name, weight.nbytes)
        try:
            count = _nan(checkpoint, weight)
        except CheckpointError as error:
            problems.append(Problem("unreadable", weight.name, error.message, weight.file))
            continue
        if count:
            message = f"{count:,} of {weight.numel:,} elements are NaN"
            problems.append(Problem("nonfinite", weight.name, message, weight.file, WARN))
    return Step(what, len(weights), tuple(problems))


def _nan(checkpoint: Checkpoint, weight: SourceWeight) -> int:
    part, count = weight.reads[DATA], 0
    begin, stop = part.begin, part.begin + part.nbytes
    for start in range(begin, stop, PIECE):
        raw = checkpoint.read(part.spec.name, start, min(start + PIECE, stop))
        count += int(torch.isnan(torch.frombuffer(raw, dtype=torch_dtype(weight.dtype))).sum())
    return count
