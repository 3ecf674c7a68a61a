"""`torchao`: what torchao writes into safetensors, each quantized tensor taken apart; only read.

| class | scheme | `X._weight_qdata` | `X._weight_scale` |
|---|---|---|---|
| Float8Tensor, block [1, i] | fp8_channel | F8_E4M3 [o, i] | F32 [o, 1] |
| Float8Tensor, block [o, i] | fp8_tensor | F8_E4M3 [o, i] | F32 [1, 1] |
| Float8Tensor, block [128, 128] | fp8_block128 | F8_E4M3 [o, i] | F32 [o/128, i/128] |
| MXTensor, float8_e4m3fn | mxfp8 | F8_E4M3 [o, i] | F8_E8M0 [o, i/32], a byte |
| MXTensor, float4_e2m1fn_x2 | mxfp4 | U8 [o, i/2] | F8_E8M0 [o, i/32], a byte |
| NVFP4Tensor | nvfp4 | U8 [o, i/2] | F8_E4M3 [o, i/16] |

The global scale of NVFP4 is `X._weight_per_tensor_scale`, F32 []. Everything multiplies, and the
even column is in the low four bits. Scales lie row-major, or as tiles of tensor cores where the
header says `is_swizzled_scales`. The header's metadata names all tensors (`tensor_names`) and has
a JSON of class and attributes for each. Source: torchao 0.18, `prototype/safetensors`,
`prototype/mx_formats`, `quantization/quantize_/workflows/float8/float8_tensor.py`.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lowbitcli.containers import ct_config, suffixes
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
from lowbitcli.containers.layouts import IDENTITY, MATRIX1, SWIZZLED32X16
from lowbitcli.errors import CheckpointError, UnsupportedError, UsageError
from lowbitcli.schemes import BY_NAME
from lowbitcli.tensors import DATA, GLOBAL_SCALE, SCALE, Shape, safe

NAMES = "tensor_names"
QDATA, SCALES, GLOBAL = "_qdata", "_scale", "_per_tensor_scale"
FP8, PACKED = Stored(QDATA, "F8_E4M3", IDENTITY), Stored(QDATA, "U8", IDENTITY)
HALVES = ("BF16", "F16")
BINDINGS: dict[str, dict[str, Stored]] = {
    "fp8_tensor": {DATA: FP8, SCALE: Stored(SCALES, "F32", MATRIX1, reads=HALVES)},
    "fp8_channel": {DATA: FP8, SCALE: Stored(SCALES, "F32", IDENTITY, reads=HALVES)},
    "fp8_block128": {DATA: FP8, SCALE: Stored(SCALES, "F32", IDENTITY, reads=HALVES)},
    "mxfp8": {DATA: FP8, SCALE: Stored(SCALES, "U8", IDENTITY, reads=("F8_E8M0",))},
    "mxfp4": {DATA: PACKED, SCALE: Stored(SCALES, "U8", IDENTITY, reads=("F8_E8M0",))},
    "nvfp4": {
        DATA: PACKED,
        SCALE: Stored(SCALES, "F8_E4M3", IDENTITY),
        GLOBAL_SCALE: Stored(GLOBAL, "F32", IDENTITY),
    },
}
SWIZZLED: dict[str, dict[str, Stored]] = {
    name: {**BINDINGS[name], SCALE: Stored(SCALES, dtype, SWIZZLED32X16, reads=reads)}
    for name, dtype, reads in (
        ("mxfp8", "U8", ("F8_E8M0",)),
        ("mxfp4", "U8", ("F8_E8M0",)),
        ("nvfp4", "F8_E4M3", ()),
    )
}
MX = {"float8_e4m3fn": "mxfp8", "float4_e2m1fn_x2": "mxfp4"}
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
PLAIN_CLASS = "Tensor"
ACTIVATIONS = "_act_per_tensor_scale"
PART_SUFFIXES = ("._weight_qdata", "._weight_scale", "._weight_per_tensor_scale")


def detect(listing: Listing) -> bool:
    if ct_config.of(listing.config).get("quant_method") == "torchao":
        return True
    return any(
        NAMES in metadata and any(name.endswith(PART_SUFFIXES) for name in listing.tensors)
        for metadata in listing.metadata
    )


def examine(listing: Listing) -> Examination:
    """Return the weights whose class and attributes the headers name, and what disagrees.

    Raises:
        UnsupportedError: the config says torchao, and no header does.
        CheckpointError: a header cannot be understood.
    """
    described = _described(listing)
    weights: dict[str, QuantizedWeight] = {}
    findings: list[Finding] = []
    taken: set[str] = set()
    for name, said in described.items():
        if said.get("_type") == PLAIN_CLASS:
            if name not in listing.tensors:
                findings.append(Finding("missing", name, "listed in the header, and not there"))
            continue
        stem = _stem(name)
        taken.update(stem + suffix for suffix in (QDATA, SCALES, GLOBAL))
        scheme, bound = _binding(name, said, listing)
        if not scheme:
            findings.append(Finding("unknown", name, _unread(said)))
            continue
        weight, problems = weight_from(
            stem, BY_NAME[scheme], bound, listing, lambda _, s=said: _dtype(s), None, name
        )
        if weight is not None:
            weights[name] = weight
        findings += problems
    findings += orphans(listing, PART_SUFFIXES, taken)
    findings += suffixes.unread(listing)
    activations = suffixes.activations(listing)
    for name in listing.tensors:
        if name.endswith(ACTIVATIONS):
            activations[name] = "global scale of activations"
    return Examination(weights, tuple(findings), activations)


def _described(listing: Listing) -> dict[str, Mapping[str, Any]]:
    """Return tensor -> its class and attributes, from the headers of all files."""
    described: dict[str, Mapping[str, Any]] = {}
    for metadata in listing.metadata:
        for name in _names(metadata):
            if "." in name and name in metadata:
                described[name] = _object(name, metadata[name])
    if not described:
        raise UnsupportedError(
            "no header describes a tensor of torchao, which is needed to read it",
            hint="save the model with torchao 0.14 or later and safetensors",
        )
    return described


def _names(metadata: Mapping[str, str]) -> list[str]:
    """Return the tensors that a header lists.

    Raises:
        CheckpointError: it lists them in another way than as strings.
    """
    if NAMES not in metadata:
        return []
    names = _parsed(NAMES, metadata[NAMES])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"the header metadata {NAMES} is no list of strings")
    return names


def _object(key: str, text: str) -> dict[str, Any]:
    value = _parsed(key, text)
    if not isinstance(value, dict) or not isinstance(value.get("_data", {}), dict):
        raise CheckpointError(f"the header metadata {safe(key[:200])!r} is no JSON object")
    return value


def _parsed(key: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        message = f"the header metadata {safe(key[:200])!r} is no JSON"
        raise CheckpointError(message) from error


def _stem(name: str) -> str:
    """Return what the names of a tensor's parts begin with: `a.b.weight` is `a.b._weight`."""
    module, _, attribute = name.rpartition(".")
    return f"{module}._{attribute}"


