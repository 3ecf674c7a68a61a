"""How near to its code an element must be: what is known of the writer says it."""

from collections import Counter

from lowbitcli.checkpoint.made import Made
from lowbitcli.checkpoint.manifest import Manifest
from lowbitcli.verify.bound import BF16_WRITER, FP32_WRITER, RESCALED_WRITER, is_exact
from lowbitcli.verify.mend_scales import RESCALED
from lowbitcli.verify.rows import Rows

# ModelOpt 0.47 divides by a scalar, which leaves the quotient in the weight's dtype.
DIVIDED_IN_BF16 = (("modelopt", "fp8_tensor"),)
HOW_NEAR = {
    None: "exactly",
    FP32_WRITER: "to 2^-21",
    BF16_WRITER: "to 2^-7",
    RESCALED_WRITER: "to 2^-4",
}


def widening(ours: Rows, dtype: str, manifest: Manifest | None, container: str) -> float | None:
    """Return how far an element may lie outside; None where its code is known exactly.

    `dtype` is that of the source, `container` that of the output.

    Raises:
        UnreadableError: the scales cannot be read.
    """
    scheme, name = ours.weight.scheme, ours.weight.name
    made = (manifest.made if manifest is not None else None) or Made()
    rescaled = manifest.recipe.get(RESCALED) if manifest is not None else None
    if isinstance(rescaled, list) and name in rescaled:
        return RESCALED_WRITER
    rule = made.rounded.get(name)
    if rule is not None and scheme is not None:
        return None if is_exact(scheme, (rule,)) else FP32_WRITER
    in_bf16 = ours.is_from_bf16 or (
        manifest is None
        and scheme is not None
        and (container, scheme.name) in DIVIDED_IN_BF16
        and dtype in ("BF16", "F16")
    )
    return BF16_WRITER if in_bf16 else FP32_WRITER


def told(widenings: Counter[float | None], again: int = 0) -> str:
    """Return how many weights were held to their codes how exactly, and how many were quantized
    `again`."""
    found = sorted(widenings.items(), key=lambda item: item[0] or 0.0)
    text = ", ".join(f"{count:,} {HOW_NEAR.get(one, f'to {one}')}" for one, count in found)
    return f"{text}; {again:,} quantized again, some rows of each run" if again else text
