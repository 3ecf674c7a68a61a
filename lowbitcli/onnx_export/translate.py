"""What each operator of `lowbit_kernels.fake_quant` becomes in ONNX: QuantizeLinear and
DequantizeLinear.

| operator | elements | scale |
|---|---|---|
| `fake_integer`, `fake_int_cast` | INT4, INT8, INT16, UINT4, ..., or clipped | amax / most; 1 |
| `fake_e4m3` | FLOAT8E4M3FN | fl(1 / S), S = fl(fl(1 / amax) * 448); 1 |
| `fake_e2m1` | FLOAT4E2M1 | 1 |
| `fake_blocks_of_e2m1` | FLOAT4E2M1 | as given, by `block_size` where blocks lie in rows |
| `fake_dynamic_blocks`, NVFP4 | FLOAT4E2M1 | of blocks, FLOAT8E4M3FN by an fp32 scale of all |
| the same, MX | FLOAT8E4M3FN, FLOAT8E5M2, FLOAT4E2M1 | fp32 powers of two, 2^-126 at least |

The operators divide where eager multiplies by a reciprocal: integers and E4M3 that have an amax are
one code off where x / scale lies within 2^-20 of a tie, and integers an ulp or two. With `exact`
they have eager's bits, by a multiplication before a scale of 1, which runtimes fuse less. All else
has eager's bits. Integers hold no -0, and E2M1 keeps the -0 that eager makes 0. Left to the runtime
are NaN, Inf, blocks below 2^-118, and what overflows fp16 where Half is asked for. ONNX has 6-bit
floats and scales in E8M0 from operator set 28 on, which nothing ran in 2026: MXFP6 is refused.

Source: ONNX 1.23 `Operators.md`, set 23; ModelOpt 0.47 `torch.quantization.export_onnx`, where the
dtype of the inputs is the precision by default; here fp32 is, in which eager computes. It refuses
narrow ranges, and makes nodes of TensorRT's own of what ONNX had no operators for.
"""

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional

import torch
from onnx.defs import onnx_opset_version  # pyright: ignore[reportMissingImports]
from onnxscript import ir  # pyright: ignore[reportMissingImports]
from onnxscript import opset23 as op  # pyright: ignore[reportMissingImports]

from lowbit_kernels import fake_blocks, fake_plain

OPSET = 23  # the first that has FLOAT4E2M1
LAST_OPSET: int = onnx_opset_version()
F32, F16, BF16 = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16
PRECISIONS = {"Float": F32, "Half": F16, "BFloat16": BF16}
E4M3, E5M2, E2M1 = ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT8E5M2, ir.DataType.FLOAT4E2M1
MX_ELEMENTS = {(4, 3): E4M3, (5, 2): E5M2, (2, 1): E2M1}
INTEGERS = {
    (-8.0, 7.0): ir.DataType.INT4,
    (-128.0, 127.0): ir.DataType.INT8,
    (-32768.0, 32767.0): ir.DataType.INT16,
    (0.0, 15.0): ir.DataType.UINT4,
    (0.0, 255.0): ir.DataType.UINT8,
    (0.0, 65535.0): ir.DataType.UINT16,
}
LOG2_E = 1.4426950408889634
LEAST_EXPONENT = -126  # of a scale: 2^-127 is subnormal, which runtimes may take for zero

Value = Any  # a value of the graph
Where = dict[str, int]  # attributes axis and block_size


def _number(x: float) -> Value:
    return op.Constant(value_float=float(x))


def _integers(*x: int) -> Value:
    return op.Constant(value=ir.tensor(list(x), dtype=ir.DataType.INT64))


def _dims(x: Value) -> list[int | None]:
    """Return the shape of a value, None for a size that is not known before it runs."""
    return [d if isinstance(d, int) else None for d in x.shape]


def _known(size: int | None) -> int:
    if size is None:
        raise ValueError("blocks of a size that is not known before the model runs")
    return size


def _sizes(x: Value) -> list[int]:
    return [_known(size) for size in _dims(x)]


def _cast(x: Value, dtype: Any) -> Value:
    return op.Cast(x, to=dtype)


