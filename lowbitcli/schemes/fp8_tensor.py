"""FP8 E4M3 with one FP32 scale for the whole matrix: `weight ~= data * scale`."""

from lowbit_kernels.formats import E4M3, F32
from lowbitcli.schemes.scheme import Scheme

FP8_TENSOR = Scheme(
    name="fp8_tensor",
    aliases=("fp8", "FP8"),
    element=E4M3,
    scale=F32,
    block=(None, None),
    rules=("amax",),
    ops="lowbit_kernels.fp8:TENSOR",
    passes=2,
    shares=True,
)
