"""What a consumer would not load, or would make other numbers of: a fault for each rule and each
consumer that it holds for."""

import torch

from tests.checkpoints import LAYER, weight
from tests.verify.bench import Bench, Fault, json_of
from tests.verify.faults_containers import declared
from tests.verify.faults_numbers import K
from tests.verify.faults_structure import edited
from tests.verify.planted import DOWN, EMBED, change, model

CT = "compressed-tensors"
SERVERS = ("vllm", "sglang", "tensorrt-llm")
HUB = (*SERVERS, "transformers")
HEAD, EXTRA = "lm_head.weight", f"{LAYER}mlp.extra_proj"
MISSPELT = EXTRA.replace("extra", "exta")
SPLIT = 'rules: [{match: "*.mlp.*", scheme: nvfp4}, {match: "*", scheme: fp8_channel}]\n'
QUANTIZE = 'rules: [{{match: "*", scheme: fp8_block128}}]\nquantize: [{}]\n'
STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
W4A4 = {"num_bits": 4, "type": "float", "dynamic": "local"}


def group(key: str, value):
    """Return an edit of the first group of a config: of `weights.x` in its weights; None takes it
    away."""

    def edit(said):
        inside = said["config_groups"]["group_0"]
        *path, last = key.split(".")
        for step in path:
            inside = inside[step]
        inside.pop(last) if value is None else inside.update({last: value})

    return edit


def both(*edits):
    return lambda said: [edit(said) for edit in edits]


def drop(*keys: str):
    return lambda said: [said.pop(key) for key in keys]


def mixed(edit):
    """Return how to change the config of a checkpoint of two schemes."""
    return lambda bench: bench.config(bench.made(model(), recipe=SPLIT), edit)


def with_plain(scheme: str = "nvfp4", container: str = CT, name: str = EXTRA, ignored=()):
    """Return how to add a matrix that is not quantized, and names to those that are ignored."""

    def plant(bench: Bench):
        output = bench.out(scheme, container)
        change(output, lambda tensors: tensors.update({f"{name}.weight": weight(64, 64)}))
        return bench.config(output, lambda said: ignore(said, *ignored))

    return plant


def ignore(said, *names) -> None:
    for key in ("ignore", "modules_to_not_convert", "ignored_layers"):
        if key in said:
            said[key].extend(names)


def ignoring(*names, scheme: str = "nvfp4", container: str = CT):
    return declared(lambda said: ignore(said, *names), scheme, container)


def quantized(kind: str, name: str, container: str):
    """Return how to quantize a head or an embedding."""

    def plant(bench: Bench):
        tensors = {DOWN + "weight": weight(128, 128), name: weight(256, 128)}
        return bench.made(tensors, container=container, recipe=QUANTIZE.format(kind))

    return plant


def without(file: str, scheme: str = "nvfp4", container: str = CT):
    def plant(bench: Bench):
        output = bench.out(scheme, container)
        (output / file).unlink()
        return output

    return plant


def modelopt_keys(bench: Bench):
    """Leave hf_quant_config.json alone, without a key."""
    output = bench.out("nvfp4", "modelopt")
    json_of(output / "config.json", lambda said: said.pop("quantization_config"))
    return bench.config(output, drop("exclude_modules"), "hf_quant_config.json")


def modelopt_lists(bench: Bench):
    output = bench.out("nvfp4", "modelopt")
    return bench.config(output, lambda said: said["exclude_modules"].pop(), "hf_quant_config.json")


def half_a_group(bench: Bench):
    output = bench.out("nvfp4")

    def unquantize(tensors):
        for suffix in ("weight_packed", "weight_scale", "weight_global_scale"):
            tensors.pop(K + suffix)
        tensors[K + "weight"] = weight(64, 64)

    change(output, unquantize)
    return bench.config(output, lambda said: ignore(said, K[:-1]))


def wide_integers(bench: Bench):
    """Scales of packed integers in F32, and a model in BF16."""
    edit = lambda x: x.update(  # noqa: E731
        {name: t.float() for name, t in x.items() if name.endswith(".weight_scale")}
    )
    output = bench.golden("compressed-tensors/pack-int4", edit)
    json_of(output / "config.json", lambda said: said.update(torch_dtype="bfloat16"))
    return output


def renamed(bench: Bench):
    output = bench.out("nvfp4")
    (output / "model.safetensors").rename(output / "weights.safetensors")
    return output


