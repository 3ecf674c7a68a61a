"""Triton where it is wanted: the real one beside a CUDA device or in its interpreter, placeholders
elsewhere.

A kernel sits in the file of its reference, so its decorator runs whenever that file is imported.
Importing triton takes 0.4 seconds and fails where it is not installed, so a process that will only
run references gets stand-ins. `LOWBIT_TRITON=1` asks for triton without a device, to compile
kernels for one.
"""

import contextlib
import contextvars
import functools
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_WANTED = INTERPRETED or os.environ.get("LOWBIT_TRITON") == "1" or torch.cuda.is_available()


class _Placeholder:
    """Stand in for `triton` and `triton.language` where kernels are never launched."""

    def __getattr__(self, name: str) -> "_Placeholder":
        return self

    def __call__(self, value: Any = None, *args: Any, **kwargs: Any) -> Any:
        return value


if TYPE_CHECKING:
    import triton
    import triton.language as tl

    HAS_TRITON = True
    static_range = range
else:
    triton = tl = _Placeholder()
    HAS_TRITON = False
    if _WANTED:
        try:
            import triton
            import triton.language as tl

            HAS_TRITON = True
        except ImportError as error:
            # What was asked for by name must not turn into references unseen.
            if INTERPRETED or os.environ.get("LOWBIT_TRITON") == "1":
                raise ImportError(
                    "TRITON_INTERPRET=1 and LOWBIT_TRITON=1 ask for triton, which cannot be "
                    f"imported: {error}"
                ) from error

    static_range = range if INTERPRETED else tl.static_range

jit: Callable[..., Any] = triton.jit


# The interpreter's fma rounds twice and its cast to bf16 truncates: kernels go around both there.
COMPILED = tl.constexpr(not INTERPRETED)

# Contracting a * b + c by itself would change bits: it is off, kernels say fma where they mean it.
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


def loadable(w: Tensor) -> Tensor:
    """Return contiguous `w` as kernels load it: bf16 as int16, which they widen by a shift."""
    w = w.contiguous()
    return w.view(torch.int16) if w.dtype == torch.bfloat16 else w


_REFERENCES = contextvars.ContextVar("references", default=False)


@contextlib.contextmanager
def references() -> Iterator[None]:
    """Send every tensor to the torch references within this block, to hold kernels against them."""
    token = _REFERENCES.set(True)
    try:
        yield
    finally:
        _REFERENCES.reset(token)


def only_references() -> bool:
    """Say whether this is within `references()`."""
    return _REFERENCES.get()


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def capability(w: Tensor) -> tuple[int, int]:
    """Return the compute capability of the device that `w` is on; (0, 0) in the interpreter."""
    return _capability(w.device.index) if w.is_cuda else (0, 0)


@functools.cache
def version() -> tuple[int, int]:
    """Return the release of Triton that compiles, (0, 0) where there is none."""
    if not HAS_TRITON:
        return (0, 0)
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def converts_fp8(w: Tensor) -> bool:
    """Say whether the device of `w` rounds fp32 to FP8 in one instruction (Ada and later)."""
    return capability(w) >= (8, 9)


def use_kernel(w: Tensor) -> bool:
    """Say whether `w` goes to the Triton kernel: on a CUDA device, or anywhere under Triton's
    interpreter.
    """
    wanted = HAS_TRITON and not _REFERENCES.get()
    return wanted and (w.is_cuda or INTERPRETED) and w.numel() > 0


__all__ = [
    "COMPILED",
    "HAS_TRITON",
    "INTERPRETED",
    "OPTIONS",
    "capability",
    "converts_fp8",
    "jit",
    "loadable",
    "only_references",
    "references",
    "static_range",
    "tl",
    "triton",
    "use_kernel",
    "version",
]
