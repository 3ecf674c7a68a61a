"""Is every layer there that config.json counts?

    num_hidden_layers, of the config or its text_config      model.layers.N.*, N from 0

Asked of models that number one list of layers as `layers.N`: encoders beside decoders, towers of
images and sounds have counts of their own. That one tensor of a layer is gone, nothing here can
say: `--against` can.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from lowbitcli.tensors import safe
from lowbitcli.verify.nouns import WARN, Problem, Step

_LAYER = re.compile(r"((?:\w+\.)*layers)\.(\d{1,6})\.")
_OTHERS = re.compile(r"vision|visual|audio|encoder|decoder|image|speech|mtp|talker|vocoder")
NAMED = 5  # layers that are told


def layers(config: Mapping[str, Any] | None, names: Iterable[str]) -> Step:
    """Warn of layers that the config counts and of which no tensor is there."""
    what = "layers that config.json counts are there"
    count = _count(config or {})
    if count is None:
        return Step(what, skipped="no config counts them")
    found: dict[str, set[int]] = {}
    for name in names:
        layer = _LAYER.match(name)
        if layer is not None and _OTHERS.search(layer[1]) is None:
            found.setdefault(layer[1], set()).add(int(layer[2]))
    if len(found) != 1:
        return Step(what, skipped="no list of layers, or several")
    ((stem, numbers),) = found.items()
    gone = [number for number in range(count) if number not in numbers]
    if not gone:
        return Step(what, count)
    told = ", ".join(map(str, gone[:NAMED])) + (", ..." if len(gone) > NAMED else "")
    message = f"config.json counts {count:,} layers, and of {len(gone):,} of {safe(stem)} "
    message += f"nothing is there: {told}"
    return Step(what, count, (Problem("missing", "", message, severity=WARN),))


def _count(config: Mapping[str, Any]) -> int | None:
    text = config.get("text_config")
    for said in (config, text if isinstance(text, Mapping) else {}):
        count = said.get("num_hidden_layers")
        if isinstance(count, int) and not isinstance(count, bool) and 0 < count < 100_000:
            return count
    return None
