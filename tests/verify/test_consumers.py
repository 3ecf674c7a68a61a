"""What a consumer would not load, or would make other numbers of, planted in outputs that it loads:
each is found by its own message, and nothing is found in what is right."""

import json
from pathlib import Path

import pytest
import torch

from lowbitcli import api
from lowbitcli.containers.reading import OK, READS
from lowbitcli.errors import RecipeError, UnsupportedError, UsageError
from lowbitcli.verify import CONSUMERS, FAIL
from tests import checkpoints
from tests.checkpoints import LAYER, single, weight
from tests.verify.asked import asked, config, made, told
from tests.verify.planted import DOWN, GATE, UP, change, model

GOLDEN = Path(__file__).parents[1] / "golden"
Q, K, V = (f"{LAYER}self_attn.{name}_proj." for name in "qkv")
HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
EXTRA = f"{LAYER}mlp.extra_proj"


WRITTEN = [
    (consumer, container, scheme)
    for consumer in CONSUMERS
    for container, schemes in READS[consumer].items()
    for scheme, answer in schemes.items()
    if isinstance(answer, OK) and (container, scheme) in {
        *(("compressed-tensors", x) for x in READS["vllm"]["compressed-tensors"]),
        *(("modelopt", x) for x in ("fp8_channel", "fp8_block128", "nvfp4", "mxfp8")),
        ("deepseek", "fp8_block128"),
        ("native-mxfp8", "mxfp8"),
    }
]  # fmt: skip


