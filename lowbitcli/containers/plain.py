"""`plain`: a checkpoint whose weights are not quantized; what dequantize writes."""

from collections.abc import Mapping, Sequence
from typing import Any

from lowbitcli.containers.container import Container, Declaration, Declared, Examination, Listing

# What in a config.json speaks of quantization, and is dropped where weights no longer are
# quantized.
QUANTIZATION_KEYS = ("quantization_config", "compression_config")


def detect(listing: Listing) -> bool:
    """Every checkpoint that no other container recognised is plain: it stands last in the list."""
    return True


def examine(listing: Listing) -> Examination:
    return Examination({})


def declare(declarations: Sequence[Declaration], config: Mapping[str, Any] | None) -> Declared:
    """Take the source's words on quantization out of its config, and leave the rest as it is."""
    if config is None:
        return Declared(None, {})
    return Declared({k: v for k, v in config.items() if k not in QUANTIZATION_KEYS}, {})


PLAIN = Container(
    name="plain", bindings={}, detect=detect, examine=examine, declare=declare, activations={}
)
