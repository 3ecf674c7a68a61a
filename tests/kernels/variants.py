"""Every kernel with the types and constants that it is launched with, to compile without a
device."""

from collections.abc import Iterator
from typing import Any, NamedTuple

INPUT = {"bf16": ("*i16", True), "fp16": ("*fp16", False), "fp32": ("*fp32", False)}
FP8_CONVERSION, HOPPER = 89, 90  # since which compute capability


class Variant(NamedTuple):
    """A kernel of `lowbit_kernels.module`: types of its arguments, its constants, warps."""

    module: str
    kernel: str
    types: dict[str, str]
    constants: dict[str, Any]
    warps: int = 4


def variants(arch: int) -> Iterator[Variant]:
    """Yield what is launched on a device of compute capability `arch` (90 is 9.0)."""
    for name, (pointer, bf16) in INPUT.items():
        w, out = {"w_ptr": pointer}, {"out_ptr": f"*{name}"}
        if arch > HOPPER and name != "bf16":
            continue  # what Hopper compiles of them, Blackwell does too
        yield from _fp8(w, out, name, bf16, arch >= FP8_CONVERSION)
        yield from _mx(w, out, name, bf16, arch >= FP8_CONVERSION)
        yield from _nvfp4(w, out, name, bf16)
        yield from _te(w, bf16)
        yield from _error(w, name, bf16)
        yield from _fake(w, out, bf16)
        yield from _others() if name == "bf16" else ()
        yield from _grouped(name, bf16, arch)
        if name != "fp32" and arch >= HOPPER:
            yield from _pairs(bf16)


