"""`comfyui`: one file for ComfyUI, which marks each quantized layer in the header and in a tensor.

| scheme | format | data | scale | global scale |
|---|---|---|---|---|
| fp8_tensor | float8_e4m3fn | `.weight` F8_E4M3 | `.weight_scale` F32 [] | |
| fp8_tensor_e5m2 | float8_e5m2 | `.weight` F8_E5M2 | `.weight_scale` F32 [] | |
| int8_channel | int8_tensorwise | `.weight` I8 | `.weight_scale` F32 [] or [o, 1], only read | |
| mxfp8 | mxfp8 | `.weight` F8_E4M3, padded 32 x 32 | `.weight_scale` U8, swizzled | |
| nvfp4 | nvfp4 | `.weight` U8, high nibble first, padded | `.weight_scale` F8_E4M3, too | stored |

The global scale is `.weight_scale_2`, F32 [], a multiplier. Swizzled scales are tiles of 128 x 4,
padded with zeros. The marks are `X.comfy_quant`, a U8 tensor of JSON, and the header's
`_quantization_metadata`. Both name the format; the tensor also has the shape before padding, which
ComfyUI takes from the model and others need from the file. Without it rows are those of the bias,
else the padded ones. INT8 whose mark says `convrot` is rotated, and not read. The older mark is a
tensor `scaled_fp8`, scales are then `.scale_weight`.
Source: ComfyUI 0.38 `comfy/utils.py`, `comfy/ops.py`, `comfy/quant_ops.py`; comfy-kitchen 0.2.40.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lowbitcli.containers import suffixes
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
from lowbitcli.containers.inputs import Static
from lowbitcli.containers.layouts import (
    IDENTITY,
    SPREAD,
    SWIZZLED128X4,
    VECTOR1,
    Layout,
    cropped,
    padded,
)
from lowbitcli.containers.plain import QUANTIZATION_KEYS
from lowbitcli.errors import CheckpointError
from lowbitcli.schemes import BY_NAME
from lowbitcli.tensors import DATA, DTYPES, GLOBAL_SCALE, SCALE, Shape, TensorSpec

MARK = ".comfy_quant"
METADATA = "_quantization_metadata"
OLD_MARK = "scaled_fp8"
FORMATS = {
    "fp8_tensor": "float8_e4m3fn",
    "fp8_tensor_e5m2": "float8_e5m2",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
    "int8_channel": "int8_tensorwise",
}
SCHEMES = {form: scheme for scheme, form in FORMATS.items()}
HALVES = ("BF16", "F16")
BINDINGS: dict[str, dict[str, Stored]] = {
    "fp8_tensor": {
        DATA: Stored(".weight", "F8_E4M3", IDENTITY),
        SCALE: Stored(".weight_scale", "F32", IDENTITY, reads=HALVES),
    },
    "fp8_tensor_e5m2": {
        DATA: Stored(".weight", "F8_E5M2", IDENTITY),
        SCALE: Stored(".weight_scale", "F32", IDENTITY, reads=HALVES),
    },
    "int8_channel": {
        DATA: Stored(".weight", "I8", IDENTITY),
        SCALE: Stored(".weight_scale", "F32", IDENTITY, reads=HALVES),
    },
    "mxfp8": {
        DATA: Stored(".weight", "F8_E4M3", padded(32, 32)),
        SCALE: Stored(".weight_scale", "U8", SWIZZLED128X4, reads=("F8_E8M0",)),
    },
    "nvfp4": {
        DATA: Stored(".weight", "U8", padded(16, 8, swap=True)),
        SCALE: Stored(".weight_scale", "F8_E4M3", SWIZZLED128X4),
        GLOBAL_SCALE: Stored(".weight_scale_2", "F32", IDENTITY),
    },
}
OLD = {
    DATA: Stored(".weight", "F8_E4M3", IDENTITY),
    SCALE: Stored(".scale_weight", "F32", VECTOR1, reads=HALVES),
}
OLD_E5M2 = {**OLD, DATA: Stored(".weight", "F8_E5M2", IDENTITY)}
ONE_SCALE = {  # of int8_tensorwise, for the whole matrix
    **BINDINGS["int8_channel"],
    SCALE: Stored(".weight_scale", "F32", SPREAD, reads=HALVES),
}
LOW_FIRST = {**BINDINGS["nvfp4"], DATA: Stored(".weight", "U8", padded(16, 8))}
UNPADDED = ("fp8_tensor", "fp8_tensor_e5m2", "int8_channel")
PART_SUFFIXES = (".weight_scale", ".weight_scale_2", ".scale_weight")

INPUTS = {"fp8_tensor": Static(".input_scale", ()), "nvfp4": Static(".input_scale", ())}


def detect(listing: Listing) -> bool:
    if any(METADATA in metadata for metadata in listing.metadata):
        return True
    return any(name.endswith((MARK, ".scale_weight")) or _is_old(name) for name in listing.tensors)


def _is_old(name: str) -> bool:
    return name == OLD_MARK or name.endswith("." + OLD_MARK)


def examine(listing: Listing) -> Examination:
    """Return the weights that are marked, held against the tensors that are there.

    Raises:
        CheckpointError: the marks are no JSON.
    """
    weights: dict[str, QuantizedWeight] = {}
    findings: list[Finding] = []
    taken: set[str] = set()
    for stem, said in _marked(listing, findings).items():
        name = f"{stem}.weight"
        scheme = SCHEMES.get(str(said.get("format")))
        taken.update(stem + suffix for suffix in PART_SUFFIXES)
        if scheme is None or name not in listing.tensors or said.get("convrot"):
            told = f"its format {str(said.get('format'))[:40]!r} is not read"
            if said.get("convrot"):
                told = "rotated by ConvRot, which is not undone"
            kind = "missing" if name not in listing.tensors else "unknown"
            message = "marked as quantized, and not there" if kind == "missing" else told
            findings.append(Finding(kind, name, message))
            continue
        shape, plain = _shape(stem, scheme, said, listing, findings)
        weight, problems = weight_from(
            stem,
            BY_NAME[scheme],
            _binding(stem, scheme, listing),
            listing,
            lambda _, s=said: _dtype(s),
            shape,
            plain=plain,
        )
        if weight is not None:
            weights[name] = weight
        findings += problems
    for stem in _old(listing):
        if f"{stem}.weight" in weights:  # marked, and a scale of older files beside it
            continue
        data = listing.tensors.get(stem + ".weight")
        e5m2 = data is not None and data.dtype == "F8_E5M2"
        scheme = BY_NAME["fp8_tensor_e5m2" if e5m2 else "fp8_tensor"]
        bound = OLD_E5M2 if e5m2 else OLD
        weight, problems = weight_from(stem, scheme, bound, listing, lambda _: "")
        if weight is not None:
            weights[weight.name] = weight
        findings += problems
        taken.add(stem + ".scale_weight")
    findings += orphans(listing, PART_SUFFIXES, taken)
    findings += suffixes.unread(listing)
    markers = frozenset(n for n in listing.tensors if n.endswith(MARK) or _is_old(n))
    activations = suffixes.activations(listing)
    notes = _of_shapes(weights, listing)
    return Examination(weights, tuple(findings), activations, markers, notes)


def _of_shapes(weights: Mapping[str, QuantizedWeight], listing: Listing) -> tuple[str, ...]:
    """Return what a user should know of shapes that are not those of the model."""
    untold = 0
    for weight in weights.values():
        if weight.scheme.name in UNPADDED:
            continue
        stem = weight.name.removesuffix(".weight")
        told = _mark(stem + MARK, listing.markers.get(stem + MARK, b"{}")).get("orig_shape")
        untold += told is None and f"{stem}.bias" not in listing.tensors
    if not untold:
        return ()
    return (f"{untold} weights say nothing of their shape: it is taken as it is padded",)


def _binding(stem: str, scheme: str, listing: Listing) -> Mapping[str, Stored]:
    """Return how the parts of a weight are stored; a scale of INT8 is for a row or for all,
    and a user may say where the even column of NVFP4 is."""
    if scheme == "nvfp4" and listing.nibbles == "low":
        return LOW_FIRST
    scale = listing.tensors.get(stem + ".weight_scale")
    if scheme == "int8_channel" and scale is not None and scale.shape in ((), (1,)):
        return ONE_SCALE
    return BINDINGS[scheme]


def _old(listing: Listing) -> list[str]:
    return [
        name.removesuffix(".scale_weight")
        for name in listing.tensors
        if name.endswith(".scale_weight")
    ]


def _marked(listing: Listing, findings: list[Finding]) -> dict[str, Mapping[str, Any]]:
    """Return layer -> what its marks say; a tensor says more than the header, and they agree."""
    marked: dict[str, Mapping[str, Any]] = {}
    for metadata in listing.metadata:
        if METADATA in metadata:
            layers = _object(METADATA, metadata[METADATA]).get("layers")
            if not isinstance(layers, dict) or not all(
                isinstance(x, dict) for x in layers.values()
            ):
                raise CheckpointError(f"the header metadata {METADATA} lists no layers")
            marked.update(layers)
    for name in listing.tensors:
        if not name.endswith(MARK):
            continue
        stem = name.removesuffix(MARK)
        if name not in listing.markers or listing.tensors[name].dtype != "U8":
            findings.append(Finding("mismatch", name, "a mark is U8 and small; this is not"))
            continue
        said = _mark(name, listing.markers[name])
        if stem in marked and marked[stem].get("format") != said.get("format"):
            findings.append(Finding("mismatch", name, f"{METADATA} names another format"))
        marked[stem] = {**marked.get(stem, {}), **said}
    return marked


def _mark(where: str, raw: bytes) -> dict[str, Any]:
    return _object(where, raw.decode("utf-8", "replace"))


def _object(where: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where[:200]!r} is no JSON") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where[:200]!r} is no JSON object")
    return value


def _shape(
    stem: str, scheme: str, said: Mapping[str, Any], listing: Listing, findings: list[Finding]
) -> tuple[Shape, Layout | None]:
    """Return the shape before padding, in whole blocks: as marked, else with the rows of the bias,
    else padded; and how it lies without the columns that fill the last block."""
    stored = listing.tensors[stem + ".weight"].shape
    if len(stored) != 2 or scheme in UNPADDED:
        return BY_NAME[scheme].shape_of(stored), None
    rows, cols = BY_NAME[scheme].shape_of(stored)
    told = said.get("orig_shape")
    if told is not None:
        if _is_shape(told) and _pads_to(told, (rows, cols), scheme):
            block = BY_NAME[scheme].block[1] or 1
            wide = -(-told[1] // block) * block
            return (told[0], wide), None if wide == told[1] else cropped(told[1], wide)
        message = f"its mark says the shape {str(told)[:40]}, stored is {list(stored)}"
        findings.append(Finding("mismatch", stem + ".weight", message))
    bias = listing.tensors.get(stem + ".bias")
    high = bias.shape[0] if bias is not None and len(bias.shape) == 1 else rows
    return (high if _pads_to((high, cols), (rows, cols), scheme) else rows, cols), None


def _is_shape(told: Any) -> bool:
    return (
        isinstance(told, list)
        and len(told) == 2
        and all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in told)
    )


def _pads_to(shape: Sequence[int], stored: Shape, scheme: str) -> bool:
    multiple = 16 if scheme == "nvfp4" else 32
    return all(-(-n // multiple) * multiple == m for n, m in zip(shape, stored, strict=True))


def _dtype(said: Mapping[str, Any]) -> str:
    """Return the dtype before quantization that a mark names, as safetensors calls it."""
    names = {f"torch.{torch}": name for name, (_, torch) in DTYPES.items() if torch}
    found = names.get(str(said.get("orig_dtype")), "")
    return found if found in ("F32", "BF16", "F16") else ""


def declare(declarations: Sequence[Declaration], config: Mapping[str, Any] | None) -> Declared:
    """Mark every quantized layer twice, as comfy-kitchen does."""
    layers: dict[str, dict[str, Any]] = {}
    constants: dict[str, bytes] = {}
    for item in declarations:
        if item.scheme is None:
            continue
        stem = item.name.removesuffix(".weight")
        layers[stem] = {"format": FORMATS[item.scheme.name]}
        shape = item.shape
        if item.plain is not None:
            shape = item.plain.spec(TensorSpec("", "U8", shape)).shape
        told = {**layers[stem], "orig_shape": list(shape)}
        if item.dtype:
            told["orig_dtype"] = f"torch.{DTYPES[item.dtype][1]}"
        constants[stem + MARK] = json.dumps(told).encode()
    metadata = {"format": "pt"}
    if layers:
        said = {"format_version": "1.0", "layers": dict(sorted(layers.items()))}
        metadata[METADATA] = json.dumps(said)
    if config is not None:
        config = {k: v for k, v in config.items() if k not in QUANTIZATION_KEYS}
    return Declared(config, metadata, constants=constants)


COMFYUI = Container(
    name="comfyui",
    bindings=BINDINGS,
    detect=detect,
    examine=examine,
    declare=declare,
    # ComfyUI decides by itself whether it quantizes what goes in
    activations={
        scheme: ("none", "dynamic", *(("static",) if scheme in INPUTS else ()))
        for scheme in BINDINGS
    },
    static=INPUTS,
    fuses=False,
    pads=True,
    unwritten=frozenset({"int8_channel"}),
)
