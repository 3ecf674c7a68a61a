"""What consumers demand of the numbers of scales: one for what they serve as one matrix, with what
they make of it where it is not one."""

from collections.abc import Iterator, Mapping

import torch

from lowbitcli.pipeline.read import tensor_of
from lowbitcli.plan.consumers import WARN, Found, Rule, Seen
from lowbitcli.plan.rules_config import CT
from lowbitcli.plan.source import SourceWeight
from lowbitcli.tensors import GLOBAL_SCALE, SCALE, safe


def number(seen: Seen, name: str) -> float:
    """Return the one number of a small stored tensor.

    Raises:
        CheckpointError: it cannot be read.
    """
    spec = seen.checkpoint.tensors[name].spec
    return float(tensor_of(seen.checkpoint.read(name), spec).float().reshape(-1)[0])


def global_scales(seen: Seen, consumer: str) -> Iterator[Found]:
    """NVFP4's global scale, one for q/k/v and gate/up. vLLM 0.33 (compressed_tensors_w4a4_nvfp4.py
    :111, modelopt.py:2093) and SGLang 0.5.23 take the largest that is stored for all and leave the
    scales of blocks; of experts vLLM takes w1's. TensorRT-LLM asserts that they are equal."""
    if seen.container not in (CT, "modelopt"):
        return
    for group in seen.groups:
        members = [(name, seen.quantized[name]) for name in group if name in seen.quantized]
        members = [(name, w) for name, w in members if GLOBAL_SCALE in w.reads]
        stored = {name: number(seen, w.reads[GLOBAL_SCALE].spec.name) for name, w in members}
        if len(set(stored.values())) < 2:
            continue
        first = members[0][1].reads[GLOBAL_SCALE].spec.name
        listed = ", ".join(f"{safe(name)} {value:.6g}" for name, value in stored.items())
        if consumer == "tensorrt-llm":
            if seen.container == "modelopt":
                yield Found(first, f"global scales differ in a group: AssertionError ({listed})")
            continue
        used = _used(seen, consumer, stored)
        factors = ", ".join(
            f"{safe(name)} x {_factor(seen, used, value):.6g}" for name, value in stored.items()
        )
        yield Found(
            first,
            f"global scales differ in a group that is served as one matrix ({listed}): it takes "
            f"{used:.6g} for all, and weights come out wrong by {factors}",
        )


def _used(seen: Seen, consumer: str, stored: Mapping[str, float]) -> float:
    """Return the stored number that is used for all."""
    gates = [name for name in stored if ".experts." in name and name.endswith(("gate_proj", "w1"))]
    return stored[gates[0]] if gates and consumer == "vllm" else max(stored.values())


def _factor(seen: Seen, used: float, own: float) -> float:
    """Return what a member's weights are multiplied with: compressed-tensors stores a divisor."""
    return own / used if seen.container == CT else used / own


def input_scales(seen: Seen, consumer: str) -> Iterator[Found]:
    """Scales of activations of a group: the same rule, and only a loss of range where it is
    broken."""
    for suffix in (".input_global_scale", ".input_scale"):
        for group in seen.groups:
            names = [name + suffix for name in group if seen.has(name + suffix)]
            stored = {name: number(seen, name) for name in names}
            if len(set(stored.values())) < 2:
                continue
            listed = ", ".join(f"{safe(name)} {value:.6g}" for name, value in stored.items())
            fails = consumer == "tensorrt-llm" and seen.container == "modelopt"
            what = "AssertionError" if fails else "it takes the largest for all"
            told = f"scales of activations differ in a group: {what} ({listed})"
            yield Found(names[0], told, "fail" if fails else WARN)


def tensor_scales(seen: Seen, _: str) -> Iterator[Found]:
    """FP8 with one scale: vLLM 0.33 and SGLang 0.5.23 requantize a group to its largest; seen on an
    H200: error 0.023 against 0.0017."""
    for group in seen.groups:
        members = [(name, seen.quantized[name]) for name in group if name in seen.quantized]
        members = [(n, w) for n, w in members if w.scheme and w.scheme.name == "fp8_tensor"]
        stored = {name: number(seen, w.reads[SCALE].spec.name) for name, w in members}
        if len(set(stored.values())) < 2:
            continue
        largest = max(stored.values())
        told = ", ".join(
            f"{safe(name)} to {value / largest:.3g} of its range" for name, value in stored.items()
        )
        first = members[0][1].reads[SCALE].spec.name
        message = f"scales differ in a group: it requantizes all to {largest:.6g} ({told})"
        yield Found(first, message, WARN)


def deep_gemm(seen: Seen, _: str) -> Iterator[Found]:
    """vLLM 0.33 with DeepGEMM takes scales of blocks that are powers of two, and rounds others:
    seen on an H200, error 0.027."""
    blocked = [w for w in seen.quantized.values() if w.scheme and w.scheme.name == "fp8_block128"]
    if blocked and seen.container in (CT, "deepseek", "modelopt") and not _is_power(seen, blocked):
        yield Found(
            blocked[0].reads[SCALE].spec.name,
            "scales of 128 x 128 blocks are no powers of two: where it uses DeepGEMM it rounds "
            "them and requantizes",
            WARN,
        )


def _is_power(seen: Seen, weights: list[SourceWeight]) -> bool:
    """Are the scales of the first weight powers of two? One tells: a writer has one rule."""
    spec = weights[0].reads[SCALE].spec
    scale = tensor_of(seen.checkpoint.read(spec.name), spec)
    if spec.dtype == "F8_E8M0":
        return True
    return bool(torch.frexp(scale.float()).mantissa.eq(0.5).all())


SCALE_RULES = (
    Rule(global_scales, ("vllm", "sglang", "tensorrt-llm")),
    Rule(input_scales, ("vllm", "sglang", "tensorrt-llm")),
    Rule(tensor_scales, ("vllm", "sglang")),
    Rule(deep_gemm, ("vllm",)),
)
