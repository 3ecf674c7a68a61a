"""Dequantize by scaling mode, and keep a quantized tensor as one value.

| mode | data | scale | value |
|---|---|---|---|
| NO_SCALING | floats | none | data |
| DELAYED_TENSOR, CURRENT_TENSOR | E4M3, E5M2 | fp32 of one element, or `[*]` | data * scale |
| MXFP8_1D | E4M3, E5M2 | E8M0 `[*, R, C/32]` | data * 2^(scale - 127) |
| NVFP4_1D, NVFP4_2D | E2M1, uint8 `[*, R, C/2]` | E4M3 `[*, R, C/16]` | data * step |

step = fl(scale * global_scale), where global_scale is fp32 of one element, or `[*]`; it is
fl(amax / 2688) where a writer keeps amax. Products are fp32, rounded once to the dtype asked for.
NVFP4 data whose columns were rotated (`hadamard`) is rotated back in fp32, before that rounding.
NVFP4_2D repeats each scale on 16 rows, so both NVFP4 modes are read alike. Shapes `[*, R, C]`; with
one scale for all any shape `[*, C]`.

Besides tensors everything is taken that hands out its memory by DLPack, such as arrays of JAX,
without a copy; results are tensors. Source: TransformerEngine 2.20 `jax/quantize/dequantizer.py`,
whose map this is; it rotates back in the dtype asked for, here fp32 does.
"""

import enum
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from lowbit_kernels import fp8, hadamard, mx, nvfp4, tensor_file
from lowbit_kernels.amax import FLOATING
from lowbit_kernels.checks import check_tensor
from lowbit_kernels.fake_checks import check_values
from lowbit_kernels.typed import called, typed


class ScalingMode(enum.Enum):
    """How a tensor is scaled; the value is the name in files."""

    NO_SCALING = "no_scaling"
    DELAYED_TENSOR = "delayed_tensor"
    CURRENT_TENSOR = "current_tensor"
    MXFP8_1D = "mxfp8_1d"
    NVFP4_1D = "nvfp4_1d"
    NVFP4_2D = "nvfp4_2d"


Signs = tuple[int, ...]
Dequantizer = Callable[[Tensor, Tensor | None, torch.dtype, Tensor | None, Signs | None], Tensor]


def _tensor(x: Any, name: str = "data") -> Tensor:
    """Return `x` as a tensor, of its own memory if it is an array of another library; `name` is
    what it is called in errors."""
    if isinstance(x, Tensor):
        check_tensor(x, name)
        return x
    if isinstance(x, type) or not hasattr(x, "__dlpack__"):
        raise ValueError(f"{name} is a tensor or has DLPack, this is {called(x)}")
    try:
        return torch.from_dlpack(x)
    except (AttributeError, BufferError, RuntimeError, TypeError) as error:
        raise ValueError(f"{name} gives no tensor by DLPack: {error}") from error


def _mode(mode: "ScalingMode | str") -> ScalingMode:
    try:
        return ScalingMode(mode)
    except ValueError as error:
        known = ", ".join(one.value for one in ScalingMode)
        raise ValueError(f"no scaling mode {mode!r}: there is {known}") from error


def _signs(signs: Any) -> Signs:
    """Return sixteen signs as a tuple."""
    if not isinstance(signs, list | tuple):
        raise ValueError(f"signs are sixteen numbers in a tuple, not {type(signs).__name__}")
    if len(signs) != hadamard.WIDTH or any(type(x) is not int or x not in (1, -1) for x in signs):
        raise ValueError(f"signs are sixteen of 1 and -1, not {list(signs)}")
    return tuple(signs)


def _only(scale: Tensor | None, name: str) -> Tensor:
    if scale is None:
        raise ValueError(f"this mode needs a {name}")
    return scale


def _dtype(name: str) -> torch.dtype:
    for dtype in FLOATING:
        if str(dtype) == f"torch.{name}":
            return dtype
    raise ValueError(f"values come as float32, bfloat16 or float16, not as {name!r}")


def _refuse(mode: str, **given: object) -> None:
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{mode} has no {name}")