def one_scale(bench: Bench):
    output = bench.out("fp8_block128", "deepseek")

    def whole(tensors):
        for name in list(tensors):
            if name.endswith(".weight_scale_inv"):
                tensors[name] = torch.ones(1)

    change(output, whole)
    return bench.config(output, drop("weight_block_size"))


NO_GROUP = "it takes NVFP4 with 4-bit activations alone, and none are declared"
WRITTEN = "it computes with memory that nothing was written to"
CONSUMERS = [
    Fault("rules_config.reads", "a container that it does not know",
          "it does not know lowbit's own container: write one of its own with --container",
          edited(None), consumers=HUB),
    Fault("rules_config.reads", "a container that it does not know",
          "it does not read the container compressed-tensors",
          edited(None, container=CT), consumers=("comfyui",)),
    Fault("rules_config.reads#2", "a scheme that nobody tried",
          "nobody tried int8_channel of compressed-tensors there",
          edited(None, "int8_channel", CT), consumers=("tensorrt-llm",), severity="warn"),
    Fault("rules_config.reads#3", "a scheme that is read as another one",
          "mxfp4: it reads it as weight-only W4A16_MXFP4",
          edited(None, "mxfp4", CT), consumers=("tensorrt-llm",), severity="warn"),
    Fault("rules_config.reads#4", "a scheme that is not read",
          "NotImplementedError: No compressed-tensors compatible scheme",
          edited(None, "mxfp8", CT), consumers=("sglang",)),
    Fault("rules_config.integer_scales", "scales of integers in F32",
          "it rounds them, and codes are no longer the nearest",
          wide_integers, consumers=("vllm",), severity="warn"),
    Fault("rules_config.integer_scales", "scales of integers in F32",
          "it refuses them, unless SGLANG_QUANT_ALLOW_DOWNCASTING is set",
          wide_integers, consumers=("sglang",), severity="warn"),
    Fault("rules_config.has_config", "a checkpoint without a config.json",
          "there is no config.json, which says how the weights are quantized",
          without("config.json", container="modelopt"), consumers=HUB),
    Fault("rules_config.status", "no quantization_status",
          "has no quantization_status: compressed; it fills the weights with random numbers",
          declared(drop("quantization_status")), consumers=("transformers",)),
    Fault("rules_config.scale_dtype", "MXFP8 without a scale_dtype",
          "has no scale_dtype: torch.uint8; NotImplementedError",
          declared(group("weights.scale_dtype", None), "mxfp8"), consumers=("vllm",)),
    Fault("rules_config.formats", "no format",
          "quantization_config has no format; it cannot tell how weights are packed",
          declared(both(drop("format"), group("format", None))),
          consumers=("vllm", "sglang", "transformers")),
    Fault("rules_config.formats#2", "a mixed checkpoint whose groups have no format",
          "format is mixed-precision, and these groups have none: group_0",
          mixed(group("format", None)), consumers=("vllm", "sglang", "transformers")),
    Fault("rules_config.formats#3", "the format of other codes",
          "the format of config_groups.group_0 is mxfp4-pack-quantized, its weights are nvfp4-pack",
          declared(both(group("format", "mxfp4-pack-quantized"),
                        lambda said: said.update(format="mxfp4-pack-quantized"))),
          consumers=("vllm", "sglang", "transformers")),
    Fault("rules_config.arguments", "a key too many",
          "config_groups.group_0.weights has magic; ValidationError: extra keys are forbidden",
          declared(group("weights.magic", 1)), consumers=("vllm", "sglang", "transformers")),
    Fault("rules_config.class_targets", "a class beside named targets",
          "config_groups.group_0 targets Linear beside other groups; ValueError",
          mixed(group("targets", ["Linear"])), consumers=("tensorrt-llm",)),
    Fault("rules_config.activation_scheme", "no activation_scheme",
          "quantization_config has no activation_scheme; ValueError: Cannot find",
          declared(drop("activation_scheme"), "fp8_block128", "deepseek"),
          consumers=("vllm", "sglang")),
    Fault("rules_config.activation_scheme#2", "static activations of blocks",
          "activation_scheme 'static' with weight_block_size; blocks need dynamic",
          declared(lambda said: said.update(activation_scheme="static"), "fp8_block128",
                   "deepseek"), consumers=("vllm", "sglang")),
    Fault("rules_config.scale_format", "no scale_fmt",
          "quantization_config has no scale_fmt: ue8m0",
          declared(drop("scale_fmt"), "mxfp8", "native-mxfp8"), consumers=("transformers",)),
    Fault("rules_config.renamed", "a scale that its loader renames",
          "renames weight_scale_inv and drops all 7: weights are served without their scales",
          edited(None, "fp8_block128", "deepseek"), consumers=("sglang",)),
    Fault("rules_files.named_files", "a file by a name of its own, in a directory",
          "neither model.safetensors nor model.safetensors.index.json is there: OSError",
          renamed, consumers=("transformers",)),
    Fault("rules_config.one_scale", "one scale for all under the name of blocks'",
          "without weight_block_size it looks for weight_scale instead",
          one_scale, consumers=("vllm", "sglang")),
    Fault("rules_config.both_files", "no hf_quant_config.json",
          "there is no hf_quant_config.json, which it takes for what counts",
          without("hf_quant_config.json", container="modelopt"), consumers=("tensorrt-llm",)),
    Fault("rules_config.both_files#2", "hf_quant_config.json without a key",
          "hf_quant_config.json has no exclude_modules; ValueError",
          modelopt_keys, consumers=("vllm",)),
    Fault("rules_config.same_lists", "two lists of excluded modules that differ",
          "config.json and hf_quant_config.json exclude different modules",
          modelopt_lists, consumers=("vllm", "tensorrt-llm"), severity="warn"),
    Fault("rules_activations.no_activation_scale", "4-bit activations without their scales",
          "declares 4-bit activations, and 7 modules have none stored: " + WRITTEN,
          declared(group("input_activations", W4A4)), consumers=SERVERS),
    Fault("rules_activations.weights_only", "NVFP4 for weights alone", NO_GROUP,
          edited(None, container=CT), consumers=("tensorrt-llm",)),
    Fault("rules_activations.weights_only", "static activations of FP8",
          "it takes no static scales of activations",
          declared(group("input_activations", STATIC), "fp8_tensor"),
          consumers=("tensorrt-llm",)),
    Fault("rules_names.dialect", "a glob among ignored modules",
          "'*.mlp.*' among the ignored modules is a glob, and only exact names and re: are",
          ignoring("*.mlp.*"), consumers=HUB),
    Fault("rules_names.dialect#2", "re: among excluded modules",
          "begins with re:, which is not understood there",
          ignoring("re:.*lm_head", container="modelopt"), consumers=HUB),
    Fault("rules_names.dialect#3", "a glob among modules that are not converted",
          "is a glob, which it does not expand: it has no effect",
          ignoring("*.mlp.*", scheme="fp8_block128", container="deepseek"),
          consumers=("vllm", "sglang")),
    Fault("rules_names.no_such_module", "an ignored name that is misspelt",
          f"the ignored module '{MISSPELT}' is not there; is '{EXTRA}' meant?",
          with_plain(ignored=(MISSPELT,)), consumers=HUB, severity="warn"),
    Fault("rules_names.not_ignored", "a matrix that nothing ignores",
          "1 modules are stored in BF16 and nothing ignores them, so that it looks for their",
          with_plain(), consumers=HUB),
    Fault("rules_names.not_ignored#2", "a tied head that is not ignored",
          "the tied lm_head is not ignored: it has no scale, and logits are NaN",
          declared(lambda said: said["ignore"].remove("lm_head"), "fp8_channel"),
          consumers=("transformers",)),
    Fault("rules_names.ignored_and_quantized", "an ignored name that takes quantized modules",
          "takes 3 modules that are quantized: ValueError: There is no module or parameter named",
          ignoring("model.layers.0.mlp", container="modelopt"), consumers=("vllm",)),
    Fault("rules_names.ignored_and_quantized", "an ignored name that takes quantized modules",
          "takes 3 modules that are quantized: it takes the codes for weights",
          ignoring("model.layers.0.mlp*", container="modelopt"),
          consumers=("tensorrt-llm", "sglang", "transformers")),
    Fault("rules_names.split_groups", "a group of which a part is not quantized",
          "ValueError: Found different quantization schemes",
          half_a_group, consumers=("vllm", "sglang")),
    Fault("rules_names.heads", "a quantized head",
          "the head is quantized, and its FP8 method leaves heads alone",
          quantized("heads", HEAD, "deepseek"), consumers=("vllm", "sglang")),
    Fault("rules_names.heads#2", "a quantized head that no target names",
          "the head is quantized, but no target names it, and a head is no Linear there",
          quantized("heads", HEAD, CT), consumers=("vllm",)),
    Fault("rules_names.embeddings", "a quantized embedding",
          "an embedding is quantized, and not read",
          quantized("embeddings", EMBED, CT), consumers=HUB),
]  # fmt: skip
