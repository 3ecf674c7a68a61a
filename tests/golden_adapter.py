"""The public functions of lowbit_kernels as one callable for golden checks: `quantize(x, scheme,
settings) -> roles`.

Roles: codes, scales, gscale, dequant. Ragged columns and stacks are padded, cropped or refused as
each oracle does; the schemes themselves refuse them. `LOWBIT_GOLDEN_PATH` chooses who computes:
`reference` (default, the CPU), `interpreter` (the kernels in Triton's interpreter, needs
TRITON_INTERPRET=1 too) or `cuda`.
"""

import os

import torch
from torch import Tensor
from torch.nn import functional

from lowbit_kernels import fp8, mx, nvfp4
from lowbit_kernels.jit import INTERPRETED

PATH = os.environ.get("LOWBIT_GOLDEN_PATH", "reference")
if PATH not in ("reference", "interpreter", "cuda"):
    raise ValueError(f"LOWBIT_GOLDEN_PATH is reference, interpreter or cuda, not {PATH!r}")
if (PATH == "interpreter") != INTERPRETED:
    raise ValueError("LOWBIT_GOLDEN_PATH=interpreter and TRITON_INTERPRET=1 go together")
DEVICE = "cuda" if PATH == "cuda" else "cpu"


def _pad(x: Tensor, width: int) -> Tensor:
    return functional.pad(x, (0, -x.shape[-1] % width))


def _matrix(x: Tensor) -> Tensor:
    """Lay a stack out as one matrix: the oracles take one amax over all of it."""
    return x.reshape(-1, x.shape[-1])


def _fp8_tensor(x: Tensor, settings: dict) -> dict[str, Tensor]:
    data, scale = fp8.quantize_tensor(_matrix(x))
    return {"codes": data, "scales": scale, "dequant": fp8.dequantize_tensor(data, scale, x.dtype)}


def _fp8_channel(x: Tensor, settings: dict) -> dict[str, Tensor]:
    if x.dim() != 2:
        raise ValueError("the oracle takes two dimensions")
    data, scale = fp8.quantize_channel(x)
    return {"codes": data, "scales": scale, "dequant": fp8.dequantize_channel(data, scale, x.dtype)}


def _mxfp8(x: Tensor, settings: dict) -> dict[str, Tensor]:
    data, scale = mx.quantize_mxfp8(x)
    return {"codes": data, "scales": scale, "dequant": mx.dequantize(data, scale, x.dtype)}


def _nvfp4(x: Tensor, settings: dict) -> dict[str, Tensor]:
    packed, scale, g = nvfp4.quantize(_pad(_matrix(x), 16))
    dequant = nvfp4.dequantize(packed, scale, g, x.dtype)[:, : x.shape[-1]].reshape(x.shape)
    return {"codes": packed, "scales": scale, "gscale": g, "dequant": dequant}


SCHEMES = {
    "fp8_tensor": _fp8_tensor,
    "fp8_channel": _fp8_channel,
    "mxfp8": _mxfp8,
    "nvfp4": _nvfp4,
}


def quantize(x: Tensor, scheme: str, settings: dict) -> dict[str, Tensor]:
    """Quantize `x` by our rule for `scheme`; raise where the oracle refuses."""
    parts = SCHEMES[scheme](x.to(DEVICE), settings)
    return {
        role: part.cpu() if isinstance(part, torch.Tensor) else part for role, part in parts.items()
    }
