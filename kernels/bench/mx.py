"""MXFP8: quantize and dequantize."""

import peers
import torch
from roofline import Contender, Operation

from lowbit_kernels import mx
from lowbit_kernels.formats import E4M3


def _quantize(w: torch.Tensor):
    return lambda: mx.quantize_mxfp8(w)


def _back(w: torch.Tensor):
    data, scale = mx.quantize_mxfp8(w)
    return lambda: mx.dequantize(data, scale)


def _compiled(w: torch.Tensor):
    compiled = torch.compile(lambda w: mx._quantize_reference(w, E4M3, "amax"))
    return lambda: compiled(w)


def _eager(w: torch.Tensor):
    return lambda: mx._quantize_reference(w, E4M3, "amax")


def _check(w: torch.Tensor) -> None:
    want = mx._quantize_reference(w, E4M3, "amax")
    for ours, reference in zip(mx.quantize_mxfp8(w), want, strict=True):
        assert torch.equal(ours.view(torch.uint8), reference.view(torch.uint8))


def _bytes(w: torch.Tensor) -> float:
    return w.numel() * (w.element_size() + 1 + 1 / 32)


OPERATIONS = (
    Operation(
        "mxfp8",
        _bytes,
        [
            Contender("lowbit", _quantize),
            Contender("torch eager", _eager),
            Contender("torch.compile", _compiled),
            *peers.contenders(torchao=peers.ao_mxfp8, comfy=peers.comfy_mxfp8),
        ],
        check=_check,
    ),
    Operation(
        "mxfp8 dequantize",
        _bytes,
        [
            Contender("lowbit", _back),
            *peers.contenders(torchao=peers.ao_mxfp8_dequantize),
        ],
    ),
)
