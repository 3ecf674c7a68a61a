"""What `compressed-tensors` says of what it wrote: exactly what its readers were seen to need."""

import pytest

from lowbitcli.api import Request, dequantize, inspect, quantize
from tests import checkpoints
from tests.checkpoints import CONFIG, LAYER, single, weight

DOWN, OUT = LAYER + "mlp.down_proj", LAYER + "self_attn.o_proj"
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
TOKEN = {**FLOAT8, "strategy": "token", "dynamic": True, "group_size": None}
MX = {**FLOAT8, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
# scheme -> (format, weights, input_activations), as compressed-tensors 0.20.1 writes them
SAID = {
    "fp8": (
        "float-quantized",
        {**FLOAT8, "strategy": "tensor", "group_size": None},
        TOKEN,
    ),
    "FP8_DYNAMIC": (
        "float-quantized",
        {**FLOAT8, "strategy": "channel", "group_size": None},
        TOKEN,
    ),
    "mxfp8": ("mxfp8-quantized", MX, {**MX, "dynamic": True}),
    "MXFP8A16": ("mxfp8-quantized", MX, None),
    "NVFP4A16": (
        "nvfp4-pack-quantized",
        {
            "num_bits": 4,
            "type": "float",
            "symmetric": True,
            "dynamic": False,
            "strategy": "tensor_group",
            "group_size": 16,
            "scale_dtype": "torch.float8_e4m3fn",
        },
        None,
    ),
}


def tensors():
    return {
        DOWN + ".weight": weight(64, 64),
        OUT + ".weight": weight(64, 64, seed=1),
        "model.embed_tokens.weight": weight(32, 64),
        "model.norm.weight": weight(1, 64)[0],
        "visual.conv.weight": weight(32, 64).reshape(8, 4, 8, 8),
    }


@pytest.mark.parametrize("scheme", SAID)
def test_one_scheme(tmp_path, scheme):
    source = single(tmp_path / "source", tensors())
    done = quantize(source, tmp_path / "out", Request(scheme=scheme), device="cpu")
    form, weights, activations = SAID[scheme]
    assert checkpoints.quantization_of(done.output) == {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": form,
        "config_groups": {
            "group_0": {
                "format": form,
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": activations,
                "output_activations": None,
            }
        },
        "ignore": ["lm_head", "model.embed_tokens", "visual.conv"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "transform_config": {},
        "sparsity_config": {},
        "version": "0.20.1",
    }


SHAPES = {
    "fp8": {".weight": ("F8_E4M3", [64, 64]), ".weight_scale": ("F32", [1])},
    "FP8_DYNAMIC": {".weight": ("F8_E4M3", [64, 64]), ".weight_scale": ("F32", [64, 1])},
    "mxfp8": {".weight": ("F8_E4M3", [64, 64]), ".weight_scale": ("U8", [64, 2])},
    "NVFP4A16": {
        ".weight_packed": ("U8", [64, 32]),
        ".weight_scale": ("F8_E4M3", [64, 4]),
        ".weight_global_scale": ("F32", [1]),
    },
}


@pytest.mark.parametrize("scheme", SHAPES)
def test_names_dtypes_and_shapes(tmp_path, scheme):
    source = single(tmp_path / "source", {DOWN + ".weight": weight(64, 64)})
    done = quantize(source, tmp_path / "out", Request(scheme=scheme), device="cpu")
    header = checkpoints.header_of(done.output / "model.safetensors")
    assert header.pop("__metadata__") == {"format": "pt"}
    found = {
        name.removeprefix(DOWN): (entry["dtype"], entry["shape"]) for name, entry in header.items()
    }
    assert found == SHAPES[scheme]


def test_a_mixed_recipe_has_a_group_of_exact_targets_with_its_own_format_for_each(tmp_path):
    recipe = tmp_path / "mixed.yaml"
    recipe.write_text(
        'rules:\n  - {match: "*self_attn*", scheme: FP8_DYNAMIC}\n'
        '  - {match: "*mlp*", scheme: nvfp4}\n'
    )
    source = single(tmp_path / "source", {**tensors(), LAYER + "other.weight": weight(64, 64)})
    done = quantize(source, tmp_path / "out", Request(recipe=recipe), device="cpu")
    said = checkpoints.quantization_of(done.output)
    assert said["format"] == "mixed-precision"
    groups = {group["format"]: group for group in said["config_groups"].values()}
    assert groups.keys() == {"float-quantized", "nvfp4-pack-quantized"}
    assert groups["float-quantized"]["targets"] == [OUT]
    assert groups["nvfp4-pack-quantized"]["targets"] == [DOWN]
    assert groups["float-quantized"]["input_activations"] == TOKEN
    assert groups["nvfp4-pack-quantized"]["input_activations"] is None
    assert said["ignore"] == [
        "lm_head",
        "model.embed_tokens",
        LAYER + "other",
        "visual.conv",
    ]
    schemes = {w.name: w.scheme.name for w in inspect(done.output).weights if w.scheme}
    assert schemes == {OUT + ".weight": "fp8_channel", DOWN + ".weight": "nvfp4"}
    back = dequantize(done.output, tmp_path / "back", device="cpu")
    assert checkpoints.config_of(back.output) == CONFIG


def test_nothing_quantized_declares_nothing(tmp_path):
    """A quantization_config without groups would be refused by its readers."""
    source = single(tmp_path / "source", {"model.embed_tokens.weight": weight(32, 64)})
    done = quantize(source, tmp_path / "out", device="cpu")
    assert "quantization_config" not in checkpoints.config_of(done.output)


def test_what_the_source_said_of_quantization_is_replaced(tmp_path):
    source = single(tmp_path / "source", tensors())
    first = quantize(source, tmp_path / "first", Request(scheme="mxfp8"), device="cpu")
    (first.output / "hf_quant_config.json").write_text("{}")
    done = quantize(first.output, tmp_path / "out", Request(scheme="FP8_DYNAMIC"), device="cpu")
    assert checkpoints.quantization_of(done.output)["format"] == "float-quantized"
    assert not (done.output / "hf_quant_config.json").exists()


@pytest.mark.parametrize(
    ("architecture", "ignored"),
    [("LlamaForCausalLM", True), ("Qwen2VLForConditionalGeneration", True), ("BertModel", False)],
)
def test_a_head_without_a_tensor_is_ignored(tmp_path, architecture, ignored):
    """A tied head is a Linear of the model: readers would look for its scale."""
    config = {"architectures": [architecture]}
    source = single(tmp_path / "source", {DOWN + ".weight": weight(64, 64)}, config)
    done = quantize(source, tmp_path / "out", device="cpu")
    assert checkpoints.quantization_of(done.output)["ignore"] == (["lm_head"] if ignored else [])


def test_a_quantized_head_is_not_ignored(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text('rules: [{match: "*", scheme: nvfp4}]\nquantize: [heads]\n')
    source = single(tmp_path / "source", {"lm_head.weight": weight(64, 64)})
    done = quantize(source, tmp_path / "out", Request(recipe=recipe), device="cpu")
    assert checkpoints.quantization_of(done.output)["ignore"] == []
    assert "lm_head.weight_packed" in checkpoints.read(done.output)
