"""`compressed-tensors`: what vLLM, SGLang, TensorRT-LLM and transformers load as `quant_method:
compressed-tensors`.

| scheme | data | scale | global scale |
|---|---|---|---|
| fp8_tensor | `.weight` F8_E4M3 | `.weight_scale` F32 [1] | |
| fp8_channel | `.weight` F8_E4M3 | `.weight_scale` F32 [o, 1] | |
| fp8_block128 | `.weight` F8_E4M3 | `.weight_scale` F32 [o/128, i/128] rounded up | |
| int8_channel | `.weight` I8 | `.weight_scale` F32 [o, 1] | |
| mxfp8 | `.weight` F8_E4M3 | `.weight_scale` U8 [o, i/32] | |
| mxfp4 | `.weight_packed` U8 [o, i/2] | `.weight_scale` U8 [o, i/32] | |
| int4_g128 | `.weight_packed` I32 [o, i/8] | `.weight_scale` in the weight's dtype [o, i/128] | |
| nvfp4 | `.weight_packed` U8 [o, i/2] | `.weight_scale` F8_E4M3 [o, i/16] | stored |

The global scale is `.weight_global_scale`, F32 [1] and holds the reciprocal: readers divide by it.
What the config says is written by `ct_config`, how integers are packed stands in `ct_integers`.
Source: compressed-tensors 0.20.1
(`config/base.py`, `quantization/quant_args.py`) and checkpoints written by llm-compressor 0.14.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from lowbitcli.containers import ct_config, ct_integers, suffixes
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
from lowbitcli.containers.layouts import IDENTITY, RECIPROCAL1, VECTOR1
from lowbitcli.tensors import DATA, FLOATING, GLOBAL_SCALE, SCALE, Shape

HALVES = ("BF16", "F16")  # llm-compressor stores FP8 scales in the model's dtype
BINDINGS: dict[str, dict[str, Stored]] = {
    "fp8_tensor": {
        DATA: Stored(".weight", "F8_E4M3", IDENTITY),
        SCALE: Stored(".weight_scale", "F32", VECTOR1, reads=HALVES),
    },
    "fp8_channel": {
        DATA: Stored(".weight", "F8_E4M3", IDENTITY),
        SCALE: Stored(".weight_scale", "F32", IDENTITY, reads=HALVES),
    },
    "fp8_block128": {
        DATA: Stored(".weight", "F8_E4M3", IDENTITY),
        SCALE: Stored(".weight_scale", "F32", IDENTITY, reads=HALVES),
    },
    "int8_channel": {
        DATA: Stored(".weight", "I8", IDENTITY),
        SCALE: Stored(".weight_scale", "F32", IDENTITY, reads=HALVES),
    },
    "mxfp4": {
        DATA: Stored(".weight_packed", "U8", IDENTITY),
        SCALE: Stored(".weight_scale", "U8", IDENTITY, reads=("F8_E8M0",)),
    },
    "mxfp8": {
        DATA: Stored(".weight", "F8_E4M3", IDENTITY),
        SCALE: Stored(".weight_scale", "U8", IDENTITY, reads=("F8_E8M0",)),
    },
    "nvfp4": {
        DATA: Stored(".weight_packed", "U8", IDENTITY),
        SCALE: Stored(".weight_scale", "F8_E4M3", IDENTITY),
        GLOBAL_SCALE: Stored(".weight_global_scale", "F32", RECIPROCAL1),
    },
    "int4_g128": ct_integers.PACKED4,
}
PART_SUFFIXES = (".weight_packed", ".weight_scale", ".weight_global_scale", ".weight_shape")
# Also of other writers: beside an ignored weight, any of them is a contradiction.
SCALE_SUFFIXES = (*PART_SUFFIXES, ".weight_scale_inv", ".weight_scale_2", ".scale_weight")


def detect(listing: Listing) -> bool:
    return ct_config.of(listing.config).get("quant_method") == "compressed-tensors"


def examine(listing: Listing) -> Examination:
    """Return the weights that the config declares and the tensors bear out, and what disagrees."""
    names = {name.rpartition(".")[0] for name in listing.tensors}
    declared = ct_config.read(ct_config.of(listing.config), names)
    dtype = ct_config.model_dtype(listing.config)
    weights: dict[str, QuantizedWeight] = {}
    findings: list[Finding] = []
    taken: set[str] = set()
    modules = _quantized_modules(listing)
    for stem, evidence in modules.items():
        scheme = declared.scheme_of(stem)
        if scheme is None and declared.ignores(stem) and _is_plain(stem, evidence, listing):
            continue
        if scheme is None:
            message = "stored as if quantized, but the config ignores it or has no group for it"
            findings.append(Finding("mismatch", evidence, message))
            taken.update(stem + suffix for suffix in (".weight", *PART_SUFFIXES))
            continue
        integer = ct_integers.is_integer(scheme)
        bound = ct_integers.binding(stem, scheme, listing) if integer else BINDINGS[scheme.name]
        shape, problems = ct_integers.shape(stem, scheme, listing) if integer else (None, [])
        taken.update(stem + stored.suffix for stored in bound.values())
        if bound[DATA].suffix == ct_integers.PACKED and integer:
            taken.add(stem + ct_integers.SHAPE)
        if problems:
            findings += problems
            continue
        weight, problems = weight_from(stem, scheme, bound, listing, lambda _: dtype, shape)
        if weight is not None:
            weights[weight.name] = weight
        findings += problems
    findings += orphans(listing, PART_SUFFIXES, taken)
    findings += _named_and_not_quantized(declared, modules, listing)
    findings += suffixes.unread(listing)
    activations = suffixes.activations(listing)
    shapes = frozenset(name for name in listing.tensors if name.endswith(ct_integers.SHAPE))
    return Examination(weights, tuple(findings), activations, shapes)


def _is_plain(stem: str, evidence: str, listing: Listing) -> bool:
    """Is an ignored module what the config says, numbers of 8 bits that no scale belongs to?"""
    scaled = any(stem + suffix in listing.tensors for suffix in SCALE_SUFFIXES)
    return evidence == stem + ".weight" and not scaled


def _named_and_not_quantized(
    declared: ct_config.DeclaredSchemes, modules: Mapping[str, str], listing: Listing
) -> list[Finding]:
    """Return a finding for each module that the config names, but is stored as if it did not."""
    findings = []
    for stem in declared.exact:
        if stem in modules or declared.scheme_of(stem) is None:
            continue
        name = stem + ".weight"
        plain = listing.tensors.get(name)
        if plain is None:
            message = "the config names it, and no tensor of it is there"
            findings.append(Finding("missing", name, message))
        else:
            message = f"the config names it as quantized, but it is stored as {plain.dtype}"
            findings.append(Finding("mismatch", name, message))
    return findings


def _quantized_modules(listing: Listing) -> dict[str, str]:
    """Return module -> the tensor by which it is seen to be quantized, from names and dtypes
    alone."""
    modules: dict[str, str] = {}
    for name, spec in listing.tensors.items():
        if name.endswith(".weight_packed"):
            modules[name.removesuffix(".weight_packed")] = name
        elif name.endswith(".weight") and ct_config.has_8_bits(spec.dtype):
            modules[name.removesuffix(".weight")] = name
        elif name.endswith(".weight_scale"):
            stem = name.removesuffix(".weight_scale")
            data = listing.tensors.get(stem + ".weight")
            if data is not None and data.dtype in FLOATING:
                modules.setdefault(stem, name)
    return modules


def declare(declarations: Sequence[Declaration], config: Mapping[str, Any] | None) -> Declared:
    """Write `quantization_config` over whatever the source's config said of quantization."""
    metadata = {"format": "pt"}
    if config is None:
        return Declared(None, metadata, shapes=_shapes(declarations))
    said = ct_config.write(declarations, config)
    return Declared(said, metadata, notes=notes(declarations, config))


