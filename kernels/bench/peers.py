"""Other people's kernels for the same operations, where they can be imported. They are not
required."""

import contextlib
from collections.abc import Callable

import torch
from roofline import Contender

with contextlib.suppress(Exception):
    from torchao.prototype.mx_formats.kernels import triton_mxfp8_dequant_dim0, triton_to_mxfp8_dim0
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize
with contextlib.suppress(Exception):
    from torchao.prototype.blockwise_fp8_training.kernels import (
        triton_fp8_blockwise_weight_quant_rhs,
    )
with contextlib.suppress(Exception):
    import comfy_kitchen
with contextlib.suppress(Exception):
    from triton_kernels.numerics_details.mxfp import downcast_to_mxfp, upcast_from_mxfp

Prepare = Callable[[torch.Tensor], Callable[[], object]]


def contenders(**prepared: Prepare) -> list[Contender]:
    """Return the contenders whose package is there; a name says which (`torchao`, `comfy`, `triton`
    for triton_kernels).
    """
    there = {
        "torchao": "nvfp4_quantize" in globals(),
        "comfy": "comfy_kitchen" in globals(),
        "triton": "downcast_to_mxfp" in globals(),
    }
    return [
        Contender(name.replace("_", " "), prepare)
        for name, prepare in prepared.items()
        if there.get(name.split("_")[0], True)
    ]


def ao_mxfp8(w: torch.Tensor) -> Callable[[], object]:
    return lambda: triton_to_mxfp8_dim0(w, 32, "rceil")


def ao_mxfp8_dequantize(w: torch.Tensor) -> Callable[[], object]:
    data, scale = triton_to_mxfp8_dim0(w, 32, "rceil")
    return lambda: triton_mxfp8_dequant_dim0(data, scale.view(torch.uint8), torch.bfloat16, 32)


def ao_nvfp4(w: torch.Tensor) -> Callable[[], object]:
    g = w.abs().amax().float() / 2688
    return lambda: nvfp4_quantize(w, 16, g)


def ao_nvfp4_compiled(w: torch.Tensor) -> Callable[[], object]:
    g = w.abs().amax().float() / 2688
    compiled = torch.compile(nvfp4_quantize)
    return lambda: compiled(w, 16, g)


def ao_fp8_block(w: torch.Tensor) -> Callable[[], object]:
    return lambda: triton_fp8_blockwise_weight_quant_rhs(w, 128)


def comfy_nvfp4(w: torch.Tensor) -> Callable[[], object]:
    g = w.abs().amax().float() / 2688
    return lambda: comfy_kitchen.quantize_nvfp4(w, g)


def comfy_nvfp4_with_amax(w: torch.Tensor) -> Callable[[], object]:
    return lambda: comfy_kitchen.quantize_nvfp4(w, w.abs().amax().float() / 2688)


def comfy_nvfp4_dequantize(w: torch.Tensor) -> Callable[[], object]:
    g = w.abs().amax().float() / 2688
    packed, scale = comfy_kitchen.quantize_nvfp4(w, g)
    return lambda: comfy_kitchen.dequantize_nvfp4(packed, g, scale, torch.bfloat16)


def comfy_mxfp8(w: torch.Tensor) -> Callable[[], object]:
    return lambda: comfy_kitchen.quantize_mxfp8(w)


def comfy_fp8(w: torch.Tensor) -> Callable[[], object]:
    scale = w.abs().amax().float() / 448
    return lambda: comfy_kitchen.quantize_per_tensor_fp8(w, scale)


def comfy_fp8_dequantize(w: torch.Tensor) -> Callable[[], object]:
    scale = w.abs().amax().float() / 448
    data = comfy_kitchen.quantize_per_tensor_fp8(w, scale)
    return lambda: comfy_kitchen.dequantize_per_tensor_fp8(data, scale, torch.bfloat16)


def kernels_mxfp8(w: torch.Tensor) -> Callable[[], object]:
    return lambda: downcast_to_mxfp(w, torch.float8_e4m3fn, axis=-1)


def kernels_mxfp4(w: torch.Tensor) -> Callable[[], object]:
    return lambda: downcast_to_mxfp(w, torch.uint8, axis=-1)


def kernels_mxfp8_dequantize(w: torch.Tensor) -> Callable[[], object]:
    data, scale = downcast_to_mxfp(w, torch.float8_e4m3fn, axis=-1)
    return lambda: upcast_from_mxfp(data, scale, torch.bfloat16, axis=-1)


def kernels_mxfp4_dequantize(w: torch.Tensor) -> Callable[[], object]:
    data, scale = downcast_to_mxfp(w, torch.uint8, axis=-1)
    return lambda: upcast_from_mxfp(data, scale, torch.bfloat16, axis=-1)
