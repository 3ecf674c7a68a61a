"""Every public operation that quantizes, by name: what tests of shapes and of NaN go through."""

from collections.abc import Callable

import torch
from torch import Tensor

from lowbit_kernels import amax, error_figures, fp8, fp8_block, hadamard, integer, mx, nvfp4
from lowbit_kernels.formats import E2M1, E4M3, E5M2

Quantize = Callable[[Tensor], "tuple[Tensor, ...]"]
Dequantize = Callable[..., Tensor]


def _quantizers() -> dict[str, tuple[Quantize, Dequantize]]:
    """Return name -> (weight to parts, parts to values)."""
    found: dict[str, tuple[Quantize, Dequantize]] = {
        "int8": (integer.quantize_channel, integer.dequantize_channel),
        "int4 32": (lambda w: integer.quantize_int4(w, 32), integer.dequantize),
        "int4 64": (lambda w: integer.quantize_int4(w, 64), integer.dequantize),
    }
    for e in (E4M3, E5M2):
        found[f"fp8 tensor {e.name}"] = (
            lambda w, e=e: fp8.quantize_tensor(w, None, e),
            fp8.dequantize_tensor,
        )
        found[f"fp8 channel {e.name}"] = (
            lambda w, e=e: fp8.quantize_channel(w, e),
            fp8.dequantize_channel,
        )
        for rule in fp8_block.RULES:
            for high in (1, 128):
                found[f"fp8 {high}x128 {rule} {e.name}"] = (
                    lambda w, r=rule, h=high, e=e: fp8_block.quantize(w, r, h, e),
                    lambda d, s, t=torch.bfloat16, h=high: fp8_block.dequantize(d, s, t, h),
                )
    for e in (E4M3, E5M2, E2M1):
        for rule in mx.RULES:
            found[f"mx {e.name} {rule}"] = (
                lambda w, e=e, r=rule: mx.quantize(w, e, r),
                mx.dequantize,
            )
    for rule in nvfp4.LARGEST_SCALE:
        found[f"nvfp4 {rule}"] = (lambda w, r=rule: nvfp4.quantize(w, None, r), nvfp4.dequantize)
    return found


QUANTIZERS = _quantizers()
# Operations of a weight that have nothing to decode.
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "amax.matrix": amax.matrix,
    "amax.rows": amax.rows,
    "amax.blocks": lambda w: amax.blocks(w, 32),
    "rotate": hadamard.rotate,
    "rotate_back": hadamard.rotate_back,
}
FIGURES = {"figures": lambda w: error_figures.figures(w, w.float() * 1.01)}