def _shapes(declarations: Sequence[Declaration]) -> dict[str, Shape]:
    """Return the tensors that say how many columns packed integers have."""
    return {
        item.name.removesuffix(".weight") + ct_integers.SHAPE: item.shape
        for item in declarations
        if item.scheme is not None and item.scheme.name == "int4_g128"
    }


def notes(
    declarations: Sequence[Declaration], config: Mapping[str, Any] | None = None
) -> tuple[str, ...]:
    """Return what reading programs were seen to make of this; see docs/formats.md."""
    told = []
    quantized = [item for item in declarations if item.scheme is not None]
    schemes = {d.scheme.name for d in quantized if d.scheme is not None and ".experts." in d.name}
    if "nvfp4" in schemes:
        told.append(
            "transformers 5.24 leaves out the global scale of experts in nvfp4, and says nothing: "
            "for it choose another scheme, vLLM and SGLang read them right"
        )
    if ct_config.model_dtype(config) in HALVES and any(
        d.scheme is not None and d.scheme.name == "int4_g128" and d.scales == "F32"
        for d in quantized
    ):
        told.append(
            "the scales of int4_g128 are F32, as the weights are or the source has them, and the "
            "model is not: vLLM 0.33 rounds them to the model's dtype, and SGLang 0.5 refuses to, "
            "unless SGLANG_QUANT_ALLOW_DOWNCASTING is set"
        )
    if refused := schemes & {"fp8_block128", "mxfp8"}:
        told.append(f"transformers 5.24 does not load experts in {', '.join(sorted(refused))}")
    return (*told, *deep_gemm(quantized))


def deep_gemm(quantized: Sequence[Declaration]) -> tuple[str, ...]:
    """Return that vLLM rounds block scales which are no powers of two, where there are such."""
    if all(
        d.scheme is None or d.scheme.name != "fp8_block128" or d.rule != "amax" for d in quantized
    ):
        return ()
    return (
        "vLLM 0.33 rounds the scales of fp8_block128 to powers of two where it uses DeepGEMM, and "
        "requantizes: `scale: ue8m0` in a recipe writes scales that it takes as they are",
    )


COMPRESSED_TENSORS = Container(
    name="compressed-tensors",
    bindings=BINDINGS,
    detect=detect,
    examine=examine,
    declare=declare,
    activations={
        "fp8_tensor": ("dynamic", "none", "static"),
        "fp8_channel": ("dynamic", "none"),
        "fp8_block128": ("dynamic", "none"),
        "int8_channel": ("dynamic", "none"),
        "mxfp8": ("dynamic", "none"),
        "mxfp4": ("none", "dynamic"),
        "nvfp4": ("none", "static"),
        "int4_g128": ("none",),
    },
    needs_config=True,
    stacks="split",
    static={
        "fp8_tensor": Static(".input_scale", (1,)),
        "nvfp4": Static(".input_global_scale", (1,), reciprocal=True),
    },
    cache=Cache(".k_scale", ".v_scale", (1,)),
)
