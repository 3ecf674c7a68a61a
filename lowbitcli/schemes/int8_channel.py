"""INT8 from -127 to 127 with one FP32 scale for each output row: `weight[r] ~= data[r] *
scale[r]`."""

from lowbit_kernels.formats import F32, INT8
from lowbitcli.schemes.scheme import Scheme

INT8_CHANNEL = Scheme(
    name="int8_channel",
    aliases=("int8", "INT8"),
    element=INT8,
    scale=F32,
    block=(1, None),
    rules=("amax",),
    ops="lowbit_kernels.integer:INT8_CHANNEL",
)
