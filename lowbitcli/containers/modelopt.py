"""`modelopt`: what NVIDIA's ModelOpt exports; vLLM, SGLang and TensorRT-LLM load it.

| scheme | data | scale | global scale |
|---|---|---|---|
| fp8_tensor | `.weight` F8_E4M3 | `.weight_scale` F32 [] | |
| fp8_channel | `.weight` F8_E4M3 | `.weight_scale` F32 [o] | |
| fp8_block128 | `.weight` F8_E4M3 | `.weight_scale` F32 [o/128, 1, i/128, 1] rounded up | |
| nvfp4 | `.weight` U8 [o, i/2] | `.weight_scale` F8_E4M3 [o, i/16] | `.weight_scale_2` F32 [] |
| mxfp8 | `.weight` F8_E4M3 | `.weight_scale` U8 [o, i/32] | |
| mxfp4 | `.weight` U8 [o, i/2] | `.weight_scale` U8 [o, i/32] | |

Everything multiplies. FP8 with one scale needs the scale of its inputs, `.input_scale`, and is
written with it only; no reader has MXFP4 without activations: it is read and not written.
Source: ModelOpt 0.47, `torch/quantization/qtensor/`, `torch/export/`, and its exports.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from lowbitcli.containers import ct_config, modelopt_config, suffixes
from lowbitcli.containers.container import (
    Container,
    Declaration,
    Declared,
    Examination,
    Finding,
    Listing,
    QuantizedWeight,
    Stored,
)
from lowbitcli.containers.grouping import orphans, weight_from
from lowbitcli.containers.inputs import Cache, Static
from lowbitcli.containers.layouts import BLOCKS4D, COLUMN, IDENTITY, padded
from lowbitcli.tensors import DATA, FLOATING, GLOBAL_SCALE, SCALE

HALVES = ("BF16", "F16")
FP8, PACKED = Stored(".weight", "F8_E4M3", IDENTITY), Stored(".weight", "U8", IDENTITY)
E8M0 = Stored(".weight_scale", "U8", IDENTITY, reads=("F8_E8M0",))
BINDINGS: dict[str, dict[str, Stored]] = {
    "fp8_tensor": {DATA: FP8, SCALE: Stored(".weight_scale", "F32", IDENTITY, reads=HALVES)},
    "fp8_channel": {DATA: FP8, SCALE: Stored(".weight_scale", "F32", COLUMN, reads=HALVES)},
    "fp8_block128": {DATA: FP8, SCALE: Stored(".weight_scale", "F32", BLOCKS4D, reads=HALVES)},
    "nvfp4": {
        DATA: PACKED,
        SCALE: Stored(".weight_scale", "F8_E4M3", IDENTITY),
        GLOBAL_SCALE: Stored(".weight_scale_2", "F32", IDENTITY),
    },
    "mxfp8": {DATA: FP8, SCALE: E8M0},
    "mxfp4": {DATA: PACKED, SCALE: E8M0},
}
HIGH_FIRST = {
    **BINDINGS["nvfp4"],
    DATA: Stored(".weight", "U8", padded(1, 1, swap=True)),
}
PART_SUFFIXES = (".weight_scale", ".weight_scale_2")


def detect(listing: Listing) -> bool:
    return modelopt_config.is_declared(listing)


def examine(listing: Listing) -> Examination:
    """Return the weights that are declared and that the tensors bear out, and what disagrees."""
    said = modelopt_config.read(listing)
    dtype = ct_config.model_dtype(listing.config)
    weights: dict[str, QuantizedWeight] = {}
    findings: list[Finding] = []
    taken: set[str] = set()
    modules = _quantized_modules(listing)
    for stem, evidence in modules.items():
        scheme = said.scheme_of(stem)
        names = [stem + suffix for suffix in (".weight", *PART_SUFFIXES)]
        if scheme is None:
            message = "stored as if quantized, but the config does not say so"
            findings.append(Finding("mismatch", evidence, message))
            taken.update(names)
            continue
        bound = BINDINGS[scheme.name]
        if scheme.name == "nvfp4" and listing.nibbles == "high":
            bound = HIGH_FIRST
        if listing.raw_fp8 and names[1] not in listing.tensors:
            continue
        weight, problems = weight_from(stem, scheme, bound, listing, lambda _: dtype)
        if weight is not None:
            weights[weight.name] = weight
        findings += problems
        taken.update(stem + stored.suffix for stored in bound.values())
    findings += orphans(listing, PART_SUFFIXES, taken)
    findings += suffixes.unread(listing)
    findings += [
        Finding("missing", f"{stem}.weight", "the config names it as quantized, and it is not")
        for stem in said.layers
        if stem not in modules
    ]
    return Examination(weights, tuple(findings), suffixes.activations(listing))


def _quantized_modules(listing: Listing) -> dict[str, str]:
    """Return module -> the tensor by which it is seen to be quantized."""
    modules: dict[str, str] = {}
    for name, spec in listing.tensors.items():
        if name.endswith(".weight"):
            if (spec.dtype == "U8" or spec.dtype.startswith("F8_E")) and len(spec.shape) >= 2:
                modules[name.removesuffix(".weight")] = name
        elif name.endswith(".weight_scale"):
            stem = name.removesuffix(".weight_scale")
            data = listing.tensors.get(stem + ".weight")
            if data is not None and data.dtype in FLOATING:
                modules[stem] = name
    return modules


def declare(declarations: Sequence[Declaration], config: Mapping[str, Any] | None) -> Declared:
    """Write both files over whatever the source said of quantization."""
    metadata = {"format": "pt"}
    if config is None:
        return Declared(None, metadata)
    said, beside = modelopt_config.write(declarations, config)
    if beside is None:
        return Declared(said, metadata)
    layers = [d.name.removesuffix(".weight") for d in declarations if d.scheme is not None]
    notes = [
        "transformers 5 does not know this container, and would take FP8 codes for weights: "
        "for it write --container compressed-tensors"
    ]
    if any(
        d.scheme is not None and d.scheme.name == "fp8_channel" and ".experts." in d.name
        for d in declarations
    ):
        notes.append(
            "vLLM 0.33 has no experts in fp8_channel of this container: for it choose "
            "fp8_block128, mxfp8 or nvfp4, or write --container compressed-tensors"
        )
    unread = {d.scheme.name for d in declarations if d.scheme is not None} - {"nvfp4", "fp8_tensor"}
    if unread:
        notes.append(
            f"SGLang 0.5.23 does not load {', '.join(sorted(unread))} of this container, in a "
            "mixed checkpoint without a word: for it write FP8 in compressed-tensors, and mxfp8 "
            "in native-mxfp8"
        )
    excluded = beside["quantization"].get("exclude_modules", ())
    notes += [
        f"vLLM 0.33 will also exclude {layer}: the excluded {name} is a part of its name"
        for name, layer in modelopt_config.swallowed(excluded, layers).items()
    ]
    return Declared(said, metadata, {"hf_quant_config.json": beside}, notes=tuple(notes))


MODELOPT = Container(
    name="modelopt",
    bindings=BINDINGS,
    detect=detect,
    examine=examine,
    declare=declare,
    activations={
        "fp8_tensor": ("static",),
        "fp8_channel": ("dynamic",),
        "fp8_block128": ("none", "dynamic"),
        "mxfp8": ("dynamic",),
        "nvfp4": ("none", "static"),
    },
    needs_config=True,
    stacks="split",
    static={"fp8_tensor": Static(".input_scale", ()), "nvfp4": Static(".input_scale", ())},
    cache=Cache(".k_proj.k_scale", ".v_proj.v_scale", ()),
    unwritten=frozenset({"mxfp4"}),
)
