"""What consumers demand of what is declared: containers, schemes and the fields of a config."""

from collections.abc import Iterator, Mapping
from typing import Any

from lowbitcli.containers.ct_config import model_dtype
from lowbitcli.containers.deepseek import RENAMED_BY_SGLANG
from lowbitcli.containers.modelopt_config import MIXED
from lowbitcli.containers.reading import READS, STRANGERS, UNTRIED, VERSIONS, Known, No
from lowbitcli.plan.consumers import WARN, Found, Rule, Seen, many
from lowbitcli.tensors import SCALE

SERVERS = ("vllm", "sglang", "tensorrt-llm")
HUB = (*SERVERS, "transformers")
CT = "compressed-tensors"
# compressed-tensors 0.20.1, `quantization/quant_args.py`: QuantizationArgs forbids any other.
ARGUMENTS = (
    *("num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic"),
    *("actorder", "scale_dtype", "zp_dtype", "observer", "observer_kwargs"),
)


def reads(seen: Seen, consumer: str) -> Iterator[Found]:
    """Schemes and containers that it cannot read: the tables of `reading`."""
    by_scheme: dict[str, list[str]] = {}
    for module, weight in seen.quantized.items():
        by_scheme.setdefault(weight.scheme.name if weight.scheme else "", []).append(module)
    table = READS[consumer].get(seen.container)
    if by_scheme and table is None:
        why = STRANGERS.get(seen.container) or f"it does not read the container {seen.container}"
        first = seen.data_of(min(seen.quantized))
        yield Found(first, why, WARN if seen.container in UNTRIED else "fail")
        return
    for scheme, modules in by_scheme.items():
        answer = (table or {}).get(scheme)
        experts = [name for name in modules if ".experts." in name]
        if answer is None:
            told = f"nobody tried {scheme} of {seen.container} there"
            yield Found(seen.data_of(min(modules)), told, WARN)
        elif isinstance(answer, Known):
            yield Found(seen.data_of(min(modules)), f"{scheme}: {answer.why}", WARN)
        elif isinstance(answer, No):
            others = [name for name in modules if ".experts." not in name]
            hit = {"all": modules, "dense": others, "experts": experts}[answer.where]
            if hit:
                told = f"{scheme} of {seen.container}: {answer.why} ({many(hit)})"
                yield Found(seen.data_of(min(hit)), told)


def integer_scales(seen: Seen, consumer: str) -> Iterator[Found]:
    """Scales of packed integers are kept in the model's dtype: vLLM 0.33 rounds F32 ones to it,
    SGLang 0.5.23 refuses them in copy_with_check."""
    wide = [
        weight.reads[SCALE].spec.name
        for weight in seen.quantized.values()
        if weight.scheme and weight.scheme.name == "int4_g128"
        if weight.reads[SCALE].spec.dtype == "F32"
    ]
    dtype = model_dtype(seen.config)
    if not wide or seen.container != CT or dtype not in ("BF16", "F16"):
        return
    told = {
        "vllm": "it rounds them, and codes are no longer the nearest",
        "sglang": "it refuses them, unless SGLANG_QUANT_ALLOW_DOWNCASTING is set",
    }
    message = f"{len(wide):,} scales of int4_g128 are F32, and the model is {dtype}"
    yield Found(min(wide), f"{message}: {told[consumer]}", WARN)


def has_config(seen: Seen, _: str) -> Iterator[Found]:
    """All of them but ComfyUI load a directory with a config.json."""
    stranger = seen.container in STRANGERS
    if seen.quantized and seen.checkpoint.config is None and not stranger:
        yield Found("", "there is no config.json, which says how the weights are quantized")


def status(seen: Seen, _: str) -> Iterator[Found]:
    """transformers 5.24: without the status it initialises quantized modules anew."""
    if seen.container == CT and seen.said.get("quantization_status") != "compressed":
        yield Found(
            "",
            "config.json: quantization_config has no quantization_status: compressed; it fills the "
            "weights with random numbers, and logits are NaN",
        )