def _rows(x: Tensor) -> Tensor:
    """Return `x [*, C]` as one matrix."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1]) if x.dim() else x.reshape(1, 1)


def _as_it_is(
    data: Tensor,
    scale: Tensor | None,
    dtype: torch.dtype,
    global_scale: Tensor | None,
    signs: Signs | None,
) -> Tensor:
    """Return floats in `dtype`."""
    _refuse("no scaling", scale=scale, global_scale=global_scale, rotation=signs)
    if not data.is_floating_point():
        raise ValueError(f"what was not scaled is floating point, this is {data.dtype}")
    return data.to(dtype)


def _by_tensor(
    data: Tensor,
    scale: Tensor | None,
    dtype: torch.dtype,
    global_scale: Tensor | None,
    signs: Signs | None,
) -> Tensor:
    """Return fl(data * scale) in `dtype`."""
    _refuse("a scale for a tensor", global_scale=global_scale, rotation=signs)
    scale = _only(scale, "scale")
    if scale.numel() != 1:
        return fp8.dequantize_tensor(data, scale, dtype)
    return fp8.dequantize_tensor(_rows(data), scale.reshape(()), dtype).reshape(data.shape)


def _by_block(
    data: Tensor,
    scale: Tensor | None,
    dtype: torch.dtype,
    global_scale: Tensor | None,
    signs: Signs | None,
) -> Tensor:
    """Return data * 2^(scale - 127) in `dtype`."""
    _refuse("MXFP8", global_scale=global_scale, rotation=signs)
    scale = _only(scale, "scale")
    if data.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise ValueError(f"elements of MXFP8 are E4M3 or E5M2, these are {data.dtype}")
    if scale.dtype == torch.float8_e8m0fnu:
        scale = scale.view(torch.uint8)
    if not data.dim() or scale.shape[:-1] != data.shape[:-1]:
        raise ValueError(f"scales {list(scale.shape)} are not those of {list(data.shape)}")
    return mx.dequantize(_rows(data), _rows(scale), dtype).reshape(data.shape)


def _nvfp4(
    data: Tensor,
    scale: Tensor | None,
    dtype: torch.dtype,
    global_scale: Tensor | None,
    signs: Signs | None,
) -> Tensor:
    """Return data * fl(scale * global_scale), rotated back if there are `signs`, in `dtype`."""
    scale, shared = _only(scale, "scale"), _only(global_scale, "global scale")
    if data.dtype == torch.float4_e2m1fn_x2:
        data = data.view(torch.uint8)
    if not data.dim() or scale.shape[:-1] != data.shape[:-1]:
        raise ValueError(f"scales {list(scale.shape)} are not those of {list(data.shape)}")
    first = dtype if signs is None else torch.float32
    if shared.numel() == 1:
        values = nvfp4.dequantize(_rows(data), _rows(scale), shared.reshape(()), first)
        values = values.reshape(*data.shape[:-1], 2 * data.shape[-1])
    else:
        values = nvfp4.dequantize(data, scale, shared, first)
    return values if signs is None else hadamard.rotate_back(values, _signs(signs)).to(dtype)


DEQUANTIZERS: Mapping[ScalingMode, Dequantizer] = MappingProxyType(
    {
        ScalingMode.NO_SCALING: _as_it_is,
        ScalingMode.DELAYED_TENSOR: _by_tensor,
        ScalingMode.CURRENT_TENSOR: _by_tensor,
        ScalingMode.MXFP8_1D: _by_block,
        ScalingMode.NVFP4_1D: _nvfp4,
        ScalingMode.NVFP4_2D: _nvfp4,
    }
)


@typed
def dequantize(
    data: Any,
    scale: Any | None,
    dtype: torch.dtype,
    mode: ScalingMode | str,
    global_scale: Any | None = None,
    signs: Signs | None = None,
) -> Tensor:
    """Return the values of `data` in `dtype`, by the dequantizer of `mode`.

    `data`, `scale` and `global_scale` are tensors, or arrays with DLPack; a mode may also be its
    value, such as `"nvfp4_1d"`. `signs` are those that
    columns were rotated with before quantization (`hadamard.SIGNS`), None if they were not.
    Raises ValueError for parts that do not belong together or that a mode lacks or has not, and for
    another dtype than fp32, bf16, fp16.
    """
    if dtype not in FLOATING:
        raise ValueError(f"values come as float32, bfloat16 or float16, not as {dtype}")
    scale = None if scale is None else _tensor(scale, "scale")
    shared = None if global_scale is None else _tensor(global_scale, "global_scale")
    return DEQUANTIZERS[_mode(mode)](_tensor(data, "data"), scale, dtype, shared, signs)


@dataclass(frozen=True)
class QuantizedTensor:
    """A quantized tensor and what its reader has to know; `dtype` is that of its values."""

    data: Tensor
    scale: Tensor | None
    mode: ScalingMode
    dtype: torch.dtype = torch.bfloat16
    global_scale: Tensor | None = None
    signs: Signs | None = None

    def __post_init__(self) -> None:
        """Take a mode named by its value, and arrays with DLPack, for what they are.

        Raises ValueError for what is no tensor, mode, dtype of values, or signs.
        """
        if self.dtype not in FLOATING:
            raise ValueError(f"values come as float32, bfloat16 or float16, not as {self.dtype}")
        parts = {"scale": self.scale, "global_scale": self.global_scale, "signs": self.signs}
        taken = {"data": _tensor(self.data, "data"), "mode": _mode(self.mode)}
        for name, part in parts.items():
            if part is not None:
                taken[name] = _signs(part) if name == "signs" else _tensor(part, name)
        for name, part in taken.items():
            object.__setattr__(self, name, part)

    @typed
    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values, in `dtype` or in that of the tensor.

        Raises ValueError as the function `dequantize` does.
        """
        wanted = self.dtype if dtype is None else dtype
        return dequantize(self.data, self.scale, wanted, self.mode, self.global_scale, self.signs)

    @typed
    def save(self, path: str | bytes | os.PathLike[str]) -> None:
        """Write a safetensors file: tensors data, scale, global_scale, the rest as metadata.

        Raises ValueError for what a file cannot hold, OSError where it cannot be written.
        """
        parts = {"data": self.data, "scale": self.scale, "global_scale": self.global_scale}
        said = {"format": "lowbit.quantized_tensor", "mode": self.mode.value}
        said["dtype"] = str(self.dtype).removeprefix("torch.")
        if self.signs is not None:
            said["signs"] = "".join("+" if sign > 0 else "-" for sign in self.signs)
        tensor_file.write(path, {n: t for n, t in parts.items() if t is not None}, said)

    @classmethod
    @typed
    def load(cls, path: str | bytes | os.PathLike[str]) -> "QuantizedTensor":
        """Return what `save` wrote, on the CPU.

        Raises ValueError for another file, OSError for one that cannot be read.
        """
        parts, said = tensor_file.read(path)
        if said.get("format") != "lowbit.quantized_tensor" or "data" not in parts:
            raise ValueError(f"{os.fsdecode(path)} holds no quantized tensor")
        signs = said.get("signs")
        return cls(
            parts["data"],
            parts.get("scale"),
            _mode(said.get("mode", "")),
            _dtype(said.get("dtype", "")),
            parts.get("global_scale"),
            None if signs is None else tuple(1 if sign == "+" else -1 for sign in signs),
        )


