"""Export models with fake quantization to ONNX, by torch's own exporter.

| `onnx_quantizer_type` | what depends on weights alone |
|---|---|
| dynamic | stays in the graph: fp32 weights, and operators that quantize them |
| static | is stored: codes and scales, and DequantizeLinear alone |

What depends on inputs is quantized in the graph with both. `translate` says what each operator
becomes and where bits may differ; the extra `onnx` has the packages that this needs.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lowbit_kernels.typed import typed

try:
    from lowbitcli.onnx_export import store, translate
except ImportError as error:
    raise ImportError(
        f"export to ONNX needs what is not installed, {error.name}: pip install 'lowbit[onnx]'"
    ) from error

QUANTIZER_TYPES = ("dynamic", "static")


@typed
def translations(
    trt_high_precision_dtype: str | None = "Float", exact: bool = False
) -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return a `custom_translation_table` for `torch.onnx.export`, which needs operator set 23 or
    later.

    `trt_high_precision_dtype` is that of what is quantized and of its scale: Float, Half, BFloat16,
    or None for the dtype of the inputs; blocks with scales of their own keep fp32 scales. With
    `exact` integers and E4M3 have the bits of eager, see `translate`.
    Raises ValueError for another dtype, and arguments of other types than these.
    """
    if trt_high_precision_dtype is None:
        return translate.table(None, exact)
    if trt_high_precision_dtype not in translate.PRECISIONS:
        known = ", ".join(translate.PRECISIONS)
        raise ValueError(f"no dtype {trt_high_precision_dtype!r}: there is {known}, or None")
    return translate.table(translate.PRECISIONS[trt_high_precision_dtype], exact)


@typed
def export(
    model: torch.nn.Module,
    args: Sequence[Any],
    path: str | os.PathLike[str] | None = None,
    *,
    trt_high_precision_dtype: str | None = "Float",
    onnx_quantizer_type: str = "dynamic",
    exact: bool = False,
    opset_version: int = translate.OPSET,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
) -> torch.onnx.ONNXProgram:
    """Export `model`, called with `args` and `kwargs`, and write it where a `path` is given.

    `trt_high_precision_dtype` and `exact` as `translations` has them; `onnx_quantizer_type` is
    dynamic or static, see above; the rest as `torch.onnx.export` has it.
    Raises ValueError for a dtype, a type or an operator set that there is not, and for arguments of
    other types than these; torch's exporter raises errors of its own for what it cannot take.
    """
    if onnx_quantizer_type not in QUANTIZER_TYPES:
        raise ValueError(f"no type {onnx_quantizer_type!r} of quantizer: dynamic or static")
    if opset_version < translate.OPSET:
        raise ValueError(
            f"operator set {opset_version} has no FLOAT4E2M1: {translate.OPSET} is the first"
        )
    if opset_version > translate.LAST_OPSET:  # torch would make a model of set 18 of it
        last = translate.LAST_OPSET
        raise ValueError(f"no operator set {opset_version}: the onnx that is here ends at {last}")
    table = translations(trt_high_precision_dtype, exact)
    program = torch.onnx.export(
        model,
        tuple(args),
        kwargs=None if kwargs is None else dict(kwargs),
        dynamo=True,
        opset_version=opset_version,
        dynamic_shapes=dynamic_shapes,
        custom_translation_table=table,
        verbose=False,
    )
    if program is None:
        raise ValueError("torch's exporter returned no model")
    made = program.model.opset_imports[""]
    if made != opset_version:
        raise ValueError(f"torch's exporter made a model of operator set {made} instead")
    if onnx_quantizer_type == "static":
        store.constants(program.model)
    if path is not None:
        program.save(path)
    return program


__all__ = ["export", "translations"]
