"""The element and scale formats that low-bit checkpoints are made of, as plain values.

| format | bits | largest | smallest normal | smallest | specials |
|---|---|---|---|---|---|
| E2M1 | 4 | 6 | 1 | 0.5 | none |
| E4M3 | 8 | 448 | 2^-6 | 2^-9 | NaN 0x7F and 0xFF, no Inf |
| E5M2 | 8 | 57344 | 2^-14 | 2^-16 | IEEE Inf and NaN |
| E8M0 | 8 | 2^127 | 2^-127 | 2^-127 | NaN 255, no zero, no sign |
| INT8 | 8 | 127 | 1 | 1 | none; -128 is not used |
| INT4 | 4 | 7 | 1 | 1 | none; -8 is not used |
| F32 | 32 | 3.4e38 | 2^-126 | 2^-149 | IEEE |

Sources: OCP 8-bit Floating Point Specification 1.0 (E4M3, E5M2), OCP Microscaling Formats 1.0
(E2M1, E8M0). Plain Python: nothing is imported, so that plans can be made where no tensor library
is.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """A number format. `dtype` is the safetensors dtype it is kept in, `per_byte` how many
    codes share a byte."""

    name: str
    bits: int
    max: float
    min_normal: float
    smallest: float
    dtype: str
    per_byte: int = 1


E2M1 = Format("E2M1", 4, 6.0, 1.0, 0.5, "U8", per_byte=2)
E4M3 = Format("E4M3", 8, 448.0, 2.0**-6, 2.0**-9, "F8_E4M3")
E5M2 = Format("E5M2", 8, 57344.0, 2.0**-14, 2.0**-16, "F8_E5M2")
E8M0 = Format("E8M0", 8, 2.0**127, 2.0**-127, 2.0**-127, "U8")
INT8 = Format("INT8", 8, 127.0, 1.0, 1.0, "I8")
INT4 = Format("INT4", 4, 7.0, 1.0, 1.0, "U8", per_byte=2)
F32 = Format("F32", 32, 3.4028234663852886e38, 2.0**-126, 2.0**-149, "F32")

FORMATS = (E2M1, E4M3, E5M2, E8M0, INT8, INT4, F32)

# The 16 values of E2M1 by code: bit 3 is the sign, codes 0 to 7 count up.
E2M1_VALUES = tuple(
    sign * value for sign in (1.0, -1.0) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
)