def scale_dtype(seen: Seen, _: str) -> Iterator[Found]:
    """vLLM 0.33, compressed_tensors.py:492-512: MXFP8 is known by its scale_dtype alone."""
    if seen.container != CT:
        return
    for label, group in groups_of(seen):
        weights = as_object(group.get("weights"))
        said = (weights.get("num_bits"), weights.get("strategy"), weights.get("group_size"))
        is_mx = said == (8, "group", 32) and weights.get("type") == "float"
        if is_mx and weights.get("scale_dtype") != "torch.uint8":
            yield Found(
                "",
                f"config.json: config_groups.{label}.weights has no scale_dtype: torch.uint8; "
                "NotImplementedError: No compressed-tensors compatible scheme",
            )


def formats(seen: Seen, consumer: str) -> Iterator[Found]:
    """compressed-tensors 0.20.1: a format for all, or in a mixed checkpoint one for each group."""
    if seen.container != CT or not seen.quantized:
        return
    groups = list(groups_of(seen))
    without = [label for label, group in groups if not group.get("format")]
    top = seen.said.get("format")
    if not top and without:
        told = "config.json: quantization_config has no format"
        yield Found("", f"{told}; it cannot tell how weights are packed")
    elif top == "mixed-precision" and without:
        told = (
            f"config.json: format is mixed-precision, and these groups have none: {many(without)}"
        )
        yield Found("", told)
    for label, group in groups:
        said = group.get("format") or top
        wanted = _formats_of(as_object(group.get("weights")))
        if wanted and said and said != "mixed-precision" and said not in wanted:
            told = f"config.json: the format of config_groups.{label} is {many([str(said)])}, its "
            yield Found("", f"{told}weights are {wanted[0]}, and are read for what they are not")


