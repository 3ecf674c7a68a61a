"""How models stack their experts in one tensor, by model type: which axis is multiplied.

| layout | stored | as a stack of weights `[E, out, in]` |
|---|---|---|
| `out_in` | `[E, out, in]` | as it is |
| `in_out` | `[E, in, out]` | transposed |

Nothing is told from a shape: where both axes could be blocks, both look right. A stack of a model
that is not listed is kept, unless a recipe says how it lies. Gate and up rows of one expert may
follow each other or alternate: they stay in their order. Source: transformers 5.24,
`GptOssExperts`, `Llama4TextExperts`.
"""

import re
from collections.abc import Mapping
from typing import Any

from lowbitcli.containers.layouts import IDENTITY, TRANSPOSED, Layout

LAYOUTS: dict[str, Layout] = {"out_in": IDENTITY, "in_out": TRANSPOSED}

# The last components of the names of stacked experts.
EXPERTS = re.compile(r"(?:.*\.)?experts\.(?:gate_up_proj|down_proj|gate_proj|up_proj|w1|w2|w3)")

MODELS: dict[str, str] = {"gpt_oss": "in_out", "llama4": "in_out", "llama4_text": "in_out"}


def layout_of(name: str, config: Mapping[str, Any] | None) -> Layout | None:
    """Return how the stack of experts `name` lies in a model of this config.json; None where it is
    no stack of experts, or nothing says."""
    model = (config or {}).get("model_type")
    if model not in MODELS or not EXPERTS.fullmatch(name.removesuffix(".weight")):
        return None
    return LAYOUTS[MODELS[str(model)]]


def is_stack(name: str, dimensions: int) -> bool:
    """Does a name say that a tensor is a stack of experts?"""
    return dimensions == 3 and EXPERTS.fullmatch(name.removesuffix(".weight")) is not None
