"""FP8 E5M2 with one FP32 scale for the whole matrix: `weight ~= data * scale`."""

from lowbit_kernels.formats import E5M2, F32
from lowbitcli.schemes.scheme import Scheme

FP8_TENSOR_E5M2 = Scheme(
    name="fp8_tensor_e5m2",
    aliases=("fp8-e5m2", "FP8_E5M2"),
    element=E5M2,
    scale=F32,
    block=(None, None),
    rules=("amax",),
    ops="lowbit_kernels.fp8:TENSOR_E5M2",
    passes=2,
    shares=True,
)
