"""Symmetric integers of compressed-tensors: schemes by bits and group, and how they are packed.

| format | data | scale |
|---|---|---|
| pack-quantized | `.weight_packed` I32 [o, i * bits / 32] | `.weight_scale` [o, i/group], [o, 1] |
| int-quantized | `.weight` I8 [o, i] | the same |

Packed are codes plus 2^(bits - 1), the first in the lowest bits. `.weight_shape`, integers [o, i],
says how many columns there are. Groups other than 128 of INT4 and any of INT8 are read, and not
written. Source: compressed-tensors 0.20.1 `compressors/pack_quantized`.
"""

import struct
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from lowbitcli.containers.container import Finding, Listing, Stored
from lowbitcli.containers.layouts import IDENTITY, OFFSET4, OFFSET8
from lowbitcli.schemes import BY_NAME, Scheme
from lowbitcli.tensors import DATA, SCALE, Shape

PACKED, SHAPE = ".weight_packed", ".weight_shape"
FIELDS = {"I64": "q", "I32": "i"}
_SCALE = Stored(".weight_scale", "F32", IDENTITY, reads=("BF16", "F16"))
PACKED4 = {DATA: Stored(PACKED, "I32", OFFSET4), SCALE: _SCALE}
PACKED8 = {DATA: Stored(PACKED, "I32", OFFSET8), SCALE: _SCALE}
PLAIN8 = {DATA: Stored(".weight", "I8", IDENTITY), SCALE: _SCALE}


@cache
def scheme_of(bits: int, group: int | None) -> Scheme | None:
    """Return the scheme of integers of 4 or 8 bits with a scale for `group` columns, or for a row;
    None where nothing here decodes it."""
    base = {4: BY_NAME["int4_g128"], 8: BY_NAME["int8_channel"]}.get(bits)
    if base is None or (group is not None and (group <= 0 or group % 8)):
        return None
    if base.block == (1, group):
        return base
    name = f"int{bits}_channel" if group is None else f"int{bits}_g{group}"
    return replace(base, name=name, aliases=(), block=(1, group))


def is_integer(scheme: Scheme) -> bool:
    return scheme.element.name in ("INT4", "INT8")


def binding(stem: str, scheme: Scheme, listing: Listing) -> Mapping[str, Stored]:
    """Return how the parts of an integer weight are stored."""
    if scheme.element.name == "INT4":
        return PACKED4
    return PACKED8 if stem + PACKED in listing.tensors else PLAIN8


def shape(stem: str, scheme: Scheme, listing: Listing) -> tuple[Shape | None, list[Finding]]:
    """Return the shape of a packed weight, as its `.weight_shape` says, and what is wrong with
    that."""
    packed, said = listing.tensors.get(stem + PACKED), listing.tensors.get(stem + SHAPE)
    if packed is None:
        return None, []
    if said is None:
        return None, [Finding("missing", stem + SHAPE, "packed integers need it")]
    field, data = FIELDS.get(said.dtype), listing.markers.get(said.name)
    if field is None or said.shape != (len(packed.shape),) or data is None:
        message = f"a shape is I64 [{len(packed.shape)}], stored is {said.dtype} {list(said.shape)}"
        return None, [Finding("mismatch", said.name, message)]
    told = struct.unpack(f"<{len(packed.shape)}{field}", data)
    each = 32 // scheme.element.bits
    if told[:-1] != packed.shape[:-1] or -(-told[-1] // each) != packed.shape[-1]:
        message = f"it says {list(told)}, {list(packed.shape)} words of {each} codes are stored"
        return None, [Finding("mismatch", said.name, message)]
    if told[-1] % each:
        message = f"{told[-1]} columns, which are no whole words of {each} codes, are not read"
        return None, [Finding("unknown", said.name, message)]
    return told, []
