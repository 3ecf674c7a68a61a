"""`plain`: a checkpoint whose weights are not quantized; what dequantize writes."""

from collections.abc import Mapping, Sequence
from typing import Any

from lowbitcli.containers.container import (
    Container,
    Declaration,
    Declared,
    Examination,
    Finding,
    Listing,
)

# What in a config.json speaks of quantization, and is dropped where weights no longer are
# quantized.
QUANTIZATION_KEYS = ("quantization_config", "compression_config")

# Names that only quantized weights have. A file that holds them without saying how they are to be
# read (its config.json lies elsewhere, or its metadata was lost) is not read by guessing.
QUANTIZED_SUFFIXES = (
    ".weight_packed",
    ".weight_scale",
    ".weight_scale_inv",
    ".weight_scale_2",
    ".weight_global_scale",
    ".comfy_quant",
    ".scale_weight",  # ComfyUI's older files
    "._weight_qdata",  # torchao
    ".qweight",  # GPTQ, AWQ and others
)


def detect(listing: Listing) -> bool:
    """Every checkpoint that no other container recognised is plain: it stands last in the list."""
    return True


def examine(listing: Listing) -> Examination:
    """Find no quantized weight, and a finding for each tensor whose name says that it is part
    of one."""
    findings = tuple(
        Finding("unknown", name, "part of a quantized weight, but nothing says of which kind")
        for name in listing.tensors
        if name.endswith(QUANTIZED_SUFFIXES)
    )
    return Examination({}, findings)


def declare(declarations: Sequence[Declaration], config: Mapping[str, Any] | None) -> Declared:
    """Take the source's words on quantization out of its config, and leave the rest as it is."""
    if config is None:
        return Declared(None, {})
    return Declared({k: v for k, v in config.items() if k not in QUANTIZATION_KEYS}, {})


PLAIN = Container(
    name="plain", bindings={}, detect=detect, examine=examine, declare=declare, activations={}
)
