"""NVFP4: E2M1 elements, an E4M3 scale for 16 columns of a row, an FP32 scale over all.

`weight ~= data * (scale * global_scale)`, the product of the two scales rounded to fp32 first.
"""

from lowbit_kernels.formats import E2M1, E4M3, F32
from lowbitcli.schemes.scheme import Scheme

NVFP4 = Scheme(
    name="nvfp4",
    aliases=("NVFP4", "NVFP4A16"),
    element=E2M1,
    scale=E4M3,
    block=(1, 16),
    rules=("amax", "mse", "mse_all", "four_over_six", "2d"),
    ops="lowbit_kernels.nvfp4:NVFP4",
    row_multiple=16,  # rule 2d: 16 rows share a scale
    passes=2,
    global_scale=F32,
    shares=True,
    weighs=("mse", "mse_all"),
)
