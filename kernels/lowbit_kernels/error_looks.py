"""Look at the codes of a weight by the fastest path there is: what they say is `error_codes`'.

| where | path |
|---|---|
| on a GPU, or on the CPU in `jit.references()` | torch, whole |
| on the CPU, numba installed, LOWBIT_NUMBA not 0, large | `cpu_codes`: one loop |
| on the CPU | `error_pieces`: torch, a piece that fits the cache at a time |
"""

import functools
import importlib
import os
from types import ModuleType
from typing import Any

from torch import Tensor

from lowbit_kernels import error_pieces
from lowbit_kernels.error_codes import BAND, Look, Ruler, joined, reference
from lowbit_kernels.jit import only_references

LARGE = 65536  # elements that are worth the compiled loop


@functools.cache
def _import_numba() -> ModuleType | None:
    try:
        return importlib.import_module("lowbit_kernels.cpu_codes")
    except (ImportError, OSError, RuntimeError):  # absent, or not for this numpy or processor
        return None


def compiled(w: Tensor) -> Any:
    """Return `cpu_codes` where it is to look at `w`, else None."""
    if w.device.type != "cpu" or w.numel() < LARGE or only_references():
        return None
    if os.environ.get("LOWBIT_NUMBA") == "0":
        return None
    return _import_numba()


def look(
    w: Tensor,
    v: Tensor,
    data: Tensor,
    step: Tensor,
    ruler: Ruler,
    block: tuple[int | None, int | None],
) -> Look:
    """Look at elements `w [rows, cols]` of whole blocks, fp32 values `v` and canonical `data`.

    `step` is fp32 `[rows, n]`, or `[1, n]` where one holds for all rows; `block` is as of a scheme.
    """
    high, wide = block[0] or 1, block[1] or w.shape[1]
    if not w.numel():
        return Look()
    fast = compiled(w)
    if fast is not None and BAND % high == 0:
        return fast.look(w, v, data, step, ruler, high, wide)
    if w.device.type != "cpu" or only_references():
        return reference(w, v, data, step, ruler, high, wide)
    total: list[Look] = []
    for start in range(0, w.shape[0], BAND):
        here = slice(start, start + BAND)
        band = w[here], v[here], data[here], step if step.shape[0] == 1 else step[here]
        total.append(error_pieces.of_band(*band, ruler, high, wide, start))
    return joined(total)


def values(
    data: Tensor, step: Tensor, ruler: Ruler, block: tuple[int | None, int | None]
) -> Tensor | None:
    """Return the fp32 values `[rows, cols]` of canonical `data`; None where the scheme's own way is
    as fast."""
    if data.device.type != "cpu" or only_references() or not data.numel():
        return None
    if compiled(data) is not None:
        return None
    return error_pieces.values(data, step, ruler, block)


__all__ = ["compiled", "look", "values"]
