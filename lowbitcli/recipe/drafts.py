"""Layers that predict further tokens and stand behind the model's own, numbered on: DeepSeek-V3's
`model.layers.61`, where config.json says 61 `num_hidden_layers` and one of the keys below.

Source: transformers 5.24, `configuration_*.py` and `_keys_to_ignore_on_load_unexpected` of
`modeling_*.py`; vLLM 0.33, `config/speculative.py`.
"""

import re
from collections.abc import Mapping
from typing import Any

KIND = "mtp"  # of configs/defaults.yaml
KEYS = (
    "num_nextn_predict_layers",
    "num_mtp_layers",
    "mtp_num_hidden_layers",
    "mtp_num_layers",
)
LAYER = re.compile(r"(?:(?:model|language_model)\.)*layers\.(\d+)\.")


def first_draft(config: Mapping[str, Any] | None) -> int | None:
    """Return the number of the first layer behind the model's own, None where a config tells of
    none."""
    for said in (config or {}, (config or {}).get("text_config")):
        if not isinstance(said, Mapping):
            continue
        layers = said.get("num_hidden_layers")
        if _is_some(layers) and any(_is_some(said.get(key)) for key in KEYS):
            return layers
    return None


def is_draft(name: str, first: int) -> bool:
    """Is this a tensor of a layer from `first` on?"""
    found = LAYER.match(name)
    return found is not None and len(found[1]) < 10 and int(found[1]) >= first


def _is_some(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
