"""Does re-quantizing the source give these very bytes? Asked of weights of which the manifest says
that this version of lowbit rounded them: of the first 128 rows of each run of rows, or 16 where the
rule searches. All codes are held to the scales that are stored anyway; here it is seen that the
scales, too, are what the rule makes of the source. (Those of whole matrices: see `largest`.)

Searches that were weighed by importance are left to their intervals, and to the hashes of the
manifest: what weighed them is not in the file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lowbit_kernels.error import BAND
from lowbitcli import __version__
from lowbitcli.checkpoint.manifest import Manifest
from lowbitcli.pipeline.arithmetic import ops_of
from lowbitcli.pipeline.lossless import keeps
from lowbitcli.plan.source import SourceWeight
from lowbitcli.schemes import Scheme
from lowbitcli.tensors import DATA, SCALE
from lowbitcli.verify.largest import shared_by
from lowbitcli.verify.mend_scales import RESCALED

PLAIN = ("amax", "floor", "even", "ceil", "ue8m0")  # rules that do not search
SEARCHED = 16  # rows that are made again where a rule searches: as many as share a scale by `2d`
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rule_of(weight: SourceWeight, other: SourceWeight, manifest: Manifest | None) -> str:
    """Return the rule by which a weight can be made again from the `other`, the source's; "" where
    that is not known, or codes of the source were kept."""
    if manifest is None or manifest.made is None or manifest.version != __version__:
        return ""
    rescaled = manifest.recipe.get(RESCALED)
    if isinstance(rescaled, list) and weight.name in rescaled:
        return ""
    rule = manifest.made.rounded.get(weight.name, "")
    known = weight.scheme is not None and rule in weight.scheme.rules
    return rule if known and not keeps(other.scheme, weight.scheme, rule) else ""


def rows_of(scheme: Scheme | None, rule: str, manifest: Manifest | None) -> int:
    """Return how many rows of each run are made again of a weight that was made by `rule`."""
    if scheme is None or manifest is None or not rule:
        return 0
    if rule in PLAIN:
        return BAND
    return 0 if rule in scheme.weighs and "importance" in manifest.recipe else SEARCHED


@dataclass(frozen=True)
class Others:
    """How many bytes are others, and where the first of them is."""

    count: int = 0
    where: str = ""


def differing(
    weight: SourceWeight, w: Tensor, parts: Mapping[str, Tensor], rule: str, rows: int, start: int
) -> Others | None:
    """Return what of the codes and scales of the first `rows` is not what `rule` makes of the
    source's `w [rows, cols]`, rows of a matrix from `start`; None where they cannot be made
    again."""
    scheme = weight.scheme
    if scheme is None:
        raise ValueError("only a quantized weight has codes")
    if not rows or w.dtype not in DTYPES:
        return None
    w = w[:rows].contiguous()
    whole = shared_by(scheme)
    try:
        ops = ops_of(scheme, weight.reads[SCALE].spec.dtype)
        made = ops.quantize(w, parts.get(whole), rule)
    except ValueError:
        return None
    found = Others()
    for name in (DATA, SCALE):
        if name == whole:
            continue
        mine = made[name]
        stored = parts[name].reshape(-1, parts[name].shape[-1])[: mine.shape[-2]]
        if mine.shape != stored.shape or mine.dtype != stored.dtype:
            return None
        different = mine.contiguous().view(torch.uint8) != stored.contiguous().view(torch.uint8)
        count = int(different.sum())
        if count and not found.count:
            row, byte = torch.nonzero(different)[0].tolist()
            row += start if name == DATA else start // (scheme.block[0] or 1)
            what = "codes" if name == DATA else "scales"
            found = Others(count, f"the first is byte {byte} of row {row} of its {what}")
        else:
            found = replace(found, count=found.count + count)
    return found
