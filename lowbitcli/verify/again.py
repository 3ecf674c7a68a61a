"""Does re-quantizing the source give these very bytes? Asked of weights of which the manifest says
that this version of lowbit rounded them, by a rule that takes the scale from the largest element:
of the first 128 rows of each run of rows. All codes are held to the scales that are stored anyway;
here it is seen that the scales, too, are what the rule makes of the source.

Rules that search (`mse`, `four_over_six`) and schemes of one scale for the whole matrix are left to
their intervals, and to the hashes of the manifest.
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
from lowbitcli.tensors import DATA, GLOBAL_SCALE, SCALE
from lowbitcli.verify.mend_scales import RESCALED

SCHEMES = ("fp8_channel", "fp8_block128", "mxfp8", "mxfp4", "nvfp4", "int8_channel")
RULES = ("amax", "floor", "even", "ceil", "ue8m0")
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
    known = weight.scheme is not None and weight.scheme.name in SCHEMES and rule in RULES
    return rule if known and not keeps(other.scheme, weight.scheme, rule) else ""


@dataclass(frozen=True)
class Others:
    """How many bytes are others, and where the first of them is."""

    count: int = 0
    where: str = ""


def differing(
    scheme: Scheme, w: Tensor, parts: Mapping[str, Tensor], rule: str, start: int
) -> Others | None:
    """Return what of the first rows' codes and scales is not what `rule` makes of the source's
    `w [rows, cols]`, rows of a matrix from `start`; None where they cannot be made again."""
    if not rule or w.dtype not in DTYPES:
        return None
    w = w[:BAND].contiguous()
    try:
        made = ops_of(scheme).quantize(w, parts.get(GLOBAL_SCALE), rule)
    except ValueError:
        return None
    found = Others()
    for name in (DATA, SCALE):
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
