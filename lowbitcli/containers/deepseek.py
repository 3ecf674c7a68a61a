"""`deepseek`: FP8 in blocks of 128 x 128 as DeepSeek-V3 is released (`quant_method: fp8`).

| scheme | data | scale |
|---|---|---|
| fp8_block128 | `.weight` F8_E4M3 | `.weight_scale_inv` F32 [o/128, i/128] rounded up |

The scale multiplies, whatever its name says. Other writers store it in BF16 or, where it is a power
of two, as F8_E8M0; both go by value. `scale_fmt: ue8m0` in the config says that all scales are
powers of two. Names in `modules_to_not_convert` are whole: readers expand no patterns in them.
Also read: one scale for a whole matrix (no `weight_block_size`), `.weight_scale` or
`.weight_scale_inv` F32 of one element.
Source: DeepSeek-V3 `inference/kernel.py`; transformers 5.24 `integrations/finegrained_fp8.py`; what
readers make of the config was tried on vLLM 0.33 and SGLang 0.5.23.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from lowbitcli.containers import ct_config, suffixes
from lowbitcli.containers.compressed_tensors import deep_gemm
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
from lowbitcli.containers.layouts import IDENTITY, VECTOR1
from lowbitcli.containers.plain import QUANTIZATION_KEYS
from lowbitcli.containers.stacks import modules_kept
from lowbitcli.errors import CheckpointError, UnsupportedError
from lowbitcli.schemes import BY_NAME, Scheme
from lowbitcli.tensors import DATA, SCALE, safe

BLOCK = [128, 128]
BINDINGS: dict[str, dict[str, Stored]] = {
    "fp8_block128": {
        DATA: Stored(".weight", "F8_E4M3", IDENTITY),
        SCALE: Stored(".weight_scale_inv", "F32", IDENTITY, reads=("BF16", "F16", "F8_E8M0")),
    },
}
# What is read besides: a scale for a whole matrix goes by two names.
WHOLE = tuple(
    {
        DATA: Stored(".weight", "F8_E4M3", IDENTITY),
        SCALE: Stored(suffix, "F32", VECTOR1, reads=("BF16", "F16")),
    }
    for suffix in (".weight_scale", ".weight_scale_inv")
)
SCALES = (".weight_scale_inv", ".weight_scale")

# SGLang 0.5.23 `models/llama.py` renames `weight_scale_inv` when it loads these, and drops it.
RENAMED_BY_SGLANG = ("Llama", "Mistral", "Ministral", "TeleFLM", "Yi", "InternLM3", "Xverse")


def detect(listing: Listing) -> bool:
    return ct_config.of(listing.config).get("quant_method") == "fp8"


def examine(listing: Listing) -> Examination:
    """Return the weights that are stored as FP8 with a scale, and what disagrees.

    Raises:
        UnsupportedError: the config declares blocks of another size.
        CheckpointError: it cannot be understood.
    """
    said = ct_config.of(listing.config)
    size = said.get("weight_block_size")
    if size is None:
        return examine_fp8(listing, BY_NAME["fp8_tensor"], WHOLE)
    if size != BLOCK:
        raise UnsupportedError(
            f"quantization_config.weight_block_size is {safe(str(size)[:80])}, which is not read",
            hint="read are blocks of [128, 128], and one scale for a whole matrix",
        )
    return examine_fp8(listing, BY_NAME["fp8_block128"], (BINDINGS["fp8_block128"],))


def examine_fp8(
    listing: Listing, scheme: Scheme, bindings: Sequence[Mapping[str, Stored]]
) -> Examination:
    """Return the weights of the modules whose `.weight` is FP8, or that have a scale, each by the
    first of `bindings` whose tensors are there."""
    kept = kept_modules(ct_config.of(listing.config))
    dtype = ct_config.model_dtype(listing.config)
    weights: dict[str, QuantizedWeight] = {}
    findings: list[Finding] = []
    taken: set[str] = set()
    for name, spec in listing.tensors.items():
        if not name.endswith(".weight") or not spec.dtype.startswith("F8_E"):
            continue
        stem = name.removesuffix(".weight")
        bound = next(
            (one for one in bindings if stem + one[SCALE].suffix in listing.tensors), bindings[0]
        )
        scale = stem + bound[SCALE].suffix
        if scale not in listing.tensors and listing.raw_fp8:
            continue
        taken.update((name, scale))
        if stem in kept:
            message = "stored as FP8, but the config says that it is not converted"
            findings.append(Finding("mismatch", name, message))
            continue
        weight, problems = weight_from(stem, scheme, bound, listing, lambda _: dtype)
        if weight is not None:
            weights[name] = weight
        findings += problems
    findings += orphans(listing, SCALES, taken)
    findings += suffixes.unread(listing)
    return Examination(weights, tuple(findings), suffixes.activations(listing))


def kept_modules(said: Mapping[str, Any]) -> frozenset[str]:
    """Return the modules that a config names as not quantized.

    Raises:
        CheckpointError: it names them in another way than as a list of strings.
    """
    found: set[str] = set()
    for key in ("modules_to_not_convert", "ignored_layers"):
        names = said.get(key)
        if names is None:
            continue
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise CheckpointError(f"quantization_config.{key} is no list of strings")
        found.update(names)
    return frozenset(found)


def unquantized(declarations: Sequence[Declaration], config: Mapping[str, Any]) -> list[str]:
    """Return the modules with a matrix that a writer leaves as they are, a tied head among them."""
    kept = {
        item.name.removesuffix(".weight")
        for item in declarations
        if item.scheme is None and len(item.shape) >= 2 and item.name.endswith(".weight")
    }
    quantized = {item.name for item in declarations if item.scheme is not None}
    stacks = ((item.name, item.shape) for item in declarations if item.scheme is None)
    kept |= modules_kept(stacks, quantized)
    if ct_config.has_untold_head(config) and "lm_head.weight" not in quantized:
        kept.add("lm_head")
    return sorted(kept)


def notes(declarations: Sequence[Declaration], config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what reading programs are known to make of this."""
    told = []
    names = config.get("architectures")
    if isinstance(names, list) and any(str(one).startswith(RENAMED_BY_SGLANG) for one in names):
        told.append(
            "SGLang 0.5 drops `weight_scale_inv` of this architecture when it loads it: "
            "for SGLang write fp8_block128 into --container compressed-tensors"
        )
    ragged = sum(
        1
        for item in declarations
        if item.scheme is not None
        and item.scheme.name == "fp8_block128"
        and (item.shape[-1] % 128 or item.shape[-2] % 128)
    )
    if ragged:
        told.append(
            f"{ragged} matrices have rows or columns that are no multiple of 128: transformers 5 "
            "reads their scales wrong, and vLLM refuses them where it merges matrices"
        )
    return (*told, *deep_gemm(declarations))


def declare(declarations: Sequence[Declaration], config: Mapping[str, Any] | None) -> Declared:
    """Write `quantization_config` over whatever the source's config said of quantization."""
    metadata = {"format": "pt"}
    if config is None:
        return Declared(None, metadata)
    said = {k: v for k, v in config.items() if k not in QUANTIZATION_KEYS}
    quantized = [item for item in declarations if item.scheme is not None]
    if not quantized:
        return Declared(said, metadata)
    said["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": BLOCK,
        "modules_to_not_convert": unquantized(declarations, config),
    }
    powers = {"ue8m0", ""} if _powers_of_two(config) else {"ue8m0"}
    if all(item.rule in powers for item in quantized):
        said["quantization_config"]["scale_fmt"] = "ue8m0"
    return Declared(said, metadata, notes=notes(quantized, config))


def _powers_of_two(config: Mapping[str, Any]) -> bool:
    """Does the source say that its scales are powers of two?"""
    return ct_config.of(config).get("scale_fmt") == "ue8m0"


DEEPSEEK = Container(
    name="deepseek",
    bindings=BINDINGS,
    detect=detect,
    examine=examine,
    declare=declare,
    activations={"fp8_block128": ("dynamic",)},
    needs_config=True,
    stacks="split",
)