@typed
def quantize(
    w: Tensor, mode: ScalingMode | str, scale: Tensor | None = None, signs: Signs | None = None
) -> QuantizedTensor:
    """Quantize `w [*, R, C]` by the default rule of a mode's scheme: `fp8`, `mx` or `nvfp4`.

    `scale` is that of modes for a tensor, which DELAYED_TENSOR needs: fp32 `[*]`. With `signs`,
    NVFP4 rotates the columns first.
    Raises ValueError as these do, and for a scale or signs that a mode has not.
    """
    mode = _mode(mode)
    check_values(w, "a weight")
    w = w.detach()
    if scale is not None:
        check_tensor(scale, "scale")
    if mode not in (ScalingMode.DELAYED_TENSOR, ScalingMode.CURRENT_TENSOR):
        _refuse(mode.value, scale=scale)
    if mode not in (ScalingMode.NVFP4_1D, ScalingMode.NVFP4_2D):
        _refuse(mode.value, rotation=signs)
    if mode is ScalingMode.NO_SCALING:
        return QuantizedTensor(w, None, mode, w.dtype)
    if mode is ScalingMode.MXFP8_1D:
        return QuantizedTensor(*mx.quantize_mxfp8(w), mode, w.dtype)
    if mode in (ScalingMode.NVFP4_1D, ScalingMode.NVFP4_2D):
        rule = "2d" if mode is ScalingMode.NVFP4_2D else "amax"
        signs = None if signs is None else _signs(signs)
        turned = w if signs is None else hadamard.rotate(w, signs)
        data, block, shared = nvfp4.quantize(turned, rule=rule)
        return QuantizedTensor(data, block, mode, w.dtype, shared, signs)
    if mode is ScalingMode.DELAYED_TENSOR and scale is None:
        raise ValueError("delayed scaling needs the scale that was decided before")
    return QuantizedTensor(*fp8.quantize_tensor(w, scale), mode, w.dtype)


__all__ = ["DEQUANTIZERS", "QuantizedTensor", "ScalingMode", "dequantize", "quantize"]
