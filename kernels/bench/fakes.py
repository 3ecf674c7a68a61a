"""Fake quantization: values rounded and given back."""

import torch
from roofline import Contender, Operation

from lowbit_kernels import fake_quant

SHAPES = ("4096x4096", "14336x4096")


def _int8(w: torch.Tensor):
    top = w.abs().amax(1)
    return lambda: fake_quant.fake_tensor_quant(w, top, axis=0)


def _e4m3(w: torch.Tensor):
    top = w.abs().amax()
    return lambda: fake_quant.scaled_e4m3(w, top)


def _static(w: torch.Tensor):
    top = w.abs().reshape(-1, 16).amax(1)
    return lambda: fake_quant.static_block_fp4(w, top)


def _fp4(w: torch.Tensor):
    return lambda: fake_quant.fp4_cast(w)


def _nvfp4(w: torch.Tensor):
    return lambda: fake_quant.dynamic_block_quant(w, 16, None, None, (2, 1), (4, 3))


def _mx(element: tuple[int, int]):
    def prepare(w: torch.Tensor):
        return lambda: fake_quant.dynamic_block_quant(w, 32, None, None, element, (8, 0))

    return prepare


def _trained(w: torch.Tensor):
    leaf = w.detach().requires_grad_()
    upstream = torch.ones_like(w)

    def run():
        y = fake_quant.dynamic_block_quant(leaf, 16, None, None, (2, 1), (4, 3))
        return torch.autograd.grad(y, leaf, upstream)

    return run


def _bytes(w: torch.Tensor) -> float:
    return 2 * w.numel() * w.element_size()


CALLS = {
    "int8 by rows": _int8,
    "e4m3": _e4m3,
    "fp4 cast": _fp4,
    "static fp4": _static,
    "nvfp4": _nvfp4,
    "nvfp4, and the gradient": _trained,
    "mxfp8": _mx((4, 3)),
    "mxfp6": _mx((2, 3)),
    "mxfp4": _mx((2, 1)),
}
OPERATIONS = tuple(
    Operation(f"fake {name}", _bytes, [Contender("lowbit", prepare)], shapes=SHAPES)
    for name, prepare in CALLS.items()
)
