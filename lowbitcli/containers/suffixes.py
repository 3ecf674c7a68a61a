"""Endings of tensor names that mean the same in every ecosystem: scales of activations, and parts
that no container here understands.
"""

from lowbitcli.containers.container import Examination, Finding, Listing
from lowbitcli.containers.plain import QUANTIZED_SUFFIXES

ACTIVATIONS = {
    ".input_scale": "scale of static activations",
    ".input_global_scale": "global scale of activations",
    ".activation_scale": "scale of static activations",
    ".output_scale": "scale of outputs",
    ".k_scale": "scale of the key cache",
    ".v_scale": "scale of the value cache",
    ".kv_scale": "scale of the cache",
    ".q_scale": "scale of queries",
    ".scale_input": "scale of static activations",
}
UNREAD = {
    ".weight_zero_point": "a zero point: asymmetric weights are not read",
    ".weight_g_idx": "an activation order: reordered groups are not read",
    ".pre_quant_scale": "a scale of the inputs that was folded out of the weight",
    ".hadamard_transform": "a rotation of the weight, which is not undone",
}


def activations(listing: Listing) -> dict[str, str]:
    """Return the tensors that only scale activations, each with what it is."""
    return _ending(listing, ACTIVATIONS)


def unread(listing: Listing) -> list[Finding]:
    """Return a finding for each tensor without which a weight would be read wrong."""
    return [Finding("unknown", name, why) for name, why in _ending(listing, UNREAD).items()]


def foreign(listing: Listing, found: Examination) -> list[Finding]:
    """Return a finding for each part of a quantized weight that the checkpoint's container made
    nothing of: vLLM refuses such a name, and whoever reads it reads another weight."""
    known = {name for weight in found.weights.values() for name in weight.parts.values()}
    known |= {finding.tensor for finding in found.findings} | found.markers | set(found.activations)
    told = {finding.tensor.rpartition(".")[0] for finding in found.findings}
    stems = {name.removesuffix(".weight") for name in found.weights}
    beside = (".scale", *UNREAD)  # of a weight that is not quantized, these may be anything
    return [
        Finding("orphan", name, "a part of a quantized weight, but not as this container has them")
        for name in listing.tensors
        if name not in known
        and name.rpartition(".")[0] not in told
        and (
            name.endswith(QUANTIZED_SUFFIXES)
            or (name.endswith(beside) and name.rpartition(".")[0] in stems)
        )
    ]


def _ending(listing: Listing, table: dict[str, str]) -> dict[str, str]:
    endings = tuple(table)
    return {
        name: next(why for suffix, why in table.items() if name.endswith(suffix))
        for name in listing.tensors
        if name.endswith(endings)
    }
