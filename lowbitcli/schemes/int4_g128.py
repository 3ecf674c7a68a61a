"""INT4 from -7 to 7 with one scale for 128 columns of a row: `weight ~= data * scale`.

Scales are stored in the weight's dtype, since that is what programs that serve it keep them in.
"""

from lowbit_kernels.formats import F32, INT4
from lowbitcli.schemes.scheme import Scheme

INT4_G128 = Scheme(
    name="int4_g128",
    aliases=("int4", "INT4"),
    element=INT4,
    scale=F32,
    block=(1, 128),
    rules=("amax",),
    ops="lowbit_kernels.integer:INT4_G128",
    scale_dtypes=("BF16", "F16"),
)
