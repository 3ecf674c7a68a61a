"""Error sums of a weight against its parts, in one read of both, beside dequantizing first."""

import torch
from roofline import Contender, Operation

from lowbit_kernels import error, mx, nvfp4
from lowbit_kernels.formats import E2M1, E4M3
from lowbit_kernels.jit import references

SHAPES = ("4096x4096", "16384x16384")


def _parts_nvfp4(w: torch.Tensor) -> dict[str, torch.Tensor]:
    return dict(zip(("data", "scale", "global_scale"), nvfp4.quantize(w), strict=True))


def _parts_mxfp8(w: torch.Tensor) -> dict[str, torch.Tensor]:
    return dict(zip(("data", "scale"), mx.quantize(w, E4M3), strict=True))


def _fused(parts_of, element, block):
    def prepare(w: torch.Tensor):
        parts = parts_of(w)
        return lambda: error.figures_of_parts(w, parts, element, block)

    return prepare


def _in_steps(parts_of, back):
    """Dequantize, then sum as torch would."""

    def prepare(w: torch.Tensor):
        parts = parts_of(w)

        def run() -> None:
            v = back(parts).float()
            d = v - w.float()
            torch.stack([(d * d).sum(), (w.float() ** 2).sum(), (v * v).sum(), d.abs().amax()])

        return run

    return prepare


def _check(parts_of, element, block):
    def check(w: torch.Tensor) -> None:
        part = w[:256].contiguous()
        parts = parts_of(part)
        with references():
            want = error.figures_of_parts(part, parts, element, block)
        assert torch.equal(error.figures_of_parts(part, parts, element, block), want)

    return check


def _operation(name, parts_of, back, element, block, quantized: float) -> Operation:
    return Operation(
        f"error sums of {name}",
        lambda w: w.numel() * (w.element_size() + quantized),
        [
            Contender("lowbit", _fused(parts_of, element, block)),
            Contender("torch eager, dequantized", _in_steps(parts_of, back)),
        ],
        check=_check(parts_of, element, block),
        shapes=SHAPES,
    )


OPERATIONS = (
    _operation(
        "nvfp4", _parts_nvfp4, lambda p: nvfp4.dequantize(*p.values()), E2M1, (1, 16), 0.5 + 1 / 16
    ),
    _operation(
        "mxfp8", _parts_mxfp8, lambda p: mx.dequantize(*p.values()), E4M3, (1, 32), 1 + 1 / 32
    ),
)