def _formats_of(weights: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the formats that floats may lie in; integers may lie in several, and none is said."""
    bits, size = weights.get("num_bits"), weights.get("group_size")
    if weights.get("type") != "float":
        return ()
    if bits == 4:
        packed = {16: ("nvfp4-pack-quantized",), 32: ("mxfp4-pack-quantized",)}
        return packed.get(size, ()) if isinstance(size, int) else ()
    is_mx = weights.get("strategy") == "group" and size == 32
    plain = ("float-quantized", "naive-quantized")
    return ("mxfp8-quantized", *plain) if is_mx else plain


def arguments(seen: Seen, _: str) -> Iterator[Found]:
    """compressed-tensors 0.20.1: QuantizationArgs has extra=forbid."""
    if seen.container != CT:
        return
    for label, group in groups_of(seen):
        for key in ("weights", "input_activations", "output_activations"):
            unknown = as_object(group.get(key)).keys() - set(ARGUMENTS)
            if unknown:
                told = f"config.json: config_groups.{label}.{key} has {many(map(str, unknown))}"
                yield Found("", f"{told}; ValidationError: extra keys are forbidden")


def class_targets(seen: Seen, _: str) -> Iterator[Found]:
    """TensorRT-LLM, `quant_config_utils.py`: several groups need names or patterns as targets."""
    groups = list(groups_of(seen))
    if seen.container != CT or len(groups) < 2:
        return
    for label, group in groups:
        if "Linear" in (group.get("targets") or ()):
            told = f"config.json: config_groups.{label} targets Linear beside other groups"
            yield Found("", f"{told}; ValueError")


def activation_scheme(seen: Seen, _: str) -> Iterator[Found]:
    """vLLM 0.33 and SGLang 0.5.23, fp8.py from_config: the key is required."""
    if seen.container not in ("deepseek", "native-mxfp8"):
        return
    said = seen.said.get("activation_scheme")
    if said is None:
        yield Found(
            "",
            "config.json: quantization_config has no activation_scheme; ValueError: Cannot find "
            "any of ['activation_scheme']",
        )
    elif said != "dynamic" and seen.said.get("weight_block_size"):
        told = (
            f"config.json: activation_scheme {said!r} with weight_block_size; blocks need dynamic"
        )
        yield Found("", told)


def scale_format(seen: Seen, _: str) -> Iterator[Found]:
    """transformers 5.24, finegrained_fp8.py:1158: bytes are exponents where scale_fmt says so."""
    if seen.container == "native-mxfp8" and seen.said.get("scale_fmt") != "ue8m0":
        yield Found("", "config.json: quantization_config has no scale_fmt: ue8m0")


def renamed(seen: Seen, _: str) -> Iterator[Found]:
    """SGLang 0.5.23, models/llama.py:723: weight_scale_inv becomes weight_scale, which no layer
    has."""
    if seen.container not in ("deepseek", "native-mxfp8"):
        return
    if seen.architecture.startswith(RENAMED_BY_SGLANG) and seen.quantized:
        scales = [name for name in seen.checkpoint.tensors if name.endswith(".weight_scale_inv")]
        if scales:
            yield Found(
                scales[0],
                f"its loader of {seen.architecture} renames weight_scale_inv and drops all "
                f"{len(scales):,}: weights are served without their scales; write fp8_block128 in "
                "compressed-tensors",
            )


def one_scale(seen: Seen, _: str) -> Iterator[Found]:
    """vLLM 0.33, fp8.py: without blocks the scale is called weight_scale."""
    if seen.container == "deepseek" and not seen.said.get("weight_block_size"):
        wrong = [name for name in seen.checkpoint.tensors if name.endswith(".weight_scale_inv")]
        if wrong:
            yield Found(wrong[0], "without weight_block_size it looks for weight_scale instead")


def both_files(seen: Seen, consumer: str) -> Iterator[Found]:
    """TensorRT-LLM takes hf_quant_config.json for what counts; vLLM (modelopt.py:817, 1268) wants
    its keys to be there."""
    if seen.container != "modelopt":
        return
    nested = as_object((seen.checkpoint.quant_config or {}).get("quantization"))
    if consumer == "tensorrt-llm":
        if seen.checkpoint.quant_config is None:
            yield Found("", "there is no hf_quant_config.json, which it takes for what counts")
        return
    if seen.said or not nested:
        return
    wanted = {"kv_cache_quant_algo", "exclude_modules"}
    algorithm = str(nested.get("quant_algo")).upper()
    if "NVFP4" in algorithm:
        wanted.add("group_size")
    missing = wanted - nested.keys()
    if missing and algorithm != MIXED:
        yield Found("", f"hf_quant_config.json has no {many(missing)}; ValueError")


def same_lists(seen: Seen, _: str) -> Iterator[Found]:
    """The two files of ModelOpt are read by different programs, and must say the same."""
    nested = as_object((seen.checkpoint.quant_config or {}).get("quantization"))
    flat = seen.said.get("ignore")
    if seen.container != "modelopt" or not isinstance(flat, list) or not nested:
        return
    other = nested.get("exclude_modules")
    if isinstance(other, list) and set(map(str, flat)) != set(map(str, other)):
        differ = set(map(str, flat)) ^ set(map(str, other))
        told = f"config.json and hf_quant_config.json exclude different modules: {many(differ)}"
        yield Found("", told, WARN)


def groups_of(seen: Seen) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for label, group in as_object(seen.said.get("config_groups")).items():
        if isinstance(group, dict):
            yield str(label), group


def as_object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


CONFIG_RULES = (
    Rule(reads, tuple(VERSIONS)),
    Rule(integer_scales, ("vllm", "sglang")),
    Rule(has_config, HUB),
    Rule(status, ("transformers",)),
    Rule(scale_dtype, ("vllm",)),
    Rule(formats, ("vllm", "sglang", "transformers")),
    Rule(arguments, ("vllm", "sglang", "transformers")),
    Rule(class_targets, ("tensorrt-llm",)),
    Rule(activation_scheme, ("vllm", "sglang")),
    Rule(scale_format, ("transformers",)),
    Rule(renamed, ("sglang",)),
    Rule(one_scale, ("vllm", "sglang")),
    Rule(both_files, ("vllm", "tensorrt-llm")),
    Rule(same_lists, ("vllm", "tensorrt-llm")),
)
