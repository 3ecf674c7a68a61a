"""Many weights of an MoE's size in one set of launches, beside one set of launches for each."""

from collections.abc import Callable

import peers
import torch
from roofline import Contender, Operation

from lowbit_kernels import fp8, grouped, mx, nvfp4
from lowbit_kernels.ops import Ops

SHAPES = ("256x2048x768",)


def _together(ops: Ops) -> Callable:
    def prepare(w: torch.Tensor):
        weights = list(w.unbind(0))
        return lambda: grouped.quantize(ops, weights)

    return prepare


def _one_by_one(ops: Ops) -> Callable:
    def prepare(w: torch.Tensor):
        weights = list(w.unbind(0))

        def run() -> None:
            for one in weights:
                ops.quantize(one, ops.shared(ops.measure(one), "amax"), "amax")

        return run

    return prepare


def _peer(each: peers.Prepare) -> Callable:
    def prepare(w: torch.Tensor):
        calls = [each(one) for one in w.unbind(0)]

        def run() -> None:
            for call in calls:
                call()

        return run

    return prepare


def _check(ops: Ops) -> Callable[[torch.Tensor], None]:
    def check(w: torch.Tensor) -> None:
        weights = list(w[:9].unbind(0))
        for one, ours in zip(weights, grouped.quantize(ops, weights), strict=True):
            want = ops.quantize(one, ops.shared(ops.measure(one), "amax"), "amax")
            for part, tensor in want.items():
                assert torch.equal(
                    ours[part].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
                ), part

    return check


def _operation(name: str, ops: Ops, quantized: float, passes: int, *more: Contender) -> Operation:
    def size(w: torch.Tensor) -> float:
        return w.numel() * (w.element_size() + quantized)

    return Operation(
        f"{name}, {'amax + quantize ' if passes == 2 else ''}256 weights",
        size,
        [
            Contender("lowbit", _together(ops), queued=True),
            Contender("lowbit, one by one", _one_by_one(ops)),
            *more,
        ],
        moved=lambda w: size(w) + (passes - 1) * w.numel() * w.element_size(),
        check=_check(ops),
        shapes=SHAPES,
    )


OPERATIONS = (
    _operation(
        "nvfp4",
        nvfp4.NVFP4,
        0.5 + 1 / 16,
        2,
        *peers.contenders(comfy=_peer(peers.comfy_nvfp4_with_amax)),
    ),
    _operation("fp8 per tensor", fp8.TENSOR, 1, 2),
    _operation("fp8 per channel", fp8.CHANNEL, 1, 1),
    _operation("mxfp8", mx.MXFP8, 1 + 1 / 32, 1, *peers.contenders(comfy=_peer(peers.comfy_mxfp8))),
    _operation("mxfp4", mx.MXFP4, 0.5 + 1 / 32, 1),
)