def _binding(
    name: str, said: Mapping[str, Any], listing: Listing
) -> tuple[str, Mapping[str, Stored]]:
    """Return the scheme of a tensor, "" where it is not read, and how its parts are stored."""
    kind, data = said.get("_type"), said.get("_data", {})
    scheme, size = "", data.get("block_size")
    if kind == "Float8Tensor":
        qdata = listing.tensors.get(_stem(name) + QDATA)
        scheme = _of_block(size, qdata.shape) if qdata is not None else "fp8_channel"
    elif kind == "MXTensor" and size == 32:
        scheme = MX.get(str(_value(data.get("elem_dtype"))), "")
    elif kind == "NVFP4Tensor" and size == 16 and "per_tensor_scale" in _held(said):
        scheme = "nvfp4"
    if not scheme:
        return "", {}
    return scheme, (SWIZZLED if data.get("is_swizzled_scales") is True else BINDINGS)[scheme]


def _of_block(size: Any, shape: Shape) -> str:
    """Return the scheme of FP8 whose scales are for blocks of this size, "" where there is none."""
    if len(shape) != 2 or not isinstance(size, list):
        return ""
    if size == list(shape):
        return "fp8_tensor"
    if size == [1, shape[1]]:
        return "fp8_channel"
    return "fp8_block128" if size == [128, 128] else ""


def _held(said: Mapping[str, Any]) -> Sequence[Any]:
    names = said.get("_tensor_data_names")
    return names if isinstance(names, list) else ()


def _value(said: Any) -> Any:
    """Return what an attribute is that torchao writes with its class."""
    return said.get("_data") if isinstance(said, Mapping) else said


def _dtype(said: Mapping[str, Any]) -> str:
    data = said.get("_data", {})
    return DTYPES.get(str(_value(data.get("orig_dtype", data.get("dtype")))), "")


def _unread(said: Mapping[str, Any]) -> str:
    """Return why a tensor is not read."""
    data = said.get("_data", {})
    kind = safe(str(said.get("_type"))[:40])
    if kind == "NVFP4Tensor" and "per_tensor_scale" not in _held(said):
        return "an NVFP4Tensor without per_tensor_scale is not read"
    if kind in ("Float8Tensor", "MXTensor", "NVFP4Tensor"):
        element = _value(data.get("elem_dtype"))
        told = f" of {safe(str(element)[:40])}" if element else ""
        return f"torchao's {kind}{told} in blocks of {str(data.get('block_size'))[:40]} is not read"
    return f"torchao's {kind} is not read"


def storage_keys(metadata: Mapping[str, str]) -> Iterable[str]:
    """Return the keys of a header that say how torchao's tensors are stored, and of nothing
    else."""
    return (NAMES, *_names(metadata)) if NAMES in metadata else ()


def declare(declarations: Sequence[Declaration], config: Mapping[str, Any] | None) -> Declared:
    """Refuse.

    Raises:
        UsageError: always: torchao's own program writes this container.
    """
    raise UsageError(
        "the container torchao is read, and not written",
        hint="--container compressed-tensors is read by the same programs",
    )


TORCHAO = Container(
    name="torchao",
    bindings=BINDINGS,
    detect=detect,
    examine=examine,
    declare=declare,
    unwritten=frozenset(BINDINGS),
)
