"""FP8 E4M3 with an FP32 scale for each block of 128 rows and columns; the last may be smaller.

`weight[r, c] ~= data[r, c] * scale[r // 128, c // 128]`
"""

from lowbit_kernels.formats import E4M3, F32
from lowbitcli.schemes.scheme import Scheme

FP8_BLOCK128 = Scheme(
    name="fp8_block128",
    aliases=("fp8-block", "FP8_BLOCK"),
    element=E4M3,
    scale=F32,
    block=(128, 128),
    rules=("amax", "ue8m0"),
    ops="lowbit_kernels.fp8_block:BLOCK128",
    row_multiple=128,
    ragged=True,
)
