"""What a better choice of scales costs: the rules that search. Rotations by Hadamard matrices."""

import torch
from roofline import Contender, Operation

from lowbit_kernels import hadamard, mx, nvfp4
from lowbit_kernels.formats import E2M1, E4M3
from lowbit_kernels.jit import references

SHAPES = ("4096x4096", "16384x16384")


def _nvfp4(rule: str, weighted: bool = False):
    def prepare(w: torch.Tensor):
        largest = nvfp4.LARGEST_SCALE[rule]
        g = nvfp4.nvfp4_te.global_scale_of(nvfp4.amax_of.matrix(w), largest)
        h = _columns(w) if weighted else None
        return lambda: nvfp4.quantize(w, g, rule, h)

    return prepare


def _check_nvfp4(rule: str):
    def check(w: torch.Tensor) -> None:
        part = w[:256].contiguous()
        with references():
            want = nvfp4.quantize(part, rule=rule)
        for ours, reference in zip(nvfp4.quantize(part, rule=rule), want, strict=True):
            assert torch.equal(
                ours.flatten().view(torch.uint8), reference.flatten().view(torch.uint8)
            )

    return check


def _bytes4(w: torch.Tensor) -> float:
    return w.numel() * (w.element_size() + 0.5 + 1 / 16)


def _bytes_mxfp4(w: torch.Tensor) -> float:
    return w.numel() * (w.element_size() + 0.5 + 1 / 32)


def _bytes_mxfp8(w: torch.Tensor) -> float:
    return w.numel() * (w.element_size() + 1 + 1 / 32)


def _bytes_rotated(w: torch.Tensor) -> float:
    return w.numel() * (w.element_size() + 4)


def _columns(w: torch.Tensor) -> torch.Tensor:
    return torch.linspace(0.5, 2.0, w.shape[-1], device=w.device)


def _mx(element, rule: str, weighted: bool = False):
    def prepare(w: torch.Tensor):
        h = _columns(w) if weighted else None
        return lambda: mx.quantize(w, element, rule, importance=h)

    return prepare


def _check_weighted(quantize):
    def check(w: torch.Tensor) -> None:
        part = w[:256].contiguous()
        with references():
            want = quantize(part, _columns(part))
        for ours, reference in zip(quantize(part, _columns(part)), want, strict=True):
            assert torch.equal(
                ours.flatten().view(torch.uint8), reference.flatten().view(torch.uint8)
            )

    return check


def _check_hadamard(w: torch.Tensor) -> None:
    part = w[:256].contiguous()
    with references():
        want = hadamard.rotate(part)
    assert torch.equal(hadamard.rotate(part), want)


def _rotate_as_product(w: torch.Tensor):
    matrix = hadamard._matrix(hadamard.SIGNS, w.device)
    return lambda: w.float().unflatten(-1, (w.shape[-1] // 16, 16)) @ matrix


OPERATIONS = (
    *(
        Operation(
            f"nvfp4 {rule}",
            _bytes4,
            [Contender("lowbit", _nvfp4(rule))],
            check=_check_nvfp4(rule),
            shapes=SHAPES,
        )
        for rule in ("mse", "mse_all", "four_over_six", "2d")
    ),
    Operation(
        "nvfp4 mse, weighted by column",
        _bytes4,
        [Contender("lowbit", _nvfp4("mse", True))],
        check=_check_weighted(lambda w, h: nvfp4.quantize(w, rule="mse", importance=h)),
        shapes=SHAPES,
    ),
    Operation("mxfp4 mse", _bytes_mxfp4, [Contender("lowbit", _mx(E2M1, "mse"))], shapes=SHAPES),
    Operation(
        "mxfp4 mse, weighted by column",
        _bytes_mxfp4,
        [Contender("lowbit", _mx(E2M1, "mse", True))],
        check=_check_weighted(lambda w, h: mx.quantize(w, E2M1, "mse", importance=h)),
        shapes=SHAPES,
    ),
    Operation("mxfp8 mse", _bytes_mxfp8, [Contender("lowbit", _mx(E4M3, "mse"))], shapes=SHAPES),
    Operation(
        "hadamard 16",
        _bytes_rotated,
        [
            Contender("lowbit", lambda w: lambda: hadamard.rotate(w)),
            Contender("torch matmul", _rotate_as_product),
        ],
        check=_check_hadamard,
        shapes=SHAPES,
    ),
)
