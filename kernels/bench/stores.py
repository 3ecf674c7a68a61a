"""Scales stored in 128x4 tiles by the quantizing kernel, and swizzled or unswizzled alone."""

import torch
from roofline import Contender, Operation

from lowbit_kernels import layout, mx, nvfp4
from lowbit_kernels.formats import E4M3
from lowbit_kernels.jit import references


def _global(w: torch.Tensor) -> torch.Tensor:
    return nvfp4.global_scale_of(nvfp4.amax_of.matrix(w))


def _nvfp4(w: torch.Tensor):
    g = _global(w)
    return lambda: nvfp4.quantize(w, g, layout="128x4", nibbles="high")


def _nvfp4_in_steps(w: torch.Tensor):
    g = _global(w)

    def run() -> None:
        packed, scale, _ = nvfp4.quantize(w, g)
        layout.arrange(packed, scale, "128x4", "high")

    return run


def _check_nvfp4(w: torch.Tensor) -> None:
    packed, scale, g = nvfp4.quantize(w, _global(w))
    with references():
        want = layout.arrange(packed, scale, "128x4", "high")
    got = nvfp4.quantize(w, g, layout="128x4", nibbles="high")
    for ours, reference in zip(got, want, strict=False):
        assert torch.equal(ours.flatten().view(torch.uint8), reference.flatten().view(torch.uint8))


def _scales(w: torch.Tensor) -> torch.Tensor:
    return nvfp4.quantize(w)[1]


def _swizzle(w: torch.Tensor):
    scale = _scales(w)
    return lambda: layout.swizzle(scale)


def _unswizzle(w: torch.Tensor):
    scale = _scales(w)
    rows, cols = scale.shape[-2:]
    swizzled = layout.swizzle(scale)
    return lambda: layout.unswizzle(swizzled, rows, cols)


def _swizzle_in_torch(w: torch.Tensor):
    scale = _scales(w)
    return lambda: layout._swizzle_reference(scale.view(torch.uint8))


def _check_swizzle(w: torch.Tensor) -> None:
    scale = _scales(w)
    with references():
        want = layout.swizzle(scale)
    assert torch.equal(layout.swizzle(scale).view(torch.uint8), want.view(torch.uint8))
    back = layout.unswizzle(want, *scale.shape[-2:])
    assert torch.equal(back.view(torch.uint8), scale.view(torch.uint8))


def _bytes_nvfp4(w: torch.Tensor) -> float:
    return w.numel() * (w.element_size() + 0.5 + 1 / 16)


def _bytes_mxfp8(w: torch.Tensor) -> float:
    return w.numel() * (w.element_size() + 1 + 1 / 32)


def _bytes_scales(w: torch.Tensor) -> float:
    return w.numel() / 16 * 2


OPERATIONS = (
    Operation(
        "nvfp4 in 128x4 tiles, high nibble first",
        _bytes_nvfp4,
        [Contender("lowbit", _nvfp4), Contender("lowbit, in steps", _nvfp4_in_steps)],
        check=_check_nvfp4,
    ),
    Operation(
        "mxfp8 in 128x4 tiles",
        _bytes_mxfp8,
        [Contender("lowbit", lambda w: lambda: mx.quantize(w, E4M3, layout="128x4"))],
    ),
    Operation(
        "swizzle of scales",
        _bytes_scales,
        [Contender("lowbit", _swizzle), Contender("torch eager", _swizzle_in_torch)],
        check=_check_swizzle,
    ),
    Operation("unswizzle of scales", _bytes_scales, [Contender("lowbit", _unswizzle)]),
)
