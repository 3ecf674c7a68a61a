"""Keys and values in NVFP4: amax and the fused kernel, beside amax, quantize and swizzle apart."""

import torch
from roofline import Contender, Operation

from lowbit_kernels import amax, kv_nvfp4, layout, nvfp4

QUANTIZED = 0.5 + 1 / 16  # bytes of an element
SHAPES = ("4096x8x128", "32768x8x128", "131072x8x128")  # tokens x heads x dim


def _fused(x: torch.Tensor):
    return lambda: kv_nvfp4.quantize(x)


def _both(x: torch.Tensor):
    k, v = x.chunk(2)
    return lambda: kv_nvfp4.quantize_kv(k, v)


def _apart(x: torch.Tensor):
    """The kernels of `nvfp4`, whose order of operations is another, and of `layout`."""
    rows = x.reshape(-1, x.shape[-1])

    def run():
        g = nvfp4.global_scale_of(amax.matrix(rows))
        packed, scale, g = nvfp4.quantize(rows, g)
        return packed, layout.swizzle(scale), g

    return run


def _eager(x: torch.Tensor):
    rows = x.reshape(-1, x.shape[-1])

    def run():
        top = rows.abs().amax().float()
        packed, scale = kv_nvfp4._quantize_reference(rows, top)
        return packed, scale, top / torch.full_like(top, kv_nvfp4.LARGEST)

    return run


def _back(x: torch.Tensor):
    q = kv_nvfp4.quantize(x)
    return lambda: kv_nvfp4.dequantize(*q)


def _check(x: torch.Tensor) -> None:
    for ours, reference in zip(kv_nvfp4.quantize(x), _eager(x)(), strict=True):
        one, other = (t.reshape(-1).view(torch.uint8) for t in (ours, reference))
        assert torch.equal(one, other)


def _bytes(x: torch.Tensor) -> float:
    return x.numel() * (x.element_size() + QUANTIZED)


OPERATIONS = (
    Operation(
        "kv nvfp4",
        _bytes,
        [
            Contender("lowbit", _fused),
            Contender("lowbit, both of K and V", _both),
            Contender("lowbit, steps apart", _apart),
            Contender("torch eager", _eager),
        ],
        moved=lambda x: _bytes(x) + x.numel() * x.element_size(),
        check=_check,
        shapes=SHAPES,
    ),
    Operation("kv nvfp4 dequantize", _bytes, [Contender("lowbit", _back)], shapes=SHAPES),
)
