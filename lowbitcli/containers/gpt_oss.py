"""`gpt-oss`: MXFP4 experts as OpenAI releases gpt-oss (`quant_method: mxfp4`).

| scheme | data | scale |
|---|---|---|
| mxfp4 | `X_blocks` U8 [E, out, in/32, 16], low nibble first | `X_scales` U8 [E, out, in/32] |

X is `experts.gate_up_proj`, whose rows alternate between gate and up, or `experts.down_proj`. The
unquantized tensor X is `[E, in, out]`. Everything but the experts stays as it is.
Source: transformers 5.24 `integrations/mxfp4.py`; gpt-oss `gpt_oss/torch/weights.py`.
"""

from collections.abc import Mapping, Sequence
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
from lowbitcli.containers.layouts import IDENTITY, SIXTEENS, TRANSPOSED
from lowbitcli.containers.plain import QUANTIZATION_KEYS
from lowbitcli.errors import UsageError
from lowbitcli.schemes import BY_NAME
from lowbitcli.tensors import DATA, SCALE

BINDINGS: dict[str, dict[str, Stored]] = {
    "mxfp4": {
        DATA: Stored("_blocks", "U8", SIXTEENS),
        SCALE: Stored("_scales", "U8", IDENTITY, reads=("F8_E8M0",)),
    }
}
MODEL = "gpt_oss"
KEPT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def detect(listing: Listing) -> bool:
    return ct_config.of(listing.config).get("quant_method") == "mxfp4"


def examine(listing: Listing) -> Examination:
    """Return the stacks of experts that are stored as blocks and scales, and what disagrees."""
    bound = BINDINGS["mxfp4"]
    dtype = ct_config.model_dtype(listing.config)
    weights: dict[str, QuantizedWeight] = {}
    findings: list[Finding] = []
    taken: set[str] = set()
    for name, spec in listing.tensors.items():
        if not name.endswith("_blocks"):
            continue
        stem = name.removesuffix("_blocks")
        taken.update(stem + stored.suffix for stored in bound.values())
        if len(spec.shape) != 4 or spec.shape[-1] != 16:
            message = f"blocks are [E, out, in/32, 16], this is {list(spec.shape)}"
            findings.append(Finding("mismatch", name, message))
            continue
        shape = (*spec.shape[:2], spec.shape[2] * 32)
        weight, problems = weight_from(
            stem, BY_NAME["mxfp4"], bound, listing, lambda _: dtype, shape, stem, TRANSPOSED
        )
        if weight is not None:
            weights[stem] = weight
        findings += problems
    findings += orphans(listing, ("_scales",), taken)
    findings += suffixes.unread(listing)
    return Examination(weights, tuple(findings), suffixes.activations(listing))


def declare(declarations: Sequence[Declaration], config: Mapping[str, Any] | None) -> Declared:
    """Write `quantization_config` over whatever the source's config said of quantization.

    Raises:
        UsageError: the model is another one, whose readers would look for other names.
    """
    metadata = {"format": "pt"}
    if config is None:
        return Declared(None, metadata)
    if config.get("model_type") != MODEL:
        raise UsageError(
            "the container gpt-oss is for models of the type gpt_oss alone",
            hint="--container compressed-tensors has mxfp4 for other models",
        )
    said = {k: v for k, v in config.items() if k not in QUANTIZATION_KEYS}
    if any(item.scheme is not None for item in declarations):
        said["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": KEPT}
    return Declared(said, metadata)


GPT_OSS = Container(
    name="gpt-oss",
    bindings=BINDINGS,
    detect=detect,
    examine=examine,
    declare=declare,
    activations={"mxfp4": ("none",)},
    needs_config=True,
    stacks="only",
)
