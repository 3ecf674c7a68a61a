"""Compile the kernels of a plan while its first slices are being read.

A kernel is compiled for dtypes and for what divides its arguments: a small weight of each kind in
the plan brings up what nearly all of its weights need. Kernels are compiled side by side: most of
that is done by the compiler and by programs that it starts.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from lowbitcli.pipeline import compute, early
from lowbitcli.pipeline.arithmetic import ops_of, torch_dtype
from lowbitcli.pipeline.read import tensor_of
from lowbitcli.plan.nouns import Plan, Weight
from lowbitcli.schemes import Scheme
from lowbitcli.tensors import FLOATING

_ROWS, _COLS = 128, 1024
_AT_ONCE = 6


class Warm:
    """Compilation under way; `wait` for its end before the first launch."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self._thread: threading.Thread | None = None
        if device.type != "cuda":
            return
        kinds = {
            (w.source, w.target, w.rule, w.dtype, bool(w.importance)): w
            for w in plan.weights
            if not w.copies
        }
        some = [weight for weight in kinds.values() if not weight.recodes]
        self._thread = threading.Thread(target=_compile, args=(some, device), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until it is done; what it could not compile is compiled when it is needed."""
        if self._thread is not None:
            self._thread.join()


def _compile(weights: list[Weight], device: torch.device) -> None:
    early.wait()
    calls = [call for weight in weights for call in _calls(weight)]
    with ThreadPoolExecutor(_AT_ONCE, "lowbit-warm") as pool:
        list(pool.map(partial(_try, device=device), calls))
    torch.cuda.synchronize(device)


def _try(call: Callable[[torch.device], object], device: torch.device) -> None:
    torch.cuda.set_device(device)
    try:
        call(device)
    except (RuntimeError, ValueError):
        return  # said with the weight's name when its turn comes


def _calls(weight: Weight) -> list[Callable[[torch.device], object]]:
    """Return what is to be compiled for a weight, one call for each kernel."""
    found: list[Callable[[torch.device], object]] = []
    if weight.source is not None:
        found.append(partial(_dequantize, weight.source))
    if weight.target is not None:
        found.append(partial(_measure, weight))
        found.append(partial(_quantize, weight))
        found.append(partial(_errors, weight))
    return found


def _zeros(weight: Weight, device: torch.device) -> Tensor:
    """Return numbers as a weight's values are: as stored, or dequantized to fp32."""
    floating = weight.source is None and weight.dtype in FLOATING
    dtype = torch_dtype(weight.dtype) if floating else torch.float32
    return torch.zeros(_ROWS, _COLS, dtype=dtype, device=device)


def _parts(scheme: Scheme, device: torch.device) -> dict[str, Tensor]:
    specs = scheme.specs((_ROWS, _COLS))
    return {
        name: tensor_of(torch.zeros(spec.nbytes, dtype=torch.uint8, device=device), spec)
        for name, spec in specs.items()
    }


def _dequantize(scheme: Scheme, device: torch.device) -> None:
    ops_of(scheme).dequantize(_parts(scheme, device), torch.float32)


def _measure(weight: Weight, device: torch.device) -> None:
    compute.measure(weight, _zeros(weight, device))


def _quantize(weight: Weight, device: torch.device) -> None:
    if weight.target is not None:
        shared = compute.shared_scale(weight, torch.ones(()))
        if shared is not None:
            shared = shared.to(device)
        ops = ops_of(weight.target, weight.dtype)
        h = (torch.ones(_COLS, device=device),) if weight.importance else ()
        ops.quantize(_zeros(weight, device), shared, weight.rule, *h)


def _errors(weight: Weight, device: torch.device) -> None:
    if weight.target is not None:
        compute.lost(weight, _zeros(weight, device), _parts(weight.target, device))
