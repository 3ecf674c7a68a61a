"""NVFP4: quantize with the global scale given, with its amax, and dequantize."""

import peers
import torch
from roofline import Contender, Operation

from lowbit_kernels import nvfp4

QUANTIZED = 0.5 + 1 / 16  # bytes of an element


def _given(w: torch.Tensor):
    g = nvfp4.global_scale_of(nvfp4.amax_of.matrix(w))
    return lambda: nvfp4.quantize(w, g)


def _with_amax(w: torch.Tensor):
    return lambda: nvfp4.quantize(w)


def _back(w: torch.Tensor):
    packed, scale, g = nvfp4.quantize(w)
    return lambda: nvfp4.dequantize(packed, scale, g)


def _eager(w: torch.Tensor):
    g = nvfp4.global_scale_of(nvfp4.amax_of.matrix(w))
    return lambda: nvfp4._quantize_reference(w, g, None, None)


def _eager_back(w: torch.Tensor):
    packed, scale, g = nvfp4.quantize(w)
    return lambda: nvfp4._dequantize_reference(packed, scale, g, torch.bfloat16)


def _compiled_back(w: torch.Tensor):
    packed, scale, g = nvfp4.quantize(w)
    compiled = torch.compile(nvfp4._dequantize_reference)
    return lambda: compiled(packed, scale, g, torch.bfloat16)


def _check(w: torch.Tensor) -> None:
    g = nvfp4.global_scale_of(nvfp4.amax_of.matrix(w))
    want = nvfp4._quantize_reference(w, g, None, None)
    for ours, reference in zip(nvfp4.quantize(w, g), want, strict=False):
        assert torch.equal(ours.view(torch.uint8), reference.view(torch.uint8))


def _check_back(w: torch.Tensor) -> None:
    packed, scale, g = nvfp4.quantize(w)
    reference = nvfp4._dequantize_reference(packed, scale, g, torch.bfloat16)
    ours = nvfp4.dequantize(packed, scale, g)
    assert torch.equal(ours.view(torch.int16), reference.view(torch.int16))


def _bytes(w: torch.Tensor) -> float:
    return w.numel() * (w.element_size() + QUANTIZED)


OPERATIONS = (
    Operation(
        "nvfp4, scale given",
        _bytes,
        [
            Contender("lowbit", _given),
            Contender("torch eager", _eager),
            *peers.contenders(
                torchao=peers.ao_nvfp4,
                torchao_compiled=peers.ao_nvfp4_compiled,
                comfy=peers.comfy_nvfp4,
            ),
        ],
        check=_check,
    ),
    Operation(
        "nvfp4, amax + quantize",
        _bytes,
        [Contender("lowbit", _with_amax), *peers.contenders(comfy=peers.comfy_nvfp4_with_amax)],
        moved=lambda w: _bytes(w) + w.numel() * w.element_size(),
        check=_check,
    ),
    Operation(
        "nvfp4 dequantize",
        _bytes,
        [
            Contender("lowbit", _back),
            Contender("torch eager", _eager_back),
            Contender("torch.compile", _compiled_back),
            *peers.contenders(comfy=peers.comfy_nvfp4_dequantize),
        ],
        check=_check_back,
    ),
)
