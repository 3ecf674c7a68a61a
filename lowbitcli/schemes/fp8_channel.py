"""FP8 E4M3 with one FP32 scale for each output row: `weight[r] ~= data[r] * scale[r]`."""

from lowbit_kernels.formats import E4M3, F32
from lowbitcli.schemes.scheme import Scheme

FP8_CHANNEL = Scheme(
    name="fp8_channel",
    aliases=("fp8-dynamic", "FP8_DYNAMIC"),
    element=E4M3,
    scale=F32,
    block=(1, None),
    rules=("amax",),
    ops="lowbit_kernels.fp8:CHANNEL",
)