def _round(x: Value, scale: Value, element: Any, dtype: Any, where: Where) -> Value:
    """Quantize and dequantize to `dtype`."""
    q = op.QuantizeLinear(x, scale, output_dtype=element, **where)
    return op.DequantizeLinear(q, scale, output_dtype=dtype, **where)


def _granularity(dims: list[int | None], scale: Value, sizes: list[int]) -> tuple[Value, Where]:
    """Return a scale of shape `sizes`, which broadcasts over `dims`, as the operators take it: one,
    or one for each index of an axis, or for each block.
    """
    sizes = [1] * (len(dims) - len(sizes)) + sizes
    own = [i for i, n in enumerate(sizes) if n != 1]
    if not own:
        return op.Reshape(scale, _integers()), {}
    if len(own) == 1:
        return op.Reshape(scale, _integers(-1)), {"axis": own[0]}
    shared = [i for i, n in enumerate(sizes) if n == 1]
    if not shared:
        return scale, {"axis": len(dims) - 1, "block_size": 1}
    *others, along = shared
    wide = [_known(dims[i]) if i in others else n for i, n in enumerate(sizes)]
    return op.Expand(scale, _integers(*wide)), {"axis": along, "block_size": _known(dims[along])}


def _over_blocks(scale: Value, x: Value, rank: int, axis: int, block_size: int) -> Value:
    """Return the scale of each element of `x` from those of blocks along an axis."""
    wide = [block_size if i == axis + 1 else 1 for i in range(rank + 1)]
    apart = op.Expand(op.Unsqueeze(scale, _integers(axis + 1)), _integers(*wide))
    return op.Reshape(apart, op.Shape(x))


def _integer_type(least: float, most: float) -> tuple[Any, tuple[float, float]]:
    """Return the least integers that hold a range, and theirs."""
    fitting = [b for b in INTEGERS if (b[0] == 0.0) == (least == 0.0) and b[1] >= most]
    bounds = min(fitting, key=lambda b: b[1])
    return INTEGERS[bounds], bounds


def _clip(x: Value, unit: Value, least: float, most: float, bounds: tuple[float, float]) -> Value:
    """Clip to a range of units, where the element does not do that by itself."""
    if least > bounds[0]:
        x = op.Max(x, op.Mul(unit, op.CastLike(_number(least), unit)))
    if most < bounds[1]:
        x = op.Min(x, op.Mul(unit, op.CastLike(_number(most), unit)))
    return x


def _power_of_two(ratio: Value) -> Value:
    """Return the least power of two that is not below `ratio`, 2^-126 at least: by a logarithm,
    which may be one off, then put right by comparisons.
    """
    ratio = op.Max(ratio, _number(2.0**LEAST_EXPONENT))
    exponent = op.Ceil(op.Mul(op.Log(ratio), _number(LOG2_E)))
    index = op.Cast(op.Sub(exponent, _number(LEAST_EXPONENT)), to=ir.DataType.INT64)
    table = op.Constant(value_floats=[2.0**e for e in range(LEAST_EXPONENT, 128)])
    power = op.Gather(table, op.Max(index, _integers(0)))
    half = op.Mul(power, _number(0.5))
    power = op.Where(op.GreaterOrEqual(half, ratio), half, power)
    return op.Where(op.Less(power, ratio), op.Mul(power, _number(2.0)), power)


