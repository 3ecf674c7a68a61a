"""Requantizing to a scheme that can say the same: codes are kept, and what came out equal is
counted.

| from | to | the same numbers where |
|---|---|---|
| MXFP4 | NVFP4 | a block's scale is within 2^17 of the largest in the matrix |
| MXFP4 | MXFP8 | always, but for scales that are out of range |
| FP8 with an FP32 scale | MXFP8 | the scale is a power of two |

To MXFP8 the usual arithmetic is already lossless. To NVFP4 it is not: there the global scale
becomes the power of two 2^E / 256, E the exponent of the largest scale of a block that is not
zero, so that a scale 2^e is the E4M3 number 2^(e - E + 8), and the codes are the source's. Blocks
whose exponent is no E4M3 number are quantized as any other.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from lowbit_kernels import rounding
from lowbitcli.pipeline.arithmetic import ops_of
from lowbitcli.plan.nouns import Weight
from lowbitcli.schemes import Scheme
from lowbitcli.tensors import DATA, GLOBAL_SCALE, SCALE

PAIRS = frozenset(
    {
        ("mxfp4", "nvfp4"),
        ("mxfp4", "mxfp8"),
        ("fp8_block128", "mxfp8"),
        ("fp8_channel", "mxfp8"),
        ("fp8_tensor", "mxfp8"),
    }
)
LARGEST = 256.0  # the largest power of two of E4M3
LEAST = -9  # exponent of the smallest


def is_counted(weight: Weight) -> bool:
    """May blocks of this weight stay what they are?"""
    source, target = weight.source, weight.target
    return source is not None and target is not None and (source.name, target.name) in PAIRS


def keeps_codes(weight: Weight) -> bool:
    """Are the codes of the source kept, under a global scale that is a power of two?"""
    return keeps(weight.source, weight.target, weight.rule)


def keeps(source: Scheme | None, target: Scheme | None, rule: str) -> bool:
    """Are codes of `source` kept by `target` with this rule, wherever they can be?"""
    if source is None or target is None or rule != "amax":
        return False
    return (source.name, target.name) == ("mxfp4", "nvfp4")


def reach(parts: Mapping[str, Tensor]) -> Tensor:
    """Return 6 times the largest scale of a block of MXFP4 that is not zero, as fp32 `[]`: the
    largest magnitude that such a block could hold."""
    scale = rounding.e8m0_value(parts[SCALE])
    filled = _filled(parts[DATA], 16)
    return torch.where(filled, scale, 0.0).amax().cpu() * 6.0


def shared(reached: Tensor) -> Tensor:
    """Return the global scale of a matrix with this `reach`, a power of two; 1 for 0."""
    return torch.where(reached == 0, 1.0, reached / (6.0 * LARGEST))


def kept(source: Mapping[str, Tensor], parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `parts` in NVFP4, but the codes of `source` in MXFP4 wherever its scale can be said.

    Where the global scale is no power of two, nothing can.
    """
    mantissa, exponent = parts[GLOBAL_SCALE].float().frexp()
    if float(mantissa) != 0.5:
        return dict(parts)
    power = source[SCALE].to(torch.int32) - 127 - (exponent.to(torch.int32) - 1)
    said = (power >= LEAST) & (power <= 8)
    said = said.repeat_interleave(2, dim=-1) & _filled(source[DATA], 8)
    scale = torch.exp2(power.clamp(LEAST, 8).float()).repeat_interleave(2, dim=-1)
    codes = source[DATA].unflatten(-1, (said.shape[-1], 8))
    own = parts[DATA].unflatten(-1, (said.shape[-1], 8))
    data = torch.where(said.unsqueeze(-1), codes, own).flatten(-2)
    byte = torch.where(
        said, scale.to(torch.float8_e4m3fn).view(torch.uint8), parts[SCALE].view(torch.uint8)
    )
    return {**parts, DATA: data, SCALE: byte.view(torch.float8_e4m3fn)}


def _filled(packed: Tensor, width: int) -> Tensor:
    """Return which blocks of `width` bytes of E2M1 codes hold another number than zero."""
    return ((packed & 0x77) != 0).unflatten(-1, (-1, width)).any(-1)


def equal_blocks(weight: Weight, w: Tensor, parts: Mapping[str, Tensor]) -> tuple[int, int]:
    """Return how many blocks of some rows `parts` stand for the very numbers of, and of how
    many."""
    target = weight.target
    if target is None:
        raise ValueError("only a weight that is quantized has blocks")
    value = ops_of(target).dequantize(parts, torch.float32)
    same = (value == w.float()).unflatten(-1, (-1, target.block[1] or w.shape[-1])).all(-1)
    return int(same.sum()), same.numel()