def _fp8(w: dict, out: dict, name: str, bf16: bool, native: bool) -> Iterator[Variant]:
    flat = {"size": "i32", "programs": "i32"}
    sides = {"rows": "i32", "cols": "i32", "down": "i32", "across": "i32"}
    data = {"data_ptr": "*u8", "scale_ptr": "*fp32"}
    constants = {"BF16": bf16, "TILE": 4096, "LOOPS": 4}
    yield Variant("amax", "_matrix_kernel", w | {"out_ptr": "*i32"} | flat, constants)
    if name == "bf16":
        types = {"bits_ptr": "*i32", "scale_ptr": "*fp32"}
        yield Variant("amax", "_scale_kernel", types, {"LARGEST": 448.0}, 1)
    for eights in (True, False):
        for element in ("E4M3", "E5M2"):
            cast = {"BF16": bf16, "ALIGNED": eights, "NATIVE": native, "TILE": 256}
            yield Variant("fp8", "_cast_kernel", w | data | flat, cast | {"ELEMENT": element})
            back = {"ELEMENT": element, "ALIGNED": eights, "NATIVE": native, "TILE": 128}
            yield Variant("fp8", "_dequantize_kernel", data | out | flat, back, 2)
    warps = 8 if name == "fp32" else 4
    block = {"BF16": bf16, "ALIGNED": True, "NATIVE": native, "RULE": "amax", "FAR": False}
    tile, row = block | {"HIGH": 128, "PER_ROW": False}, block | {"HIGH": 32, "PER_ROW": True}
    for constants, many in (
        (tile, warps),
        (row, warps // 4),
        (tile | {"RULE": "ue8m0", "ALIGNED": False}, 4 * warps),
        (tile | {"FAR": True}, warps),
    ):
        for element in ("E4M3", "E5M2") if name == "bf16" else ("E4M3",):
            chosen = constants | {"ELEMENT": element}
            yield Variant("fp8_block", "_quantize_kernel", w | data | sides, chosen, many)
    for element in ("E4M3", "E5M2"):
        high = {"ELEMENT": element, "NATIVE": native, "ALIGNED": True, "HIGH": 128}
        high |= {"ALIGNED": False, "HIGH": 1} if name == "fp16" else {}
        high["FAR"] = name == "fp32"
        yield Variant("fp8_block", "_dequantize_kernel", data | out | sides, high, 8)
    for element, stored in (("E4M3", "*u8"), ("E5M2", "*u8"), ("INT8", "*i8")):
        types = w | {"data_ptr": stored, "scale_ptr": "*fp32", "cols": "i32"}
        row = {"BF16": bf16, "ELEMENT": element, "ALIGNED": True, "NATIVE": native}
        yield Variant("rows", "_row_kernel", types, row | {"ONCE": True, "TILE": 2048}, 2 * warps)
        again = row | {"ONCE": False, "TILE": 1024, "ALIGNED": False}
        yield Variant("rows", "_row_kernel", types, again, 2 * warps)
    types = {"data_ptr": "*i8", "scale_ptr": "*fp32"} | out | {"cols": "i32", "programs": "i32"}
    yield Variant("integer", "_dequantize_kernel", types, {"TILE": 1024})
    types = w | {"data_ptr": "*i32", "scale_ptr": "*fp32", "groups": "i32"}
    rounded = {"fp32": ("F32", 2.0**-149), "bf16": ("BF16", 2.0**-133), "fp16": ("F16", 2.0**-24)}
    for group in (32, 128):
        groups = {"BF16": bf16, "GROUP": group, "TILE": 2048 // group}
        groups |= dict(zip(("SCALE", "LEAST"), rounded[name], strict=True))
        yield Variant("integer", "_quantize_groups_kernel", types, groups)
    for packed, word in ((True, "*i32"), (False, "*i64")):
        types = {"data_ptr": word, "scale_ptr": "*fp32", "eighths": "i32"} | out
        groups = {"PACKED": packed, "SHARE": 16, "TILE": 256}
        yield Variant("integer", "_dequantize_groups_kernel", types, groups, 2)


def _mx(w: dict, out: dict, name: str, bf16: bool, native: bool) -> Iterator[Variant]:
    for element in ("E4M3", "E5M2", "E2M1"):
        scale = {"scale_ptr": "*u8"}
        word = {"data_ptr": "*i32" if element == "E2M1" else "*i64"} | scale
        back = {"ELEMENT": element, "TILE": 256}
        yield Variant("mx_kernels", "_dequantize_kernel", word | out | {"quarters": "i32"}, back, 2)
        if name == "fp16" or (name == "fp32" and element == "E5M2"):
            continue
        data = {"data_ptr": "*i32" if element == "E2M1" else "*u8"} | scale
        types = w | data | {"blocks": "i32", "rows": "i32", "across": "i32"}
        stored = {"SWIZZLED": name == "fp32", "HIGH": name == "fp32" and element == "E2M1"}
        constants = {"BF16": bf16, "ELEMENT": element, "NATIVE": native} | stored
        for weighted in (False, True):
            chosen = constants | {"WEIGHTED": weighted, "TILE": 128}
            yield Variant("mx_kernels", "_search_kernel", types | {"h_ptr": "*fp32"}, chosen)
        for rule in ("amax", "floor", "ceil", "even") if name == "bf16" else ("amax",):
            chosen = constants | {"RULE": rule, "TILE": 32}
            yield Variant("mx_kernels", "_quantize_kernel", types, chosen, 2)


def _nvfp4(w: dict, out: dict, name: str, bf16: bool) -> Iterator[Variant]:
    nv = {"packed_ptr": "*i64", "scale_ptr": "*u8", "global_scale_ptr": "*fp32"}
    count = {"h_ptr": "*fp32"} | dict.fromkeys(("blocks", "programs", "rows", "across"), "i32")
    searches = ((False, 0, 0), (False, 6, 13), (True, 12, 25), (False, 0, 126))
    for weighted, radius, tries in searches if name == "bf16" else searches[:1]:
        constants = {"BF16": bf16, "WEIGHTED": weighted, "RADIUS": radius, "COUNT": tries}
        for other in (False, True) if radius in (0, 6) else (False,):
            stored = {"SWIZZLED": other, "HIGH": other, "TILE": 128}
            yield Variant("nvfp4_kernels", "_quantize_kernel", w | nv | count, constants | stored)
    types = nv | {"packed_ptr": "*i32"} | out | {"halves": "i32", "programs": "i32"}
    yield Variant("nvfp4_kernels", "_dequantize_kernel", types, {"TILE": 256}, 2)


def _error(w: dict, name: str, bf16: bool) -> Iterator[Variant]:
    sizes = ("rows", "cols", "tiles", "matrix_rows", "high", "wide")
    end = {"global_scale_ptr": "*fp32", "out_ptr": "*fp64"} | dict.fromkeys(sizes, "i32")
    fixed = {"BF16": bf16, "GROUPS": 8, "HIGH": 16, "WIDE": 64}
    chosen = (
        ("VALUE", "*fp32", "*fp64", 0, False),
        ("E2M1", "*u8", "*i8", 7, True),
        ("E4M3", "*u8", "*fp32", 126, False),
        ("E4M3", "*u8", "*u8", 126, False),
        ("INT8", "*i8", "*fp32", 127, False),
        ("INT4", "*u8", "*fp32", 7, False),
        ("E5M2", "*u8", "*fp32", 123, False),
    )
    for element, data, scale, last, shared in chosen if name == "bf16" else chosen[:2]:
        types = w | {"data_ptr": data, "scale_ptr": scale} | end
        constants = fixed | {"ELEMENT": element, "LAST": last, "SHARED": shared}
        constants["DATA_BF16"] = False
        yield Variant("error_figures", "_figures_kernel", types, constants)


def _te(w: dict, bf16: bool) -> Iterator[Variant]:
    types = w | {"packed_ptr": "*i64", "scale_ptr": "*u8", "amax_ptr": "*fp32"}
    types |= dict.fromkeys(("rows", "across", "down", "wide"), "i32")
    for tall, divisor in ((False, 1536.0), (True, 2688.0)):
        constants = {"BF16": bf16, "TALL": tall, "DIVISOR": divisor, "WIDE": 8}
        yield Variant("nvfp4_te", "_te_kernel", types, constants)
    if w["w_ptr"] != "*fp32":
        types = {"x_ptr": w["w_ptr"], "packed_ptr": "*i64", "scale_ptr": "*u8", "amax_ptr": "*fp32"}
        types |= dict.fromkeys(("blocks", "rows", "across"), "i32")
        yield Variant("kv_nvfp4", "_kv_kernel", types, {"BF16": bf16, "TILE": 128})
    types = {"x_ptr": w["w_ptr"], "matrix_ptr": "*fp32", "out_ptr": "*fp32", "blocks": "i32"}
    yield Variant("hadamard", "_rotate_kernel", types, {"BF16": bf16, "TILE": 64})


def _fake(w: dict, out: dict, bf16: bool) -> Iterator[Variant]:
    types = {"x_ptr": w["w_ptr"], "scale_ptr": "*fp32", "y_ptr": out["out_ptr"]}
    types |= {"size": "i32", "share": "i32"}
    for element in ("INTEGER", "E4M3", "E2M1"):
        most = 127.0 if element == "INTEGER" else 0.0
        fixed = {"BF16": bf16, "ELEMENT": element, "LEAST": -most, "MOST": most, "TILE": 1024}
        for scaled in (True, False):
            constants = fixed | {"SCALED": scaled, "WIDE": False}
            yield Variant("fake_kernels", "_fake_kernel", types, constants)
    wide = types | {"size": "i64", "share": "i64"}
    yield Variant("fake_kernels", "_fake_kernel", wide, constants | {"SCALED": True, "WIDE": True})


def _others() -> Iterator[Variant]:
    """Yield kernels that read no weight."""
    types = {"linear_ptr": "*u8", "swizzled_ptr": "*u8"}
    types |= dict.fromkeys(("rows", "cols", "down", "wide", "programs"), "i32")
    for back in (False, True):
        yield Variant("layout", "_swizzle_kernel", types, {"BACK": back, "TILES": 8}, 8)


def _grouped(name: str, bf16: bool, arch: int) -> Iterator[Variant]:
    table = {"table_ptr": "*i64", "first_ptr": "*i32", "entries": "i32", "steps": "i32"}
    pointer = {"w_ptr": INPUT[name][0]}
    fixed = {"BF16": bf16, "UNIT": 4 if name == "fp32" else 8}
    native = {"NATIVE": arch >= FP8_CONVERSION}
    amax = fixed | {"TILE": 4096, "LOOPS": 8}
    types = table | pointer | {"out_ptr": "*i32"}
    yield Variant("grouped_kernels", "_amax_kernel", types, amax)
    bits = {"bits_ptr": "*i32"}
    parts = bits | {"packed_ptr": "*i64", "scale_ptr": "*u8", "global_scale_ptr": "*fp32"}
    for given in (False, True) if name == "bf16" else (False,):
        constants = fixed | {"GIVEN": given, "TILE": 128, "LOOPS": 2}
        yield Variant("grouped_kernels", "_nvfp4_kernel", table | pointer | parts, constants)
        pairs = {"BF16": bf16, "GIVEN": given, "TILE": 128, "FEW": 32, "LOOPS": 8}
        types = table | {"w_ptr": "*i32"} | parts
        if name != "fp32" and arch >= HOPPER:
            yield Variant("grouped_kernels", "_nvfp4_pairs_kernel", types, pairs, 1)
        cast = fixed | native | {"GIVEN": given, "TILE": 256, "ALIGNED": not given, "LOOPS": 4}
        data = {"data_ptr": "*u8", "scale_ptr": "*fp32"}
        for element in ("E4M3", "E5M2"):
            constants = cast | {"ELEMENT": element}
            yield Variant(
                "grouped_kernels", "_fp8_kernel", table | pointer | bits | data, constants
            )
    row = fixed | native | {"ALIGNED": True, "ONCE": True, "TILE": 512, "LOOPS": 8}
    for element, stored in (("E4M3", "*u8"), ("INT8", "*i8")):
        types = table | pointer | {"shape_ptr": "*i64"} | data | {"data_ptr": stored}
        constants = row | {"ELEMENT": element}
        warps = 4 if name == "fp32" else 2
        yield Variant("grouped_kernels", "_channel_kernel", types, constants, warps)
    for element, stored in (("E4M3", "*u8"), ("E2M1", "*i32")):
        constants = fixed | native | {"ELEMENT": element, "RULE": "amax", "TILE": 32, "LOOPS": 4}
        types = table | pointer | {"data_ptr": stored, "scale_ptr": "*u8"}
        yield Variant("grouped_kernels", "_mx_kernel", types, constants | {"PAIRS": False}, 2)
    if name != "fp32" and arch >= HOPPER:
        constants |= {"PAIRS": True, "TILE": 64, "UNIT": 4, "LOOPS": 8}
        yield Variant("grouped_kernels", "_mx_kernel", types | {"w_ptr": "*i32"}, constants, 1)


def _pairs(bf16: bool) -> Iterator[Variant]:
    words = {"w_ptr": "*i32", "scale_ptr": "*u8"}
    types = words | {"packed_ptr": "*i64", "global_scale_ptr": "*fp32"}
    constants = {"BF16": bf16, "FEW": 64}
    for high in (False, True):
        line = types | {"blocks": "i32", "programs": "i32"}
        chosen = constants | {"HIGH": high, "TILE": 256}
        yield Variant("fp4_pair_kernels", "_nvfp4_pairs_kernel", line, chosen, 2)
        tiles = types | dict.fromkeys(("rows", "across", "down", "wide"), "i32")
        yield Variant(
            "fp4_pair_kernels", "_nvfp4_tiles_kernel", tiles, constants | {"HIGH": high, "FEW": 128}
        )
    for rule in ("amax", "even"):
        stored = {"SWIZZLED": rule == "even", "HIGH": rule == "even"}
        constants = {"BF16": bf16, "RULE": rule, "TILE": 64} | stored
        types = words | {"packed_ptr": "*i32", "blocks": "i32", "rows": "i32", "across": "i32"}
        yield Variant("fp4_pair_kernels", "_mxfp4_pairs_kernel", types, constants, 1)
