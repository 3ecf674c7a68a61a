"""MXFP8 and MXFP4: quantize and dequantize."""

import peers
import torch
from roofline import Contender, Operation

from lowbit_kernels import mx
from lowbit_kernels.formats import E2M1, E4M3, Format
from lowbit_kernels.jit import references


def _operations(name: str, element: Format, quantize, back) -> list[Operation]:
    """Return both directions of one format, with the peers' contenders."""

    def reference(w: torch.Tensor):
        return mx._quantize_reference(w, element, "amax", None)

    def prepare_compiled(w: torch.Tensor):
        compiled = torch.compile(reference)
        return lambda: compiled(w)

    def prepare_back(w: torch.Tensor):
        parts = mx.quantize(w, element)
        return lambda: mx.dequantize(*parts)

    def prepare_compiled_back(w: torch.Tensor):
        data, scale = mx.quantize(w, element)
        compiled = torch.compile(mx._dequantize_reference)
        return lambda: compiled(data, scale, torch.bfloat16)

    def check(w: torch.Tensor) -> None:
        for ours, want in zip(mx.quantize(w, element), reference(w), strict=True):
            assert torch.equal(ours.view(torch.uint8), want.view(torch.uint8))

    def check_back(w: torch.Tensor) -> None:
        parts = mx.quantize(w, element)
        with references():
            want = mx.dequantize(*parts)
        assert torch.equal(mx.dequantize(*parts).view(torch.int16), want.view(torch.int16))

    def size(w: torch.Tensor) -> float:
        return w.numel() * (w.element_size() + 1 / element.per_byte + 1 / mx.BLOCK)

    return [
        Operation(
            name,
            size,
            [
                Contender("lowbit", lambda w: lambda: mx.quantize(w, element)),
                Contender("torch eager", lambda w: lambda: reference(w)),
                Contender("torch.compile", prepare_compiled),
                *quantize,
            ],
            check=check,
        ),
        Operation(
            f"{name} dequantize",
            size,
            [
                Contender("lowbit", prepare_back),
                Contender("torch.compile", prepare_compiled_back),
                *back,
            ],
            check=check_back,
        ),
    ]


OPERATIONS = (
    *_operations(
        "mxfp8",
        E4M3,
        peers.contenders(
            torchao=peers.ao_mxfp8, comfy=peers.comfy_mxfp8, triton_kernels=peers.kernels_mxfp8
        ),
        peers.contenders(
            torchao=peers.ao_mxfp8_dequantize, triton_kernels=peers.kernels_mxfp8_dequantize
        ),
    ),
    *_operations(
        "mxfp4",
        E2M1,
        peers.contenders(triton_kernels=peers.kernels_mxfp4),
        peers.contenders(triton_kernels=peers.kernels_mxfp4_dequantize),
    ),
)
