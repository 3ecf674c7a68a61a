"""MXFP8: E4M3 elements, one power-of-two E8M0 scale for 32 columns of a row: `weight ~= data *
2^(scale - 127)`."""

from lowbit_kernels.formats import E4M3, E8M0
from lowbitcli.schemes.scheme import Scheme

MXFP8 = Scheme(
    name="mxfp8",
    aliases=("MXFP8", "MXFP8A16"),
    element=E4M3,
    scale=E8M0,
    block=(1, 32),
    rules=("amax", "floor", "even", "ceil", "mse"),
    ops="lowbit_kernels.mx:MXFP8",
)
