"""Named pairs of functions between the canonical layout in memory and what an ecosystem stores.

`decode(encode(x))` gives the canonical tensor back, but for the reciprocal, whose two roundings
lose up to an ulp; that is why codes are made for the decoded value. Only tensor methods are used:
this module imports no tensor library.

| layout | stored |
|---|---|
| identity | as it is |
| vector1 | a scalar as `[1]` |
| reciprocal1 | a scalar as the `[1]` tensor of its reciprocal, at most the largest fp32 |
| matrix1 | a scalar as `[1, 1]` |
| column | `[*, R, 1]` as `[*, R]` |
| blocks4d | `[*, A, B]` as `[*, A, 1, B, 1]` |
| sixteens | `[*, R, C]` as `[*, R, C/16, 16]` |
| transposed | `[*, R, C]` as `[*, C, R]` |
| rows32 | `[*, R, C]` whose rows are alike in groups of 32 as `[*, R/32, C]`, rounded up |
| offset4 | packed `[*, R, C/2]` of signed codes as I32 `[*, R, C/8]` of codes + 8 |
| offset8 | I8 `[*, R, C]` as I32 `[*, R, C/4]` of codes + 128, the first in the lowest bits |
| spread | `[*, R, 1]`, all alike, as a scalar or as `[1]` |
| cropped | `[*, R, C]` without its last columns, which are zeros |
| padded n x m | zeros below and to the right, up to multiples of n and m |
| padded, high first | that, and the two nibbles of a byte exchanged |
| swizzled 128x4 | padded 128 x 4, and tile after tile in the order of tensor cores |
| swizzled 32x16 | the same bytes, a fourth of the rows and four times the columns |

The padded ones depend on the shape: `fitted` gives the layout for one.
Sources: vector1, reciprocal1: compressed-tensors 0.20.1, `quantization/utils/helpers.py`
(generate_gparam) and the checkpoints that llm-compressor 0.14 writes; column, blocks4d: ModelOpt
0.47 exports; sixteens: gpt-oss; padded and swizzled: comfy-kitchen 0.2.40, `float_utils.py`;
matrix1, swizzled 32x16: torchao 0.18, `prototype/mx_formats/utils.py`; rows32: DeepSeek-V4.1.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

from lowbitcli.tensors import Shape, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """`encode` canonical to stored, `decode` back, `spec` the stored tensor on paper from the
    canonical one."""

    name: str
    encode: "Callable[[Tensor], Tensor]"
    decode: "Callable[[Tensor], Tensor]"
    spec: Callable[[TensorSpec], TensorSpec]
    fitted: "Callable[[Shape], Layout] | None" = None

    def at(self, shape: Shape) -> "Layout":
        """Return this layout for a canonical tensor of `shape`."""
        return self if self.fitted is None else self.fitted(shape)


def _same(value):
    return value


def _as_vector(spec: TensorSpec) -> TensorSpec:
    return TensorSpec(spec.name, spec.dtype, (1,) if not spec.shape else spec.shape)


def _to_vector(scalar: "Tensor") -> "Tensor":
    return scalar.reshape(1) if scalar.dim() == 0 else scalar


def _from_vector(vector: "Tensor") -> "Tensor":
    return vector.reshape(()) if tuple(vector.shape) == (1,) else vector


F32_MAX = 3.4028234663852886e38


def _reciprocal(scalar: "Tensor") -> "Tensor":
    return scalar.float().reciprocal().clamp(max=F32_MAX)


IDENTITY = Layout("identity", _same, _same, _same)
VECTOR1 = Layout("vector1", _to_vector, _from_vector, _as_vector)
RECIPROCAL1 = Layout(
    "reciprocal1",
    lambda scalar: _to_vector(_reciprocal(scalar)),
    lambda vector: _reciprocal(_from_vector(vector)),
    _as_vector,
)
MATRIX1 = Layout(
    "matrix1",
    lambda scalar: scalar.reshape(1, 1) if scalar.dim() == 0 else scalar,
    lambda stored: stored.reshape(()) if tuple(stored.shape) == (1, 1) else stored,
    lambda spec: TensorSpec(spec.name, spec.dtype, spec.shape or (1, 1)),
)
COLUMN = Layout(
    "column",
    lambda scale: scale.squeeze(-1),
    lambda stored: stored.unsqueeze(-1),
    lambda spec: TensorSpec(spec.name, spec.dtype, spec.shape[:-1]),
)
BLOCKS4D = Layout(
    "blocks4d",
    lambda scale: scale.unsqueeze(-2).unsqueeze(-1),
    lambda stored: stored.squeeze(-1).squeeze(-2),
    lambda spec: TensorSpec(spec.name, spec.dtype, (*spec.shape[:-1], 1, *spec.shape[-1:], 1)),
)
SIXTEENS = Layout(
    "sixteens",
    lambda data: data.reshape(*data.shape[:-1], data.shape[-1] // 16, 16),
    lambda stored: stored.flatten(-2),
    lambda spec: TensorSpec(spec.name, spec.dtype, (*spec.shape[:-1], spec.shape[-1] // 16, 16)),
)
TRANSPOSED = Layout(
    "transposed",
    lambda w: w.transpose(-1, -2).contiguous(),
    lambda stored: stored.transpose(-1, -2).contiguous(),
    lambda spec: TensorSpec(
        spec.name, spec.dtype, (*spec.shape[:-2], spec.shape[-1], spec.shape[-2])
    ),
)


def _multiple(number: int, of: int) -> int:
    return -(-number // of) * of


def _pad(high: int, wide: int, tensor: "Tensor") -> "Tensor":
    rows, cols = tensor.shape[-2:]
    if rows % high == 0 and cols % wide == 0:
        return tensor
    shape = (*tensor.shape[:-2], _multiple(rows, high), _multiple(cols, wide))
    padded = tensor.new_zeros(shape)
    padded[..., :rows, :cols] = tensor
    return padded


def _padded_spec(high: int, wide: int, spec: TensorSpec) -> TensorSpec:
    rows, cols = spec.shape[-2:]
    shape = (*spec.shape[:-2], _multiple(rows, high), _multiple(cols, wide))
    return TensorSpec(spec.name, spec.dtype, shape)


def _crop(rows: int, cols: int, tensor: "Tensor") -> "Tensor":
    return tensor[..., :rows, :cols].contiguous()


def _swap_nibbles(packed: "Tensor") -> "Tensor":
    return (packed >> 4) | (packed << 4)


def _swizzle(scale: "Tensor") -> "Tensor":
    padded = _pad(128, 4, scale)
    lead, (rows, cols) = padded.shape[:-2], padded.shape[-2:]
    tiles = padded.reshape(*lead, rows // 128, 4, 32, cols // 4, 4)
    # [.., row tile, row // 32, row % 32, column tile, column]
    return tiles.movedim(-2, -4).transpose(-3, -2).reshape(padded.shape)


def _unswizzle(rows: int, cols: int, stored: "Tensor") -> "Tensor":
    lead, (high, wide) = stored.shape[:-2], stored.shape[-2:]
    tiles = stored.reshape(*lead, high // 128, wide // 4, 32, 4, 4)
    linear = tiles.transpose(-3, -2).movedim(-4, -2).reshape(stored.shape)
    return _crop(rows, cols, linear)


def _scalar(spec: TensorSpec) -> TensorSpec:
    return TensorSpec(spec.name, spec.dtype, spec.shape[:-2])


@cache
def _spread(shape: Shape) -> Layout:
    return Layout(
        "spread",
        lambda scale: scale[..., 0, 0].contiguous(),
        lambda stored: stored.reshape((*shape[:-2], 1, 1)).expand(shape).contiguous(),
        _scalar,
    )


def _to_offset4(packed: "Tensor") -> "Tensor":
    # Adding half the range to a signed code is changing its sign bit.
    raw = packed.contiguous() ^ 0x88
    return raw.view(raw.new_empty(0).int().dtype)


def _from_offset4(words: "Tensor") -> "Tensor":
    return words.contiguous().view(words.new_empty(0).byte().dtype) ^ 0x88


def _to_offset8(codes: "Tensor") -> "Tensor":
    raw = codes.contiguous().view(codes.new_empty(0).byte().dtype) ^ 0x80
    return raw.view(raw.new_empty(0).int().dtype)


def _from_offset8(words: "Tensor") -> "Tensor":
    raw = words.contiguous().view(words.new_empty(0).byte().dtype) ^ 0x80
    return raw.view(raw.new_empty(0).char().dtype)


def _words(spec: TensorSpec) -> TensorSpec:
    return TensorSpec(spec.name, spec.dtype, (*spec.shape[:-1], spec.shape[-1] // 4))


CROPPED, HIGH_FIRST = "cropped", ", high first"


@cache
def cropped(columns: int, of: int) -> Layout:
    """Return the layout of `[*, R, of]` stored without its last columns, as `[*, R, columns]`."""
    return Layout(
        CROPPED,
        lambda wide: wide[..., :columns].contiguous(),
        lambda narrow: _pad(1, of, narrow),
        lambda spec: TensorSpec(spec.name, spec.dtype, (*spec.shape[:-1], columns)),
    )


def is_cropped(layout: Layout | None) -> bool:
    """Does a tensor lie without columns of zeros that its quantized form has?"""
    return layout is not None and layout.name == CROPPED


def is_high_first(layout: Layout) -> bool:
    """Does the even column of packed codes lie in the high four bits?"""
    return layout.name.endswith(HIGH_FIRST)


def _fewer(spec: TensorSpec) -> TensorSpec:
    rows, cols = spec.shape[-2:]
    return TensorSpec(spec.name, spec.dtype, (*spec.shape[:-2], -(-rows // 32), cols))


@cache
def _rows32(shape: Shape) -> Layout:
    rows = shape[-2]
    return Layout(
        "rows32",
        lambda scale: scale[..., ::32, :].contiguous(),
        lambda stored: stored.repeat_interleave(32, dim=-2)[..., :rows, :].contiguous(),
        _fewer,
    )


@cache  # so that equal layouts are one: a weight in the same layout is copied byte for byte
def padded(high: int, wide: int, swap: bool = False) -> Layout:
    """Return the layout of `[*, R, C]` padded to multiples of `high` rows and `wide` columns; with
    `swap` of packed codes whose first stands in the high nibble."""

    @cache
    def fitted(shape: Shape) -> Layout:
        rows, cols = shape[-2:]

        def encode(tensor: "Tensor") -> "Tensor":
            return _pad(high, wide, _swap_nibbles(tensor) if swap else tensor)

        def decode(stored: "Tensor") -> "Tensor":
            tensor = _crop(rows, cols, stored)
            return _swap_nibbles(tensor) if swap else tensor

        return Layout(name, encode, decode, spec)

    name = f"padded {high} x {wide}{HIGH_FIRST if swap else ''}"
    spec = partial(_padded_spec, high, wide)
    return Layout(name, _unfitted, _unfitted, spec, fitted)


def _unfitted(tensor: "Tensor") -> "Tensor":
    raise ValueError("this layout depends on the shape: take it `at` one")


@cache
def _swizzled(shape: Shape) -> Layout:
    return Layout(
        "swizzled128x4",
        _swizzle,
        partial(_unswizzle, *shape[-2:]),
        partial(_padded_spec, 128, 4),
    )


SWIZZLED128X4 = Layout(
    "swizzled128x4", _unfitted, _unfitted, partial(_padded_spec, 128, 4), _swizzled
)


def _wide(spec: TensorSpec) -> TensorSpec:
    spec = _padded_spec(128, 4, spec)
    rows, cols = spec.shape[-2:]
    return TensorSpec(spec.name, spec.dtype, (*spec.shape[:-2], rows // 4, cols * 4))


@cache
def _swizzled_wide(shape: Shape) -> Layout:
    rows, cols = shape[-2:]
    stored = _padded_spec(128, 4, TensorSpec("", "U8", shape)).shape
    wide = (*stored[:-2], stored[-2] // 4, stored[-1] * 4)
    return Layout(
        "swizzled32x16",
        lambda scale: _swizzle(scale).reshape(*scale.shape[:-2], *wide[-2:]),
        lambda tensor: _unswizzle(rows, cols, tensor.reshape(stored)),
        _wide,
    )


OFFSET4 = Layout("offset4", _to_offset4, _from_offset4, _words)
OFFSET8 = Layout("offset8", _to_offset8, _from_offset8, _words)
SPREAD = Layout("spread", _unfitted, _unfitted, _scalar, _spread)
ROWS32 = Layout("rows32", _unfitted, _unfitted, _fewer, _rows32)
SWIZZLED32X16 = Layout("swizzled32x16", _unfitted, _unfitted, _wide, _swizzled_wide)

LAYOUTS = (
    IDENTITY,
    VECTOR1,
    RECIPROCAL1,
    MATRIX1,
    COLUMN,
    BLOCKS4D,
    SIXTEENS,
    TRANSPOSED,
    padded(16, 16),
    padded(16, 8, swap=True),
    SWIZZLED128X4,
    SWIZZLED32X16,
    ROWS32,
    SPREAD,
    OFFSET4,
    OFFSET8,
)
