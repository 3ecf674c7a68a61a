"""What consumers demand of scales: their shapes and dtypes, blocks of merged columns, and one scale
for what they serve as one matrix, with what they make of the numbers where it is not one."""

from collections.abc import Iterator, Mapping

import torch

from lowbitcli.pipeline.read import tensor_of
from lowbitcli.plan.consumers import WARN, Found, Rule, Seen, many
from lowbitcli.plan.rules_config import CT
from lowbitcli.plan.source import SourceWeight
from lowbitcli.tensors import DATA, GLOBAL_SCALE, SCALE, safe

BLOCK = 128


def number(seen: Seen, name: str) -> float:
    """Return the one number of a small stored tensor.

    Raises:
        CheckpointError: it cannot be read.
    """
    spec = seen.checkpoint.tensors[name].spec
    return float(tensor_of(seen.checkpoint.read(name), spec).float().reshape(-1)[0])


def shapes(seen: Seen, consumer: str) -> Iterator[Found]:
    """Scales for rows and blocks in the shape of another container: vLLM 0.33 and SGLang 0.5.23
    assert [o, 1] in compressed-tensors, vLLM [o] and [o/128, 1, i/128, 1] in ModelOpt's."""
    if seen.container not in (CT, "modelopt"):
        return
    for finding in seen.source.findings:
        stored = seen.checkpoint.tensors.get(finding.tensor)
        if finding.kind != "mismatch" or stored is None or not finding.tensor.endswith("_scale"):
            continue
        stem = finding.tensor.removesuffix("_scale")
        data = seen.checkpoint.tensors.get(stem)
        if data is None or data.spec.dtype != "F8_E4M3" or len(data.spec.shape) != 2:
            continue
        rows, shape = data.spec.shape[0], stored.spec.shape
        told = f"the scale is stored as {list(shape)}"
        if seen.container == CT and shape == (rows,):
            yield Found(finding.tensor, f"{told}, [{rows}, 1] is asserted")
        elif seen.container == "modelopt" and shape == (rows, 1) and consumer == "vllm":
            yield Found(finding.tensor, f"{told}, [{rows}] is asserted")
        elif seen.container == "modelopt" and len(shape) == 2 and consumer == "vllm":
            yield Found(finding.tensor, f"{told}, four dimensions are asserted")


def e8m0(seen: Seen, consumer: str) -> Iterator[Found]:
    """F8_E8M0 where U8 is read: vLLM 0.33 copies by value, so that scales below 1 become 0; SGLang
    0.5.23 raises in copy_with_check; ComfyUI has no such dtype in _TYPES."""
    told = {
        "vllm": "it copies them by value into bytes: scales below 1 become 0, and so do weights",
        "sglang": "ValueError in copy_with_check",
        "comfyui": "KeyError: 'F8_E8M0'",
        "transformers": "it copies them by value into bytes: relative error 1",
        "tensorrt-llm": "bytes are expected",
    }
    if seen.container not in (CT, "modelopt", "native-mxfp8", "comfyui"):
        return
    wrong = [
        weight.reads[SCALE].spec.name
        for weight in seen.quantized.values()
        if weight.reads[SCALE].spec.dtype == "F8_E8M0"
    ]
    if wrong:
        message = f"{len(wrong):,} scales are stored as F8_E8M0, U8 is read: {told[consumer]}"
        yield Found(min(wrong), message)


def stored_twice(seen: Seen, _: str) -> Iterator[Found]:
    """An aliased scale: vLLM 0.33 refuses any tensor that no parameter has."""
    for name in seen.checkpoint.tensors:
        if name.endswith(".weight_scale_inv"):
            other = name.removesuffix("_inv")
            if seen.has(other):
                told = f"a scale is stored twice, also as {safe(other)}"
                yield Found(name, f"{told}: ValueError: There is no module or parameter named so")


def ragged_columns(seen: Seen, _: str) -> Iterator[Found]:
    """vLLM 0.33, fp8_utils.py:1296-1345: in merged columns every shard but the last has whole
    blocks of 128 rows."""
    if seen.container not in (CT, "deepseek"):
        return
    for group in seen.groups:
        members = [seen.quantized[name] for name in group if name in seen.quantized]
        blocked = [w for w in members if w.scheme and w.scheme.name == "fp8_block128"]
        ragged = [w for w in blocked if w.shape[-2] % BLOCK]
        last = _last(group)
        hit = [w for w in ragged if w.name.removesuffix(".weight") != last]
        if hit and len(blocked) > 1:
            told = f"{hit[0].shape[-2]} rows are no multiple of {BLOCK}, and {many(group)} are "
            yield Found(hit[0].reads[DATA].spec.name, f"{told}merged columns: ValueError")


def _last(group: list[str]) -> str:
    """Return the member that is put last when they are merged: v of q, k, v and up of gate, up."""
    order = ("v_proj", "value", "wv", "up_proj", "w3", "kv_a_proj_with_mqa")
    return next((name for name in group if name.rpartition(".")[2] in order), group[-1])


def ragged_blocks(seen: Seen, _: str) -> Iterator[Found]:
    """transformers 5.24, finegrained_fp8.py:1130-1165: it takes rows / rows of scales for the
    height of a block."""
    if seen.container != "deepseek":
        return
    for weight in seen.quantized.values():
        if weight.scheme is None or weight.scheme.name != "fp8_block128":
            continue
        rows, cols = weight.shape[-2:]
        if rows % BLOCK or cols % BLOCK:
            high, wide = -(-rows // BLOCK), -(-cols // BLOCK)
            exact = rows % high == 0 and cols % wide == 0
            what = f"it takes blocks for {rows // high} x {cols // wide}: read wrong, silently"
            yield Found(
                weight.reads[DATA].spec.name,
                f"[{rows}, {cols}] is no multiple of {BLOCK}: {what if exact else 'ValueError'}",
            )


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
    Rule(shapes, ("vllm", "sglang")),
    Rule(e8m0, ("vllm", "sglang", "tensorrt-llm", "transformers", "comfyui")),
    Rule(stored_twice, ("vllm",)),
    Rule(ragged_columns, ("vllm",)),
    Rule(ragged_blocks, ("transformers",)),
    Rule(global_scales, ("vllm", "sglang", "tensorrt-llm")),
    Rule(input_scales, ("vllm", "sglang", "tensorrt-llm")),
    Rule(tensor_scales, ("vllm", "sglang")),
    Rule(deep_gemm, ("vllm",)),
)