def _block_amax(x: Value, dims: list[int | None], block_size: int) -> Value:
    """Return fp32 `[*, blocks]` of `x [*, C]`; a last block that is not whole is filled up."""
    *before, cols = dims
    a = op.Abs(_cast(x, F32))
    more = -_known(cols) % block_size
    if more:
        a = op.Pad(a, _integers(*[0] * (2 * len(before) + 1), more))
    shape = [0] * len(before) + [(_known(cols) + more) // block_size, block_size]
    return op.ReduceMax(op.Reshape(a, _integers(*shape)), _integers(-1), keepdims=0)


def _nvfp4_steps(x: Value, amax: Value | None, blocks: Value) -> Value:
    """Return fl(scale * global scale) of blocks with the given amax."""
    largest = op.ReduceMax(op.Abs(_cast(x, F32)) if amax is None else _cast(amax, F32), keepdims=0)
    zero = op.Equal(largest, _number(0.0))
    shared = op.Where(zero, _number(1.0), op.Div(largest, _number(2688.0)))
    scale = op.Div(blocks, op.Mul(shared, _number(6.0)))
    scale = op.Where(op.Equal(scale, _number(0.0)), _number(1.0), scale)
    scale = op.Min(op.Max(scale, _number(2.0**-9)), _number(448.0))
    codes = op.QuantizeLinear(scale, _number(1.0), output_dtype=E4M3)
    return op.DequantizeLinear(codes, shared)


@dataclass(frozen=True)
class Translations:
    """Functions that take and return values of a graph; `precision` is that of x and of the scales
    of a tensor or axis, None for that of the inputs."""

    precision: Any
    exact: bool

    def _entered(self, x: Value) -> tuple[Value, Any]:
        """Return `x` in the precision asked for, and that."""
        wanted = self.precision or x.dtype
        if wanted not in (x.dtype, F32, BF16):
            raise ValueError(f"{x.dtype} is exported as such, as Float or as BFloat16")
        return (x if wanted == x.dtype else _cast(x, wanted)), wanted

    def integer(
        self,
        x: Value,
        amax: Value,
        least: float,
        most: float,
        block_size: Optional[int] = None,  # noqa: UP045  the exporter reads no other spelling
        axis: Optional[int] = None,  # noqa: UP045
    ) -> Value:
        """Translate `fake_integer`."""
        dims, sizes = _dims(x), _sizes(amax)
        dtype, (x, precision) = x.dtype, self._entered(x)
        amax, rank, where = _cast(amax, F32), len(dims), {}
        along = (rank - 1 if axis is None else axis) % max(rank, 1)
        if math.prod(sizes) == 1:
            amax, sizes = op.Reshape(amax, _integers()), []
        elif block_size is not None:
            where = {"axis": along, "block_size": block_size}
        elif axis is not None:
            sizes = [math.prod(sizes) if i == along else 1 for i in range(rank)]
            amax = op.Reshape(amax, _integers(*sizes))
        element, bounds = _integer_type(least, most)
        none = op.LessOrEqual(amax, _number(fake_plain.EPSILON))

        def spread(scale: Value) -> Value:
            return _over_blocks(scale, x, rank, **where) if where else scale

        if self.exact:
            encode = op.Div(_number(most), amax)
            y = op.Mul(_cast(x, F32), spread(op.Where(none, _number(0.0), encode)))
            y = _clip(y, _number(1.0), least, most, bounds)
            y = _round(y, _number(1.0), element, F32, {})
            return _cast(op.Div(y, spread(op.Where(none, _number(1.0), encode))), dtype)
        # Everything over so large a scale is zero.
        large = _number(65504.0 if precision == F16 else 2.0**127)
        scale = _cast(op.Where(none, large, op.Div(amax, _number(most))), precision)
        y = _clip(x, spread(scale), least, most, bounds)
        if not where:
            scale, where = _granularity(dims, scale, sizes)
        return _cast(_round(y, scale, element, precision, where), dtype)

    def e4m3(self, x: Value, amax: Optional[Value] = None) -> Value:  # noqa: UP045
        """Translate `fake_e4m3`."""
        dims, dtype, (x, precision) = _dims(x), x.dtype, self._entered(x)
        if amax is None:
            one = _cast(_number(1.0), precision)
            return _cast(_round(x, one, E4M3, precision, {}), dtype)
        top = _cast(amax, F32)
        top = op.Where(op.LessOrEqual(top, _number(fake_plain.EPSILON)), _number(1.0), top)
        encode = op.Mul(op.Div(_number(1.0), top), _number(448.0))
        scale, where = _granularity(dims, op.Div(_number(1.0), encode), _sizes(amax))
        if self.exact:
            x = op.Mul(_cast(x, F32), encode)
            codes = op.QuantizeLinear(x, _number(1.0), output_dtype=E4M3)
            return _cast(op.DequantizeLinear(codes, scale, **where), dtype)
        return _cast(_round(x, _cast(scale, precision), E4M3, precision, where), dtype)

    def e2m1(self, x: Value, dtype: int) -> Value:
        """Translate `fake_e2m1`."""
        x, precision = self._entered(x)
        one = _cast(_number(1.0), precision)
        return _cast(_round(x, one, E2M1, precision, {}), dtype)

    def int_cast(self, x: Value, least: float, most: float) -> Value:
        """Translate `fake_int_cast`."""
        dtype, (x, precision) = x.dtype, self._entered(x)
        element, bounds = _integer_type(least, most)
        one = _cast(_number(1.0), precision)
        return _cast(_round(_clip(x, one, least, most, bounds), one, element, precision, {}), dtype)

    def static_blocks(self, x: Value, scale: Value, dtype: int) -> Value:
        """Translate `fake_blocks_of_e2m1`."""
        sizes, count = _sizes(x), math.prod(_sizes(scale))
        x, precision = self._entered(x)
        # Everything over so large a scale is zero; what is no number (NaN, Inf) is taken as 1.
        zero = op.Equal(scale, _number(0.0))
        number = op.Less(op.Abs(scale), _number(math.inf))
        scale = op.Where(number, scale, _number(1.0))
        scale = op.Where(zero, _number(2.0**127), scale)
        block_size = math.prod(sizes) // count
        if len(sizes) > 1 and sizes[-1] % block_size == 0:
            shape = [*sizes[:-1], sizes[-1] // block_size]
            where = {"axis": len(sizes) - 1, "block_size": block_size}
            scale = op.Reshape(scale, _integers(*shape))
            return _cast(_round(x, scale, E2M1, precision, where), dtype)
        rows = op.Reshape(x, _integers(count, block_size))
        scale = op.Reshape(scale, _integers(-1))
        y = _round(rows, scale, E2M1, precision, {"axis": 0})
        return _cast(op.Reshape(y, _integers(*sizes)), dtype)

    def dynamic_blocks(
        self,
        x: Value,
        block_size: int,
        amax: Optional[Value] = None,  # noqa: UP045
        exponent: int = 2,
        mantissa: int = 1,
        e8m0: bool = False,
    ) -> Value:
        """Translate `fake_dynamic_blocks`."""
        if e8m0 and (exponent, mantissa) not in MX_ELEMENTS:
            raise ValueError("ONNX has no elements of six bits: MXFP6 cannot be exported")
        dims, dtype, (x, precision) = _dims(x), x.dtype, self._entered(x)
        row = dims if len(dims) == 1 else []
        if row:  # the operators know no blocks of a vector
            dims = [1, *row]
            x = op.Reshape(x, _integers(1, _known(row[0])))
        blocks = _block_amax(x, dims, block_size)
        if e8m0:
            element = MX_ELEMENTS[exponent, mantissa]
            largest = fake_blocks.MX_ELEMENTS[exponent, mantissa].max
            scale = _power_of_two(op.Div(blocks, _number(largest)))
        else:
            element, scale = E2M1, _nvfp4_steps(x, amax, blocks)
        where = {"axis": len(dims) - 1, "block_size": block_size}
        y = _round(x, scale, element, precision, where)
        return _cast(op.Reshape(y, _integers(-1)) if row else y, dtype)


def _function(method: Callable[..., Value]) -> Callable[..., Value]:
    """Return a method as a function: torch writes the signature that it finds into it."""

    @functools.wraps(method)
    def function(*args: Any, **kwargs: Any) -> Value:
        return method(*args, **kwargs)

    function.__signature__ = inspect.signature(method)  # pyright: ignore[reportAttributeAccessIssue]
    return function


def table(precision: Any, exact: bool) -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return what translates each operator."""
    to = Translations(precision, exact)
    names = {
        "fake_integer": to.integer,
        "fake_e4m3": to.e4m3,
        "fake_e2m1": to.e2m1,
        "fake_int_cast": to.int_cast,
        "fake_blocks_of_e2m1": to.static_blocks,
        "fake_dynamic_blocks": to.dynamic_blocks,
    }
    return {getattr(torch.ops.lowbit, n).default: _function(m) for n, m in names.items()}
