"""MXFP4: E2M1 elements, one power-of-two E8M0 scale for 32 columns of a row: `weight ~= data *
2^(scale - 127)`."""

from lowbit_kernels.formats import E2M1, E8M0
from lowbitcli.schemes.scheme import Scheme

MXFP4 = Scheme(
    name="mxfp4",
    aliases=("MXFP4", "MXFP4A16"),
    element=E2M1,
    scale=E8M0,
    block=(1, 32),
    rules=("amax", "floor", "even", "ceil", "mse"),
    ops="lowbit_kernels.mx:MXFP4",
    weighs=("mse",),
)
