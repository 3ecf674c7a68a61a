"""The arithmetic of one scheme as a value: four functions with the same signatures for every
scheme.

A weight is `w`: `[*, rows, cols]`, fp32, bf16 or fp16, contiguous; blocks run along `cols`; `*`
are the leading indices of a stack, each with scales of its own. Parts are canonical: scales
multiply, low nibble first, row-major.

| scheme | data | scale | global_scale |
|---|---|---|---|
| fp8_tensor | e4m3 [*, R, C] | fp32 [*] | |
| fp8_tensor_e5m2 | e5m2 [*, R, C] | fp32 [*] | |
| fp8_channel | e4m3 [*, R, C] | fp32 [*, R, 1] | |
| fp8_block128 | e4m3 [*, R, C] | fp32 [*, ceil(R/128), ceil(C/128)] | |
| mxfp8 | e4m3 [*, R, C] | uint8 (E8M0) [*, R, C/32] | |
| mxfp4 | uint8 [*, R, C/2] | uint8 (E8M0) [*, R, C/32] | |
| nvfp4 | uint8 [*, R, C/2] | e4m3 [*, R, C/16] | fp32 [*] |
| int8_channel | int8 [*, R, C] | fp32 [*, R, 1] | |
| int4_g128 | uint8 [*, R, C/2] | fp32 [*, R, C/128] | |

`dequantize(parts) = cast(element * fl(scale * global_scale))`, computed in fp32, one rounding at
the end.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Ops:
    """What a pipeline needs of a scheme.

    measure(w) -> fp32 `[*]`: the largest magnitude of each matrix; NaN or Inf exactly where the
        matrix holds one. Associative: slices and fused partners combine with `torch.maximum`
        (which keeps NaN).
    shared(amax, rule) -> fp32 `[*]` or None: the scale that the whole matrix shares, None where it
        has none.
    quantize(w, shared, rule) -> parts by name. `shared` may differ from what `shared()` gave (a
        container that stores a reciprocal, a fused group); codes are made for the value given.
        Of the schemes and rules that weigh the columns (`importance`) it also takes
        `importance [cols]`.
        Raises ValueError for a shape, dtype or rule that the scheme does not take.
    dequantize(parts, dtype) -> `[*, rows, cols]` in `dtype` (torch.float32, bfloat16 or float16).
    """

    measure: "Callable[[Tensor], Tensor]"
    shared: "Callable[[Tensor, str], Tensor | None]"
    quantize: "Callable[..., dict[str, Tensor]]"
    dequantize: "Callable[[Mapping[str, Tensor], torch.dtype], Tensor]"
