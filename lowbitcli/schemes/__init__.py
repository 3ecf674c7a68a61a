"""The schemes: one value in one file each, listed here. A test fails where a file is missing
from the list."""

import difflib

from lowbitcli.errors import UsageError
from lowbitcli.schemes.fp8_block128 import FP8_BLOCK128
from lowbitcli.schemes.fp8_channel import FP8_CHANNEL
from lowbitcli.schemes.fp8_tensor import FP8_TENSOR
from lowbitcli.schemes.fp8_tensor_e5m2 import FP8_TENSOR_E5M2
from lowbitcli.schemes.int4_g128 import INT4_G128
from lowbitcli.schemes.int8_channel import INT8_CHANNEL
from lowbitcli.schemes.mxfp4 import MXFP4
from lowbitcli.schemes.mxfp8 import MXFP8
from lowbitcli.schemes.nvfp4 import NVFP4
from lowbitcli.schemes.scheme import Scheme

SCHEMES: tuple[Scheme, ...] = (
    FP8_TENSOR,
    FP8_TENSOR_E5M2,
    FP8_CHANNEL,
    FP8_BLOCK128,
    MXFP8,
    MXFP4,
    NVFP4,
    INT8_CHANNEL,
    INT4_G128,
)

BY_NAME: dict[str, Scheme] = {name: s for s in SCHEMES for name in (s.name, *s.aliases)}


def scheme(name: str) -> Scheme:
    """Return the scheme of this name or alias; raise UsageError with the nearest names where
    there is none."""
    if name in BY_NAME:
        return BY_NAME[name]
    near = difflib.get_close_matches(name.lower(), [s.name for s in SCHEMES], n=2, cutoff=0.4)
    known = ", ".join(s.name for s in SCHEMES)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known schemes: {known}"
    raise UsageError(f"no scheme is called {name!r}", hint=hint)


__all__ = ["BY_NAME", "SCHEMES", "Scheme", "scheme"]
