"""Small weights of one kind as the stack that they are: what is done to n of them is done once.

    kind       scheme, rule, dtype and shape, and how each part is stored
    stack      `[n, rows, cols]`: measured, quantized and compared in one set of launches

All arithmetic of a scheme takes stacks, and gives each matrix what it would have by itself; so does
every layout. What is not as simple as that is done one by one.
"""

from collections.abc import Hashable

import torch
from torch import Tensor
from torch.nn import functional

from lowbit_kernels import cpu_figures
from lowbit_kernels.error import BAND, figures_of_parts
from lowbit_kernels.jit import use_kernel
from lowbitcli.containers.layouts import IDENTITY, MATRIX1, RECIPROCAL1, VECTOR1
from lowbitcli.pipeline.arithmetic import ops_of
from lowbitcli.pipeline.compute import shared_scale, without_steps
from lowbitcli.pipeline.slices import rows_high, unit_rows
from lowbitcli.plan.nouns import Part, Weight
from lowbitcli.schemes import Scheme
from lowbitcli.tensors import DATA, FLOATING, GLOBAL_SCALE, SCALE

# Layouts of a scale that n matrices may go through at once, and back.
_BY_NUMBER = (IDENTITY, VECTOR1, MATRIX1, RECIPROCAL1)


def fits(weight: Weight) -> bool:
    """May a weight be one of a stack? It is a matrix of numbers that is only rounded."""
    read, scheme = weight.reads[DATA], weight.target
    if scheme is None or weight.source is not None or len(weight.shape) != 2:
        return False
    if weight.fake or weight.importance:
        return False
    if read.stored is not None or read.view is not None or read.spec.dtype not in FLOATING:
        return False
    stored = _shared_part(weight, scheme).stored
    by_number = stored is None or scheme.passes == 1 or stored.layout in _BY_NUMBER
    return by_number and unit_rows(weight) % BAND == 0


def kind(weight: Weight) -> Hashable:
    """Return what weights of one stack have in common."""
    stored = tuple((name, part.stored, part.spec.dtype) for name, part in weight.writes.items())
    return weight.target, weight.rule, weight.dtype, weight.shape, stored


def _shared_part(weight: Weight, scheme: Scheme) -> Part:
    return weight.writes[GLOBAL_SCALE if scheme.global_scale is not None else SCALE]


def measure(weight: Weight, stack: Tensor) -> Tensor:
    """Return the largest magnitude of each matrix of a stack of weights like `weight`, fp32
    `[n]`."""
    return ops_of(_scheme(weight)).measure(stack)


def quantize(weight: Weight, stack: Tensor, amax: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return the parts of each matrix of a stack, and what each lost as `_lost` has it; `amax [n]`,
    in memory of the CPU, is what scales come from.

    Raises:
        ValueError: the arithmetic refuses such a weight.
    """
    scheme = _scheme(weight)
    shared = shared_scale(weight, amax)
    if shared is not None:
        shared = shared.reshape(len(stack)).to(stack.device)
    parts = ops_of(scheme, weight.dtype).quantize(stack, shared, weight.rule)
    return parts, _lost(scheme, stack, parts)


def _lost(scheme: Scheme, w: Tensor, parts: dict[str, Tensor]) -> Tensor:
    """Return the error figures of the bands of each matrix, fp64 `[n, bands, 6]` in memory of the
    CPU, as `compute.lost` has them."""
    if not use_kernel(w):
        return cpu_figures.figures_of_stack(w, ops_of(scheme).dequantize(parts, torch.float32))
    low = -w.shape[-2] % BAND
    if low:  # a band holds rows of one matrix: fill up with rows of zeros, which add nothing
        w = functional.pad(w, (0, 0, 0, low))
        parts = {name: _filled(scheme, name, part, w) for name, part in parts.items()}
    found = figures_of_parts(w, parts, scheme.element, scheme.block)
    return without_steps(found).unflatten(0, (len(w), -1))


def _filled(scheme: Scheme, name: str, part: Tensor, w: Tensor) -> Tensor:
    """Return a part of a stack with rows for those that `w` was filled up with."""
    high = rows_high(scheme, name)
    if high is None:
        return part
    flat = part.view(torch.uint8) if part.element_size() == 1 else part
    low = -(-w.shape[-2] // high) - part.shape[1]
    return functional.pad(flat, (0, 0) * (part.dim() - 2) + (0, low)).view(part.dtype)


def _scheme(weight: Weight) -> Scheme:
    if weight.target is None:
        raise ValueError("no scheme to quantize to")
    return weight.target
