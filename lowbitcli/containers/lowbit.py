"""`lowbit`: safetensors that describe themselves, for files that have no config.json beside them.

Each quantized weight `X.weight` is stored under names of its own, in canonical layout, and the
header metadata `lowbit.weights` says, as JSON, what every one of them is. Nothing else is needed
to read the file:

    value = decode(data) * float32(scale * global_scale)

| key in `lowbit.weights[name]` | meaning |
|---|---|
| scheme | nvfp4, mxfp8, fp8_tensor, fp8_channel, ... |
| shape, dtype | those of the weight before it was quantized |
| tensors | part -> tensor of this file: data, scale, global_scale |
| element, scale_format | how they are decoded: E2M1, E4M3, E5M2, E8M0, INT8, INT4, F32, BF16, F16 |
| block | rows and columns that share a scale, null for all of that axis |
| stacked | of experts in one tensor: `in_out` where the tensor was `[E, in, out]`, else `out_in` |

`lowbit.format` holds what is the same for all: version, scale meaning (`multiply`), nibble order
(`low_first`), scale layout (`linear`). The format is documented in docs/formats.md.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

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
from lowbitcli.containers.layouts import IDENTITY, Layout
from lowbitcli.containers.plain import QUANTIZATION_KEYS
from lowbitcli.containers.stacks import LAYOUTS
from lowbitcli.errors import CheckpointError
from lowbitcli.schemes import BY_NAME, SCHEMES, Scheme
from lowbitcli.tensors import DATA, FLOATING, GLOBAL_SCALE, SCALE, Shape

WEIGHTS_KEY = "lowbit.weights"
FORMAT_KEY = "lowbit.format"
FORMAT = {
    "version": 1,
    "value": "decode(data) * float32(scale * global_scale)",
    "scale_meaning": "multiply",
    "global_scale_meaning": "multiply",
    "nibble_order": "low_first",
    "scale_layout": "linear",
}
SUFFIXES = {DATA: ".weight", SCALE: ".weight_scale", GLOBAL_SCALE: ".weight_global_scale"}

BINDINGS = {
    scheme.name: {
        part: Stored(
            SUFFIXES[part], spec.dtype, IDENTITY, scheme.scale_dtypes if part == SCALE else ()
        )
        for part, spec in scheme.specs((128, 128)).items()
    }
    for scheme in SCHEMES
}


def detect(listing: Listing) -> bool:
    return any(FORMAT_KEY in metadata for metadata in listing.metadata)


def examine(listing: Listing) -> Examination:
    """Return the weights that `lowbit.weights` describes, held against the tensors that are
    there."""
    weights: dict[str, QuantizedWeight] = {}
    findings: list[Finding] = []
    taken: set[str] = set()
    for name, entry in _described(listing).items():
        scheme = BY_NAME.get(str(entry.get("scheme")))
        if scheme is None:
            message = f"its scheme {entry.get('scheme')!r} is not known to this version"
            findings.append(Finding("unknown", name, message))
            continue
        stem = name.removesuffix(".weight")
        bound = BINDINGS[scheme.name]
        dtype = str(entry.get("dtype", ""))
        plain = LAYOUTS.get(str(entry["stacked"])) if "stacked" in entry else None
        weight, problems = weight_from(
            stem, scheme, bound, listing, lambda _, d=dtype: d, None, name, plain
        )
        if weight is not None:
            scales = listing.tensors[weight.parts[SCALE]].dtype
            problems = _misdescribed(name, entry, weight, scales)
        if weight is not None and not problems:
            weights[name] = weight
        findings += problems
        taken.update(stem + stored.suffix for stored in bound.values())
    scales = (SUFFIXES[SCALE], SUFFIXES[GLOBAL_SCALE])
    findings += orphans(listing, scales, taken)
    return Examination(weights, tuple(findings))


def _misdescribed(
    name: str, entry: Mapping[str, Any], weight: QuantizedWeight, scales: str
) -> list[Finding]:
    """Return what an entry says of a weight and is not so: another reader would follow it."""
    if weight.plain is None and not name.endswith(".weight"):
        return [Finding("mismatch", name, "its name does not end in .weight")]
    if weight.dtype not in FLOATING:
        return [Finding("mismatch", name, f"described as of dtype {str(entry.get('dtype'))[:80]}")]
    told = _description(name, weight.scheme, weight.shape, weight.dtype, weight.plain, scales)
    return [
        Finding("mismatch", name, f"{key}: {str(entry.get(key))[:80]} described, {value} stored")
        for key, value in told.items()
        if key != "scheme" and entry.get(key) != value
    ]


def _description(
    name: str, scheme: Scheme, shape: Shape, dtype: str, plain: Layout | None, scales: str
) -> dict[str, Any]:
    """Return what `lowbit.weights` says of one weight, whose scales are stored as `scales`."""
    stem = name.removesuffix(".weight")
    stacked = next((key for key, layout in LAYOUTS.items() if layout == plain), None)
    return {
        **({} if stacked is None else {"stacked": stacked}),
        "scheme": scheme.name,
        "shape": list(shape),
        "dtype": dtype,
        "element": scheme.element.name,
        "scale_format": scales if scales in scheme.scale_dtypes else scheme.scale.name,
        "block": list(scheme.block),
        "tensors": {part: stem + stored.suffix for part, stored in BINDINGS[scheme.name].items()},
    }


def _described(listing: Listing) -> Mapping[str, Mapping[str, Any]]:
    described: dict[str, Mapping[str, Any]] = {}
    for metadata in listing.metadata:
        if FORMAT_KEY not in metadata:
            continue
        said = _object(FORMAT_KEY, metadata[FORMAT_KEY])
        if any(said.get(key) != value for key, value in FORMAT.items()):
            raise CheckpointError(
                f"{FORMAT_KEY} is {_compact(said)[:200]}, which this version cannot read",
                hint="install a newer lowbit",
            )
        entries = _object(WEIGHTS_KEY, metadata.get(WEIGHTS_KEY, "{}"))
        if not all(isinstance(entry, dict) for entry in entries.values()):
            raise CheckpointError(
                f"the header metadata {WEIGHTS_KEY} holds something else than objects"
            )
        described.update(entries)
    return described


def _object(key: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the header metadata {key} is no JSON") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"the header metadata {key} is no JSON object")
    return value


def declare(declarations: Sequence[Declaration], config: Mapping[str, Any] | None) -> Declared:
    """Describe every quantized weight in the header, and tell readers of config.json that they
    need lowbit."""
    described = {
        item.name: _description(
            item.name, item.scheme, item.shape, item.dtype, item.plain, item.scales
        )
        for item in declarations
        if item.scheme is not None
    }
    said = {FORMAT_KEY: _compact(FORMAT), WEIGHTS_KEY: _compact(described)}
    if config is not None:
        config = {k: v for k, v in config.items() if k not in QUANTIZATION_KEYS}
        config["quantization_config"] = {"quant_method": "lowbit", "version": FORMAT["version"]}
    return Declared(config, said)


def _compact(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


LOWBIT = Container(
    name="lowbit",
    bindings=BINDINGS,
    detect=detect,
    examine=examine,
    declare=declare,
    # how activations are computed is left to whoever reads the file
    activations={scheme.name: ("none", "dynamic") for scheme in SCHEMES},
    stacks="also",
)
