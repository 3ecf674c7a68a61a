"""`native-mxfp8`: MXFP8 as SGLang, transformers and TensorRT-LLM read it (`quant_method: mxfp8`).

| scheme | data | scale |
|---|---|---|
| mxfp8 | `.weight` F8_E4M3 | `.weight_scale_inv` U8 [o, i/32], 2^(byte - 127), a multiplier |

vLLM wants another name for the same tensor: for it write `compressed-tensors` or `modelopt`.
Source: SGLang 0.5.23 `layers/quantization/fp8.py`; transformers 5.24
`integrations/finegrained_fp8.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from lowbitcli.containers import ct_config
from lowbitcli.containers.container import (
    Container,
    Declaration,
    Declared,
    Examination,
    Listing,
    Stored,
)
from lowbitcli.containers.deepseek import examine_fp8, notes, unquantized
from lowbitcli.containers.layouts import IDENTITY
from lowbitcli.containers.plain import QUANTIZATION_KEYS
from lowbitcli.errors import UnsupportedError
from lowbitcli.schemes import BY_NAME
from lowbitcli.tensors import DATA, SCALE, safe

BLOCK = [1, 32]
BINDINGS: dict[str, dict[str, Stored]] = {
    "mxfp8": {
        DATA: Stored(".weight", "F8_E4M3", IDENTITY),
        SCALE: Stored(".weight_scale_inv", "U8", IDENTITY, reads=("F8_E8M0",)),
    }
}


def detect(listing: Listing) -> bool:
    return ct_config.of(listing.config).get("quant_method") == "mxfp8"


def examine(listing: Listing) -> Examination:
    """Return the weights that are stored as FP8 with a scale, and what disagrees.

    Raises:
        UnsupportedError: the config declares blocks of another size.
    """
    size = ct_config.of(listing.config).get("weight_block_size", BLOCK)
    if size != BLOCK:
        raise UnsupportedError(
            f"quantization_config.weight_block_size is {safe(str(size)[:80])}, which is not read",
            hint="blocks of mxfp8 are [1, 32]",
        )
    return examine_fp8(listing, BY_NAME["mxfp8"], (BINDINGS["mxfp8"],))


def declare(declarations: Sequence[Declaration], config: Mapping[str, Any] | None) -> Declared:
    """Write `quantization_config` over whatever the source's config said of quantization."""
    metadata = {"format": "pt"}
    if config is None:
        return Declared(None, metadata)
    said = {k: v for k, v in config.items() if k not in QUANTIZATION_KEYS}
    quantized = [item for item in declarations if item.scheme is not None]
    if not quantized:
        return Declared(said, metadata)
    kept = unquantized(declarations, config)
    said["quantization_config"] = {
        "quant_method": "mxfp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": BLOCK,
        "scale_fmt": "ue8m0",
        "ignored_layers": kept,
        "modules_to_not_convert": kept,
    }
    told = "vLLM 0.33 does not load this container: for vLLM write --container compressed-tensors"
    return Declared(said, metadata, notes=(told, *notes(quantized, config)))


NATIVE_MXFP8 = Container(
    name="native-mxfp8",
    bindings=BINDINGS,
    detect=detect,
    examine=examine,
    declare=declare,
    activations={"mxfp8": ("dynamic",)},
    needs_config=True,
    stacks="split",
)
