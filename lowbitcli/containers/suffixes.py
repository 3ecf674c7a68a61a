"""Endings of tensor names that mean the same in every ecosystem: scales of activations, and parts
that no container here understands.
"""

from lowbitcli.containers.container import Finding, Listing

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


def _ending(listing: Listing, table: dict[str, str]) -> dict[str, str]:
    endings = tuple(table)
    return {
        name: next(why for suffix, why in table.items() if name.endswith(suffix))
        for name in listing.tensors
        if name.endswith(endings)
    }
