"""Round fp32 to E4M3, E2M1 and E8M0: once in torch, once in integers for use inside kernels.

| to | rule | out of range | NaN |
|---|---|---|---|
| E4M3 | nearest, ties to even | saturates at 448, Inf too | 0x7F, without a sign |
| E2M1 | nearest, ties to even | saturates at 6, Inf too | 7 (the value 6) |
| E8M0 | the next power of two up | 0 and below 2^-127: code 0; Inf: 254 | 255 |

E2M1: with a the magnitude, the code is the least of 2a, a + 2, a/2 + 4 and 7, since that is a
concave chain of lines through the eight values. Adding 2^23 in the same operation leaves fp32 no
bits below the integer, so one addition rounds to nearest, ties to even code. Sources: OCP 8-bit
Floating Point Specification 1.0 (E4M3), OCP Microscaling Formats 1.0 (E2M1, E8M0), PTX ISA
`cvt.rn.satfinite.e2m1x2.f32`, `cvt.rp.satfinite.ue8m0x2.f32`.
"""

import torch
from torch import Tensor

_MAGIC = float(2**23)
_MAGIC_BITS = 0x4B000000  # the pattern of 2^23, so 2^23 + n has the pattern of this plus n


def to_e4m3(x: Tensor) -> Tensor:
    """Round fp32 `x` to E4M3."""
    # Clamped first: torch before 2.12 turns what lies above 464 into NaN.
    data = x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    codes = data.view(torch.uint8)
    codes.masked_fill_(codes == 0xFF, 0x7F)
    return data


def to_e5m2(x: Tensor) -> Tensor:
    """Round fp32 `x` to E5M2, saturating at 57344."""
    data = x.clamp(-57344.0, 57344.0).to(torch.float8_e5m2)
    codes = data.view(torch.uint8)
    codes.masked_fill_(torch.isnan(x), 0x7F)
    return data


def e2m1_magnitude(a: Tensor) -> Tensor:
    """Return the E2M1 codes 0 to 7, as uint8, of magnitudes `a` in fp32."""
    steep = a * 2.0 + _MAGIC
    middle = a + (_MAGIC + 2.0)
    flat = a * 0.5 + (_MAGIC + 4.0)
    # Least by pattern, not by value: so NaN, the largest pattern, ends as 7.
    least = torch.minimum(steep.view(torch.int32), middle.view(torch.int32))
    least = torch.minimum(least, flat.view(torch.int32))
    return least.clamp_(max=_MAGIC_BITS + 7).to(torch.uint8) & 7


def to_e2m1(q: Tensor, negative: Tensor) -> Tensor:
    """Return the E2M1 codes 0 to 15, as uint8, of fp32 `q`; bit 3 is set where `negative`."""
    return e2m1_magnitude(q.abs()) | (negative.to(torch.uint8) << 3)


def e8m0_ceil(x: Tensor) -> Tensor:
    """Return the E8M0 code, as uint8, of the least power of two not below fp32 `x` >= 0."""
    bits = x.view(torch.int32)
    exponent = bits >> 23
    mantissa = bits & 0x7FFFFF
    # 2^-127, code 0, is the fp32 subnormal 0x400000.
    up = torch.where(exponent == 0, mantissa > 0x400000, mantissa > 0)
    code = torch.clamp(exponent + up, max=254)
    return torch.where(torch.isnan(x), 255, code).to(torch.uint8)


def e8m0_value(code: Tensor) -> Tensor:
    """Return fp32 2^(code - 127) of E8M0 codes: 0 is 2^-127, 255 is NaN."""
    exponent = code.to(torch.int32)
    bits = torch.where(exponent == 0, 0x400000, exponent << 23)
    return torch.where(exponent == 255, 0x7FC00000, bits).view(torch.float32)


def e8m0_reciprocal(code: Tensor) -> Tensor:
    """Return fp32 2^(127 - code) of E8M0 codes, exact; 255 is NaN."""
    exponent = code.to(torch.int32)
    bits = torch.where(exponent == 254, 0x400000, (254 - exponent) << 23)
    return torch.where(exponent == 255, 0x7FC00000, bits).view(torch.float32)


def pack(codes: Tensor) -> Tensor:
    """Pack 4-bit codes `[..., C]` into bytes `[..., C/2]`, the even column in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """Unpack bytes `[..., C/2]` into 4-bit codes `[..., C]`, the low nibble first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
