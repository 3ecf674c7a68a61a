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

from lowbit_kernels import amax, fp8, fp8_block, hadamard, integer, mx, nvfp4, nvfp4_te, rounding
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


def _mx_rule(settings: dict) -> str:
    """Return our name of an oracle's rounding of scales."""
    rounding_of_scales = settings.get("scale_rounding")
    return rounding_of_scales if rounding_of_scales in mx.RULES else "amax"


def _mxfp8(x: Tensor, settings: dict) -> dict[str, Tensor]:
    data, scale = mx.quantize_mxfp8(x, _mx_rule(settings))
    return {"codes": data, "scales": scale, "dequant": mx.dequantize(data, scale, x.dtype)}


def _nvfp4(x: Tensor, settings: dict) -> dict[str, Tensor]:
    packed, scale, g = nvfp4.quantize(_pad(_matrix(x), 16))
    dequant = nvfp4.dequantize(packed, scale, g, x.dtype)[:, : x.shape[-1]].reshape(x.shape)
    return {"codes": packed, "scales": scale, "gscale": g, "dequant": dequant}


def _fp8_block128(x: Tensor, settings: dict) -> dict[str, Tensor]:
    rule = "ue8m0" if settings["use_ue8m0"] else "amax"
    data, scale = fp8_block.quantize(_matrix(x), rule, settings["block"][0])
    dequant = fp8_block.dequantize(data, scale, x.dtype, settings["block"][0])
    return {"codes": data, "scales": scale, "dequant": dequant}


def _mxfp4(x: Tensor, settings: dict) -> dict[str, Tensor]:
    packed, scale = mx.quantize_mxfp4(_pad(_matrix(x), 32), _mx_rule(settings))
    return {"codes": packed[:, : (x.shape[-1] + 1) // 2], "scales": scale}


def _nvfp4_cropped(x: Tensor, rule: str) -> dict[str, Tensor]:
    """Quantize as the oracles that pad inside and return the columns that were given."""
    packed, scale, g = nvfp4.quantize(_pad(_matrix(x), 16), None, rule)
    return {"codes": packed[:, : (x.shape[-1] + 1) // 2], "scales": scale, "gscale": g}


def _nvfp4_46(x: Tensor, settings: dict) -> dict[str, Tensor]:
    return _nvfp4_cropped(x, "four_over_six")


def _nvfp4_2d(x: Tensor, settings: dict) -> dict[str, Tensor]:
    return _nvfp4_cropped(x, "2d")


def _nvfp4_rht16(x: Tensor, settings: dict) -> dict[str, Tensor]:
    if x.shape[-1] % 16:
        raise ValueError("the oracle takes a multiple of 16 columns")
    # The oracle rotates by the CPU library's matrix product in the dtype of x, whose order of
    # adding is its own: so does this. `hadamard.rotate`, which has an order, is tested by itself.
    signs = torch.diag(torch.tensor(hadamard.SIGNS, dtype=torch.float32))
    rotation = hadamard.rotate(signs, (1,) * 16).to(x.dtype)
    y = (_matrix(x).cpu().unflatten(-1, (-1, 16)).flatten(0, -2) @ rotation).view_as(_matrix(x))
    y = y.to(DEVICE)
    top = amax.matrix(y)
    blocks = y.float().unflatten(-1, (-1, 16))
    packed, scale = nvfp4_te.quantize_blocks(blocks, top, tall=False)
    # The product flushes bf16 subnormals: a matrix of zeros is left, for which the oracle has 0.
    g = torch.where(top == 0, 0.0, nvfp4_te.global_scale_of(top, 448.0))
    return {"codes": packed, "scales": scale, "gscale": g}


def _nvfp4_mse(x: Tensor, settings: dict) -> dict[str, Tensor]:
    packed, scale, g = nvfp4.quantize(_matrix(x), None, "mse_all")
    return {"codes": packed, "scales": scale, "gscale": g}


def _int8_channel(x: Tensor, settings: dict) -> dict[str, Tensor]:
    if x.dim() != 2:
        raise ValueError("the oracle takes two dimensions")
    data, scale = integer.quantize_channel(x)
    dequant = integer.dequantize_channel(data, scale, x.dtype)
    return {"codes": data, "scales": scale, "dequant": dequant}


def _cast_e4m3(x: Tensor, settings: dict) -> dict[str, Tensor]:
    if x.dtype != torch.float32:
        raise ValueError("the oracle takes float32")
    return {"codes": fp8.quantize_tensor(_matrix(x), torch.ones((), device=x.device))[0]}


def _cast_e2m1(x: Tensor, settings: dict) -> dict[str, Tensor]:
    """Round by the reference: no kernel does only that. -0 keeps its sign, as in the oracle."""
    if x.dtype != torch.float32:
        raise ValueError("the oracle takes float32")
    return {"codes": rounding.pack(rounding.to_e2m1(x, torch.signbit(x)))}


SCHEMES = {
    "cast_e4m3": _cast_e4m3,
    "cast_e2m1": _cast_e2m1,
    "fp8_block128": _fp8_block128,
    "fp8_block128_pow2": _fp8_block128,
    "fp8_1x128": _fp8_block128,
    "fp8_1x128_pow2": _fp8_block128,
    "int8_channel": _int8_channel,
    "mxfp4": _mxfp4,
    "nvfp4_46": _nvfp4_46,
    "nvfp4_2d": _nvfp4_2d,
    "nvfp4_rht16": _nvfp4_rht16,
    "nvfp4_mse": _nvfp4_mse,
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
