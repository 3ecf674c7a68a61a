"""What consumers demand where scales of activations are declared to be stored."""

from collections.abc import Iterator, Mapping
from typing import Any

from lowbitcli.containers.modelopt_config import MIXED
from lowbitcli.plan.consumers import Found, Rule, Seen, many
from lowbitcli.plan.rules_config import CT, SERVERS, as_object, groups_of
from lowbitcli.tensors import DATA


def activations_of(seen: Seen) -> Iterator[tuple[str, str, str]]:
    """Yield (module, tensor that is due, what declares it) of weights whose activations are
    declared to be scaled by a number that is stored."""
    for module, weight in seen.quantized.items():
        scheme = weight.scheme.name if weight.scheme else ""
        for suffix, told in _due(seen, module, scheme):
            yield module, module + suffix, told


def _due(seen: Seen, module: str, scheme: str) -> Iterator[tuple[str, str]]:
    if seen.container == CT:
        for label, group in groups_of(seen):
            inputs = as_object(group.get("input_activations"))
            if not inputs or not _is_of(group, scheme):
                continue
            if scheme == "nvfp4" and inputs.get("num_bits") == 4:
                yield ".input_global_scale", f"config_groups.{label} declares 4-bit activations"
            elif inputs.get("dynamic") is False:
                yield ".input_scale", f"config_groups.{label} declares static activations"
            return
    elif seen.container == "modelopt":
        algorithm = _algorithm(seen, module)
        groups = as_object(seen.said.get("config_groups")).values()
        weight_only = bool(groups) and not any(
            as_object(g).get("input_activations") for g in groups
        )
        if algorithm == "FP8" or (algorithm == "NVFP4" and not weight_only):
            yield ".input_scale", f"quant_algo {algorithm} has static scales of activations"
    elif seen.container == "deepseek" and seen.said.get("activation_scheme") == "static":
        yield ".input_scale", "activation_scheme is static"


def _is_of(group: Mapping[str, Any], scheme: str) -> bool:
    """Are the weights of a group of this scheme? What groups share is their number of bits."""
    weights = as_object(group.get("weights"))
    kind = (weights.get("num_bits"), weights.get("strategy"))
    kinds = {
        "nvfp4": (4, "tensor_group"),
        "mxfp4": (4, "group"),
        "mxfp8": (8, "group"),
        "fp8_tensor": (8, "tensor"),
        "fp8_channel": (8, "channel"),
        "fp8_block128": (8, "block"),
    }
    return kinds.get(scheme) == kind


def _algorithm(seen: Seen, module: str) -> str:
    nested = as_object((seen.checkpoint.quant_config or {}).get("quantization"))
    said = seen.said if "quant_algo" in seen.said else nested
    said = said or as_object(seen.said.get("quantization"))
    algorithm = str(said.get("quant_algo")).upper()
    if algorithm == MIXED:
        layer = as_object(as_object(said.get("quantized_layers")).get(module))
        algorithm = str(layer.get("quant_algo")).upper()
    return algorithm


def weights_only(seen: Seen, _: str) -> Iterator[Found]:
    """TensorRT-LLM, `quant_config_utils.py`: it takes compressed-tensors' NVFP4 as W4A4
    alone, and no FP8 with static activations."""
    if seen.container != CT:
        return
    due = {module: tensor for module, tensor, _ in activations_of(seen)}
    for scheme, wrong, told in (
        ("nvfp4", False, "it takes NVFP4 with 4-bit activations alone, and none are declared"),
        ("fp8_tensor", True, "it takes no static scales of activations"),
    ):
        named = [m for m, w in seen.quantized.items() if w.scheme and w.scheme.name == scheme]
        hit = [module for module in named if (module in due) == wrong]
        if hit:
            yield Found(seen.data_of(min(hit)), f"{scheme}: {told} ({many(hit)})")


def no_activation_scale(seen: Seen, consumer: str) -> Iterator[Found]:
    """vLLM 0.33 and SGLang 0.5.23 make the parameter with torch.empty, and read it as it is."""
    missing: dict[str, list[str]] = {}
    for module, tensor, told in activations_of(seen):
        if not seen.has(tensor):
            missing.setdefault(told, []).append(module)
    for told, modules in missing.items():
        weight = seen.quantized[min(modules)]
        yield Found(
            weight.reads[DATA].spec.name,
            f"{told}, and {len(modules):,} modules have none stored: it computes with memory that "
            f"nothing was written to ({many(modules)})",
        )


ACTIVATION_RULES = (
    Rule(no_activation_scale, SERVERS),
    Rule(weights_only, ("tensorrt-llm",)),
)
