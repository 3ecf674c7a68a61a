"""Compile the kernels of a plan while its first slices are being read.

A kernel is compiled for dtypes and for what divides its arguments: a small weight of each kind in
the plan brings up what nearly all of its weights need.
"""

import threading

import torch

from lowbitcli.pipeline import compute
from lowbitcli.pipeline.arithmetic import ops_of, torch_dtype
from lowbitcli.plan.nouns import Plan, Weight
from lowbitcli.tensors import FLOATING

_ROWS, _COLS = 128, 1024


class Warm:
    """Compilation under way; `wait` for its end before the first launch."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self._thread: threading.Thread | None = None
        if device.type != "cuda":
            return
        kinds = {(w.source, w.target, w.rule, w.dtype): w for w in plan.weights if not w.copies}
        some = [weight for weight in kinds.values() if not weight.recodes]
        self._thread = threading.Thread(target=_compile, args=(some, device), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until it is done; what it could not compile is compiled when it is needed."""
        if self._thread is not None:
            self._thread.join()


def _compile(weights: list[Weight], device: torch.device) -> None:
    torch.cuda.set_device(device)
    for weight in weights:
        dtype = torch_dtype(weight.dtype if weight.dtype in FLOATING else "BF16")
        w = torch.zeros(_ROWS, _COLS, dtype=dtype, device=device)
        try:
            if weight.source is not None:
                ops = ops_of(weight.source)
                rule = weight.source.rules[0]
                parts = ops.quantize(w, ops.shared(ops.measure(w), rule), rule)
                w = ops.dequantize(parts, torch.float32)
            if weight.target is not None:
                amax = compute.measure(weight, w)
                shared = None if amax is None else compute.shared_scale(weight, amax)
                compute.quantize(weight, w, shared)
        except (RuntimeError, ValueError):
            continue  # said with the weight's name when its turn comes
    torch.cuda.synchronize(device)