@pytest.mark.parametrize(("consumer", "container", "scheme"), WRITTEN)
def test_what_is_written_right_is_loaded(tmp_path, consumer, container, scheme):
    tensors = {f"{stem}weight": weight(128, 128) for stem in (Q, K, V, GATE, UP, DOWN)}
    tensors |= {EMBED: weight(128, 128), "model.norm.weight": torch.ones(128)}
    settings = {**checkpoints.CONFIG, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    output = made(tmp_path, scheme, container, tensors, config=settings)
    failed = [one.message for one in asked(output, consumer) if one.severity == FAIL]
    only_w4a4 = (consumer, container, scheme) == ("tensorrt-llm", "compressed-tensors", "nvfp4")
    assert len(failed) == only_w4a4
    assert all("it takes NVFP4 with 4-bit activations alone" in one for one in failed)


def test_it_is_said_that_nothing_was_found_and_of_which_version(planted):
    found = planted.verify(planted.made("fp8_channel", "compressed-tensors"), consumers=["vllm"])
    (check,) = [one for one in found.checks if one.what.startswith("vllm loads it")]
    assert check.ok and check.count > 15
    assert check.note == "nothing found that it would not take, as vLLM 0.33.0 was read"


def test_several_consumers_and_unknown_ones(planted):
    output = planted.made("nvfp4", "compressed-tensors")
    found = planted.verify(output, consumers=["vllm,SGLang", "vllm"])
    assert sum("loads it as it is meant" in one.what for one in found.checks) == 2
    with pytest.raises(UsageError, match="no consumer 'vlm'"):
        planted.verify(output, consumers=["vlm"])


def test_another_version_than_the_known_one_is_told_apart(planted):
    output = planted.made("fp8_channel", "compressed-tensors")
    notes = {
        one.what: one.note
        for one in planted.verify(output, consumers=["vllm@99", "sglang@0.5"]).checks
        if "loads it" in one.what
    }
    doubt = "; vllm 99 is asked for, and what it loads is known of vLLM 0.33.0 only"
    assert notes["vllm loads it as it is meant (rules)"].endswith(f"vLLM 0.33.0 was read{doubt}")
    assert notes["sglang loads it as it is meant (rules)"].endswith("SGLang 0.5.23 was read")


def edited(planted, scheme, edit, container="compressed-tensors"):
    output = planted.copy(scheme, container)
    config(output, edit)
    return output


def drop(key):
    return lambda said: said.pop(key)


def in_group(key, value):
    """Return an edit of the group: of `weights.x` in its weights; None takes it away."""

    def edit(said):
        group = said["config_groups"]["group_0"]
        *path, last = key.split(".")
        for step in path:
            group = group[step]
        group.pop(last) if value is None else group.update({last: value})

    return edit


FIELDS = [
    ("transformers", "nvfp4", drop("quantization_status"), "has no quantization_status"),
    ("vllm", "mxfp8", in_group("weights.scale_dtype", None), "has no scale_dtype: torch.uint8"),
    ("vllm", "nvfp4", in_group("weights.magic", 1), "weights has magic; ValidationError"),
    ("vllm", "nvfp4", lambda s: s["ignore"].append("*.mlp.*"), "'*.mlp.*' among the ignored"),
    ("transformers", "fp8_channel", lambda s: s["ignore"].remove("lm_head"), "tied lm_head is not"),
    ("tensorrt-llm", "nvfp4", lambda s: None, "4-bit activations alone"),
    ("sglang", "mxfp8", lambda s: None, "No compressed-tensors compatible scheme"),
]


@pytest.mark.parametrize(("consumer", "scheme", "edit", "words"), FIELDS)
def test_a_field_that_a_consumer_needs(planted, consumer, scheme, edit, words):
    told(edited(planted, scheme, edit), consumer, words)


def test_no_format_at_all(planted):
    output = edited(planted, "nvfp4", drop("format"))
    assert asked(output, "transformers") == []  # that of the group is enough
    config(output, in_group("format", None))
    told(output, "transformers", "quantization_config has no format")


@pytest.mark.parametrize("scheme", ["nvfp4", "fp8_tensor"])
def test_activations_that_are_declared_and_have_no_scale(planted, scheme):
    inputs = {"num_bits": 4 if scheme == "nvfp4" else 8, "type": "float", "dynamic": False}
    output = edited(planted, scheme, in_group("input_activations", inputs))
    for consumer in ("vllm", "sglang"):
        assert (
            "7 modules have none stored" in told(output, consumer, "nothing was written to").message
        )


def test_w4a4_of_modelopt_without_its_scales(tmp_path):
    output = made(tmp_path, "nvfp4", "modelopt", model())
    config(output, lambda said: (said.update(quant_algo="NVFP4"), said.pop("config_groups")))
    config(output, lambda said: said.update(quant_algo="NVFP4"), "hf_quant_config.json")
    told(output, "vllm", "quant_algo NVFP4 has static scales")
    assert asked(GOLDEN / "modelopt" / "nvfp4", "vllm") == []


def test_a_module_that_nothing_ignores_and_a_name_that_is_misspelt(planted):
    output = planted.copy("nvfp4", "compressed-tensors")
    change(output, lambda tensors: tensors.update({f"{EXTRA}.weight": weight(64, 64)}))
    for consumer in ("vllm", "sglang", "transformers"):
        assert told(output, consumer, "nothing ignores them").tensor == f"{EXTRA}.weight"
    config(output, lambda said: said["ignore"].append(EXTRA.replace("extra", "exta")))
    assert f"is '{EXTRA}' meant?" in told(output, "vllm", "is not there", "warn").message
    config(output, lambda said: said["ignore"].append("re:.*extra_proj$"))
    assert [one for one in asked(output, "vllm") if one.severity == FAIL] == []


def test_members_of_a_group_in_different_schemes(planted):
    output = planted.copy("nvfp4", "compressed-tensors")

    def unquantize(tensors):
        for suffix in ("weight_packed", "weight_scale", "weight_global_scale"):
            tensors.pop(K + suffix)
        tensors[K + "weight"] = weight(64, 64)

    change(output, unquantize)
    config(output, lambda said: said["ignore"].append(K[:-1]))
    for consumer in ("vllm", "sglang"):
        assert f"{K[:-1]} kept" in told(output, consumer, "Found different").message


def test_other_dialects(tmp_path):
    output = made(tmp_path / "a", "nvfp4", "modelopt", model())
    config(output, lambda said: said["ignore"].extend(["re:.*lm_head", "model.layers.0.mlp"]))
    told(output, "vllm", "begins with re:, which is not understood")
    assert (
        "3 modules that are quantized" in told(output, "vllm", "'model.layers.0.mlp' takes").message
    )
    assert not any("takes 3" in one.message for one in asked(output, "tensorrt-llm"))
    tensors = {name: weight(128, 128) for name in (Q + "weight", DOWN + "weight")}
    output = made(tmp_path / "b", "fp8_block128", "deepseek", tensors)
    config(output, lambda said: said["modules_to_not_convert"].append("*.mlp.*"))
    told(output, "vllm", "it does not expand")
    config(output, drop("activation_scheme"))
    told(output, "vllm", "has no activation_scheme")
    told(output, "sglang", "renames weight_scale_inv and drops all 2")
    output = made(tmp_path / "c", "mxfp8", "native-mxfp8", tensors)
    config(output, drop("scale_fmt"))
    told(output, "transformers", "has no scale_fmt")
    told(output, "vllm", "no module or parameter named ...weight_scale_inv")


def test_files_of_modelopt(tmp_path):
    output = made(tmp_path, "nvfp4", "modelopt", model())
    config(output, lambda said: said["exclude_modules"].pop(), "hf_quant_config.json")
    told(output, "vllm", "exclude different modules", "warn")
    (output / "hf_quant_config.json").unlink()
    told(output, "tensorrt-llm", "there is no hf_quant_config.json")
    told(output, "transformers", "the sizes do not match")


def test_groups_without_a_format_of_their_own_and_classes_among_names(tmp_path):
    recipe = tmp_path / "mixed.yaml"
    recipe.write_text(
        'rules: [{match: "*.mlp.*", scheme: nvfp4}, {match: "*", scheme: fp8_channel}]\n'
    )
    source = single(tmp_path / "source", model())
    request = api.Request(recipe=recipe, container="compressed-tensors")
    api.quantize(source, tmp_path / "out", request, device="cpu")
    output = tmp_path / "out"
    assert asked(output, "vllm") == []
    config(output, in_group("format", None))
    told(output, "vllm", "format is mixed-precision, and these groups have none: group_0")
    config(output, in_group("targets", ["Linear"]))
    told(output, "tensorrt-llm", "targets Linear beside other groups")


@pytest.mark.parametrize(("kind", "name"), [("heads", HEAD), ("embeddings", EMBED)])
def test_a_head_and_an_embedding_that_are_quantized(tmp_path, kind, name):
    recipe = tmp_path / "all.yaml"
    recipe.write_text(f'rules: [{{match: "*", scheme: fp8_block128}}]\nquantize: [{kind}]\n')
    tensors = {DOWN + "weight": weight(128, 128), HEAD: weight(256, 128), EMBED: weight(256, 128)}
    source = single(tmp_path / "source", tensors)
    for container in ("deepseek", "compressed-tensors"):
        request = api.Request(recipe=recipe, container=container)
        output = tmp_path / container
        api.quantize(source, output, request, device="cpu")
        words = "an embedding is quantized" if kind == "embeddings" else "the head is quantized"
        assert told(output, "vllm", words).tensor == name


def test_experts_that_transformers_reads_wrong_and_says_nothing():
    found = told(GOLDEN / "compressed-tensors" / "nvfp4a16-moe", "transformers", "leaves out the")
    assert found.file == "model.safetensors" and ".experts." in found.tensor


def test_an_index_that_names_a_shard_which_is_not_there(tmp_path):
    source = checkpoints.sharded(
        tmp_path / "a", {Q + "weight": weight(64, 64)}, {EMBED: weight(8, 64)}
    )
    api.quantize(source, tmp_path / "out", device="cpu")
    (tmp_path / "out" / checkpoints.shard_name(2, 2)).unlink()
    found = api.verify(tmp_path / "out", device="cpu", consumers=["vllm"])
    assert found.exit_code == 1
    assert checkpoints.shard_name(2, 2) in found.problems[0].message


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*/*/model.safetensors")), ids=str)
def test_what_peers_wrote_is_found_wrong_for_those_alone_who_cannot_read_it(path):
    container, scheme = path.parts[-3:-1]
    limits = {  # as docs/formats.md has it
        "compressed-tensors/mxfp4": {"sglang"},
        "compressed-tensors/mxfp8": {"sglang", "tensorrt-llm"},
        "compressed-tensors/nvfp4a16": {"tensorrt-llm"},
        "compressed-tensors/nvfp4a16-moe": {"transformers", "tensorrt-llm"},
        "deepseek/fp8-block": {"sglang"},
        "deepseek/fp8-block-ue8m0": {"sglang"},
        "modelopt/fp8_pb_wo": {"sglang"},
        "modelopt/fp8_per_channel": {"sglang"},
        "modelopt/mxfp4": {"vllm", "sglang"},
        "modelopt/mxfp8": {"sglang"},
        "native-mxfp8/mxfp8": {"vllm", "sglang"},
    }
    wrong = set(limits.get(f"{container}/{scheme}", ()))
    wrong |= {"transformers"} if container == "modelopt" else set()
    found = {
        consumer
        for consumer in CONSUMERS[:-1]
        if any(one.severity == FAIL for one in asked(path.parent, consumer))
    }
    assert found == wrong


def test_of_a_pipeline_each_component_is_asked(tmp_path):
    source = tmp_path / "pipe"
    single(source / "transformer", {"blocks.0.attn.to_q.weight": weight(64, 64)})
    single(source / "text_encoder", {Q + "weight": weight(64, 64)})
    (source / "model_index.json").write_text("{}")
    api.quantize(source, tmp_path / "out", api.Request(container="lowbit"), device="cpu")
    found = told(tmp_path / "out", "vllm", "does not know lowbit's own container")
    assert found.tensor == "transformer/blocks.0.attn.to_q.weight"
    assert found.file == "transformer/model.safetensors"
    with pytest.raises(UnsupportedError, match="not fixed as a whole"):
        api.verify(tmp_path / "out", device="cpu", fix=tmp_path / "new")


def test_transformers_opens_the_file_that_the_config_names(tmp_path):
    tensors = {f"{LAYER}mlp.down_proj.weight": weight(64, 64)}
    source = single(tmp_path / "m", tensors)
    (source / "model.safetensors").rename(source / "model.fp16.safetensors")
    recipe = tmp_path / "r.yaml"
    recipe.write_text("extends: fp8\nconsumer: transformers\n")
    with pytest.raises(RecipeError, match=r"neither model\.safetensors nor"):
        api.plan_quantize(source, None, api.Request(recipe=recipe))
    said = json.loads((source / "config.json").read_text())
    said["transformers_weights"] = "model.fp16.safetensors"
    (source / "config.json").write_text(json.dumps(said))
    out = api.quantize(source, tmp_path / "out", api.Request(recipe=recipe), device="cpu").output
    assert api.verify(out, device="cpu", consumers=["transformers"]).passed
