"""What consumers demand of the shapes and dtypes of scales, and of blocks of merged columns."""

from collections.abc import Iterator

from lowbitcli.plan.consumers import Found, Rule, Seen, many
from lowbitcli.plan.rules_config import CT
from lowbitcli.tensors import DATA, SCALE, safe

BLOCK = 128


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


SHAPE_RULES = (
    Rule(shapes, ("vllm", "sglang")),
    Rule(e8m0, ("vllm", "sglang", "tensorrt-llm", "transformers", "comfyui")),
    Rule(stored_twice, ("vllm",)),
    Rule(ragged_columns, ("vllm",)),
    Rule(ragged_blocks, ("transformers",)),
)
