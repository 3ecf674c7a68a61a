"""Where a scheme's name for its arithmetic becomes the arithmetic, and a dtype's name becomes a
dtype."""

import importlib
from functools import cache

import torch

from lowbit_kernels.ops import Ops
from lowbitcli.errors import DeviceError, UsageError
from lowbitcli.schemes import Scheme
from lowbitcli.tensors import DTYPES


@cache
def ops_of(scheme: Scheme, dtype: str = "") -> Ops:
    """Return the arithmetic that `scheme.ops` (`module:attribute`) names, for quantizing that of a
    weight of `dtype`."""
    module, _, attribute = scheme.ops.partition(":")
    ending = f"_{dtype}" if dtype in scheme.scale_dtypes else ""
    return getattr(importlib.import_module(module), attribute + ending)


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype for a safetensors dtype that torch has."""
    return getattr(torch, DTYPES[name][1])


def device_of(name: str) -> torch.device:
    """Return the device that `auto`, `cpu`, `cuda` or `cuda:N` means here.

    Raises:
        UsageError: it is none of these.
        DeviceError: there is no such device.
    """
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if name == "cpu":
        return torch.device("cpu")
    kind, colon, number = name.partition(":")
    if kind != "cuda" or bool(colon) != number.isdecimal():
        raise UsageError(f"no device is called {name!r}", hint="use auto, cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        raise DeviceError("this machine has no CUDA device", hint="use --device cpu")
    if int(number or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise DeviceError(f"there is no {name}: this machine has {count} CUDA device(s)")
    return torch.device("cuda", int(number or 0))
