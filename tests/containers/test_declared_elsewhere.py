"""What the containers of ModelOpt, DeepSeek and SGLang say of what they wrote, to the key: their
readers were seen to need it."""

import json
from pathlib import Path

import pytest

from lowbitcli.api import Request, dequantize, inspect, quantize
from lowbitcli.errors import CheckpointError, RecipeError, UnsupportedError
from tests import checkpoints
from tests.checkpoints import CONFIG, LAYER, header_of, single, weight

DOWN, OUT = LAYER + "mlp.down_proj", LAYER + "self_attn.o_proj"
PRODUCER = {"name": "modelopt", "version": "0.47.0"}
KEPT = ["lm_head", "model.embed_tokens"]


def source_at(root, config=CONFIG, **more):
    tensors = {
        DOWN + ".weight": weight(256, 128),
        OUT + ".weight": weight(128, 128),
        "model.embed_tokens.weight": weight(32, 64),
        "model.norm.weight": weight(1, 64)[0],
    }
    return single(root, {**tensors, **more}, config)


def written(tmp_path, scheme, container, rule=None, config=CONFIG, **more):
    source = source_at(tmp_path / "source", config, **more)
    request = Request(scheme=scheme, container=container)
    if rule is not None:
        recipe = tmp_path / "recipe.yaml"
        text = f'{{match: "*", scheme: {scheme}, scale: {rule}, activations: dynamic}}'
        recipe.write_text(f"rules: [{text}]\n")
        request = Request(recipe=recipe, container=container)
    return source, quantize(source, tmp_path / "out", request, device="cpu")


BESIDE = {
    "nvfp4": ("W4A16_NVFP4", {"group_size": 16}),
    "mxfp8": ("MXFP8", {"group_size": 32}),
    "fp8_channel": ("FP8_PER_CHANNEL_PER_TOKEN", {}),
    "fp8_block128": ("fp8_pb_wo", {}),
}


@pytest.mark.parametrize("scheme", BESIDE)
def test_modelopt_says_the_same_in_two_files(tmp_path, scheme):
    _, done = written(tmp_path, scheme, "modelopt")
    algorithm, size = BESIDE[scheme]
    flat = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": KEPT}
    if scheme == "nvfp4":
        weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
        flat["config_groups"] = {"group_0": {"weights": weights, "targets": ["Linear"]}}
    assert checkpoints.quantization_of(done.output) == {**flat, "producer": PRODUCER}
    nested = {"quant_algo": algorithm, "kv_cache_quant_algo": None, **size, "exclude_modules": KEPT}
    beside = json.loads((done.output / "hf_quant_config.json").read_text())
    assert beside == {"producer": PRODUCER, "quantization": nested}
    assert any("transformers" in note for note in done.plan.notes)


SHAPES = {
    "nvfp4": {
        ".weight": ("U8", [256, 64]),
        ".weight_scale": ("F8_E4M3", [256, 8]),
        ".weight_scale_2": ("F32", []),
    },
    "mxfp8": {".weight": ("F8_E4M3", [256, 128]), ".weight_scale": ("U8", [256, 4])},
    "fp8_channel": {".weight": ("F8_E4M3", [256, 128]), ".weight_scale": ("F32", [256])},
    "fp8_block128": {".weight": ("F8_E4M3", [256, 128]), ".weight_scale": ("F32", [2, 1, 1, 1])},
}


@pytest.mark.parametrize("scheme", SHAPES)
def test_modelopt_s_names_dtypes_and_shapes(tmp_path, scheme):
    _, done = written(tmp_path, scheme, "modelopt")
    header = header_of(done.output / "model.safetensors")
    assert header["__metadata__"] == {"format": "pt"}
    found = {
        name.removeprefix(DOWN): (entry["dtype"], entry["shape"])
        for name, entry in header.items()
        if name.startswith(DOWN)
    }
    assert found == SHAPES[scheme]


def test_a_mixed_recipe_names_every_layer(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        'rules:\n  - {match: "*self_attn*", scheme: mxfp8}\n  - {match: "*", scheme: nvfp4}\n'
    )
    source = source_at(tmp_path / "source")
    request = Request(recipe=recipe, container="modelopt")
    done = quantize(source, tmp_path / "out", request, device="cpu")
    layers = {
        DOWN: {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        OUT: {"quant_algo": "MXFP8", "group_size": 32},
    }
    said = checkpoints.quantization_of(done.output)
    assert (said["quant_algo"], said["quantized_layers"]) == ("MIXED_PRECISION", layers)
    assert said["ignore"] == []
    beside = json.loads((done.output / "hf_quant_config.json").read_text())["quantization"]
    assert beside["quantized_layers"] == layers
    schemes = {w.name: w.scheme.name for w in inspect(done.output).weights if w.scheme}
    assert schemes == {OUT + ".weight": "mxfp8", DOWN + ".weight": "nvfp4"}
    back = dequantize(done.output, tmp_path / "back", device="cpu")
    assert checkpoints.config_of(back.output) == CONFIG
    assert not (back.output / "hf_quant_config.json").exists()


@pytest.mark.parametrize("scheme", ["mxfp4", "int8_channel"])
def test_modelopt_is_not_given_what_its_readers_cannot_take(tmp_path, scheme):
    with pytest.raises(RecipeError, match=f"modelopt has no {scheme}") as caught:
        written(tmp_path, scheme, "modelopt")
    assert caught.value.hint == "it has: fp8_tensor, fp8_channel, fp8_block128, nvfp4, mxfp8"


def test_modelopt_is_given_fp8_with_one_scale_only_with_scales_of_activations(tmp_path):
    with pytest.raises(RecipeError, match="cannot have activations 'dynamic'") as caught:
        written(tmp_path, "fp8_tensor", "modelopt")
    assert caught.value.hint == "it can have: static, with --activation-scales FILE"


def test_a_static_fp8_of_modelopt_is_not_written_again_without_its_input_scales(tmp_path):
    """Its reader would use memory that nothing was written to."""
    recipe = tmp_path / "keep.yaml"
    recipe.write_text('rules: [{match: "*", keep: true}]\n')
    golden = Path(__file__).parents[1] / "golden" / "modelopt" / "fp8"
    with pytest.raises(UnsupportedError, match="has no fp8_tensor without scales of activations"):
        quantize(golden, tmp_path / "out", Request(container="modelopt", recipe=recipe))


def test_an_excluded_name_within_a_quantized_one_is_said(tmp_path):
    """vLLM excludes whatever holds the name of an excluded module."""
    config = {**CONFIG, "architectures": ["BertModel"]}
    more = {"model.gate.weight": weight(8, 64), "model.gate_proj.weight": weight(64, 64)}
    _, done = written(tmp_path, "nvfp4", "modelopt", config=config, **more)
    notes = [note for note in done.plan.notes if "also exclude" in note]
    assert len(notes) == 1 and "model.gate_proj: the excluded model.gate" in notes[0]


@pytest.mark.parametrize(("rule", "said"), [("amax", {}), ("ue8m0", {"scale_fmt": "ue8m0"})])
def test_deepseek(tmp_path, rule, said):
    _, done = written(tmp_path, "fp8_block128", "deepseek", rule)
    assert checkpoints.quantization_of(done.output) == {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": KEPT,
        **said,
    }
    header = header_of(done.output / "model.safetensors")
    assert header[DOWN + ".weight"]["dtype"] == "F8_E4M3"
    scale = header[DOWN + ".weight_scale_inv"]
    assert (scale["dtype"], scale["shape"]) == ("F32", [2, 1])
    assert any("SGLang" in note for note in done.plan.notes)
    # and once more: what was said of the scales still holds, as they are copied
    request = Request(scheme="fp8_block128", container="deepseek")
    again = quantize(done.output, tmp_path / "again", request, device="cpu")
    assert checkpoints.quantization_of(again.output).get("scale_fmt") == said.get("scale_fmt")


def test_deepseek_s_readers_and_ragged_blocks(tmp_path):
    config = {**CONFIG, "architectures": ["Qwen3ForCausalLM"]}
    more = {"model.x_proj.weight": weight(192, 128)}
    _, done = written(tmp_path, "fp8_block128", "deepseek", config=config, **more)
    notes = [note for note in done.plan.notes if "no multiple of 128" in note]
    assert len(notes) == 1 and notes[0].startswith("1 matrices have rows or columns")


def test_notes_on_readers_say_what_was_seen_and_no_more(tmp_path):
    """Decision by decision: which words stand in which plan."""
    experts = {"model.layers.0.mlp.experts.0.down_proj.weight": weight(128, 128)}
    seen = {
        ("nvfp4", "compressed-tensors", None, True): ["global scale of experts"],
        ("mxfp8", "compressed-tensors", None, True): ["does not load experts in mxfp8"],
        ("mxfp4", "compressed-tensors", None, True): [],
        ("nvfp4", "compressed-tensors", None, False): [],
        ("fp8_block128", "compressed-tensors", "amax", False): ["DeepGEMM"],
        ("fp8_block128", "compressed-tensors", "ue8m0", False): [],
        ("fp8_block128", "deepseek", "ue8m0", False): ["SGLang"],
        ("fp8_block128", "deepseek", "amax", False): ["SGLang", "DeepGEMM"],
    }
    for number, ((scheme, container, rule, moe), words) in enumerate(seen.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        _, done = written(folder, scheme, container, rule, **(experts if moe else {}))
        known = ("experts", "DeepGEMM", "SGLang 0.5")
        notes = [note for note in done.plan.notes if any(word in note for word in known)]
        assert len(notes) == len(words), notes
        assert all(word in note for word, note in zip(words, notes, strict=True))


def test_native_mxfp8(tmp_path):
    _, done = written(tmp_path, "mxfp8", "native-mxfp8")
    assert checkpoints.quantization_of(done.output) == {
        "quant_method": "mxfp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [1, 32],
        "scale_fmt": "ue8m0",
        "ignored_layers": KEPT,
        "modules_to_not_convert": KEPT,
    }
    scale = header_of(done.output / "model.safetensors")[DOWN + ".weight_scale_inv"]
    assert (scale["dtype"], scale["shape"]) == ("U8", [256, 4])
    assert any("vLLM" in note for note in done.plan.notes)


ONLY = {"fp8_block128": ("deepseek", "modelopt"), "mxfp8": ("native-mxfp8", "modelopt")}


@pytest.mark.parametrize("scheme", ONLY)
def test_between_them_only_names_and_layouts_change(tmp_path, scheme):
    first, second = ONLY[scheme]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f'rules: [{{match: "*", scheme: {scheme}, activations: dynamic}}]\n')
    source = source_at(tmp_path / "source")
    made = {
        name: quantize(source, tmp_path / name, Request(recipe=recipe, container=name))
        for name in (first, second)
    }
    for a, b in ((first, second), (second, first)):
        request = Request(recipe=recipe, container=b)
        done = quantize(made[a].output, tmp_path / f"{a}-{b}", request, device="cpu")
        found, wanted = checkpoints.read(done.output), checkpoints.read(made[b].output)
        assert found.keys() == wanted.keys()
        assert all(checkpoints.same(found[name], wanted[name]) for name in wanted)
        assert checkpoints.config_of(done.output) == checkpoints.config_of(made[b].output)
        assert done.errors == {} and done.moved == 0


def test_nothing_quantized_declares_nothing(tmp_path):
    source = single(tmp_path / "source", {"model.embed_tokens.weight": weight(32, 64)})
    for container in ("modelopt", "deepseek", "native-mxfp8"):
        scheme = {"deepseek": "fp8_block128", "native-mxfp8": "mxfp8"}.get(container, "nvfp4")
        request = Request(scheme=scheme, container=container)
        done = quantize(source, tmp_path / container, request, device="cpu")
        assert "quantization_config" not in checkpoints.config_of(done.output)
        assert not (done.output / "hf_quant_config.json").exists()


def set_config(root, **said):
    config = checkpoints.config_of(root)
    config["quantization_config"].update(said)
    (root / "config.json").write_text(json.dumps(config))


MALFORMED = [
    ("modelopt", {"quant_algo": "FP8"}, "disagree: FP8 and W4A16_NVFP4"),
    ("modelopt", {"quant_algo": None}, "names no quant_algo"),
    ("modelopt", {"quantization": []}, "quantization is no object"),
    ("modelopt", {"ignore": "lm_head"}, "no list of strings"),
    ("deepseek", {"modules_to_not_convert": "lm_head"}, "no list of strings"),
    ("native-mxfp8", {"ignored_layers": [1]}, "no list of strings"),
]
UNREAD = [
    ("deepseek", {"weight_block_size": [64, 64]}, r"weight_block_size is \[64, 64\]"),
    ("native-mxfp8", {"weight_block_size": [1, 16]}, r"weight_block_size is \[1, 16\]"),
]
DEFAULT = {"modelopt": "nvfp4", "deepseek": "fp8_block128", "native-mxfp8": "mxfp8"}


@pytest.mark.parametrize(("container", "said", "message"), [*MALFORMED, *UNREAD], ids=str)
def test_a_malformed_config_is_one_clear_error(tmp_path, container, said, message):
    _, done = written(tmp_path, DEFAULT[container], container)
    set_config(done.output, **said)
    with pytest.raises(CheckpointError, match=message) as caught:
        inspect(done.output)
    assert caught.value.exit_code == 4


def test_an_algorithm_that_is_not_read(tmp_path):
    _, done = written(tmp_path, "nvfp4", "modelopt")
    (done.output / "hf_quant_config.json").unlink()
    for name in ("W4A8_NVFP4_FP8", "W4A8_AWQ", "x\x1b[31m"):
        set_config(done.output, quant_algo=name)
        with pytest.raises(UnsupportedError) as caught:
            inspect(done.output)
        assert "\x1b" not in caught.value.message


@pytest.mark.parametrize("where", ["config.json", "hf_quant_config.json", "nested in config.json"])
def test_either_file_of_modelopt_is_enough(tmp_path, where):
    _, done = written(tmp_path, "nvfp4", "modelopt")
    beside = done.output / "hf_quant_config.json"
    config = checkpoints.config_of(done.output)
    if where == "nested in config.json":
        config["quantization_config"] = json.loads(beside.read_text())
    elif where == "hf_quant_config.json":
        del config["quantization_config"]
    (done.output / "config.json").write_text(json.dumps(config))
    if where != "hf_quant_config.json":
        beside.unlink()
    found = inspect(done.output)
    assert (found.container, found.findings) == ("modelopt", ())
    assert sum(w.scheme is not None for w in found.weights) == 2


def edited(root, edit):
    file = root / "model.safetensors"
    tensors, metadata = checkpoints.read(file), checkpoints.metadata_of(file)
    edit(tensors)
    checkpoints.write(file, tensors, metadata)


FINDINGS = [
    ("modelopt", "nvfp4", ".weight_scale", "missing"),
    ("modelopt", "nvfp4", ".weight_scale_2", "missing"),
    ("modelopt", "nvfp4", ".weight", "orphan"),
    ("modelopt", "mxfp8", ".weight_scale", "missing"),
    ("modelopt", "fp8_channel", ".weight", "orphan"),
    ("deepseek", "fp8_block128", ".weight", "orphan"),
    ("deepseek", "fp8_block128", ".weight_scale_inv", "missing"),
    ("native-mxfp8", "mxfp8", ".weight", "orphan"),
    ("native-mxfp8", "mxfp8", ".weight_scale_inv", "missing"),
]


@pytest.mark.parametrize(("container", "scheme", "gone", "kind"), FINDINGS)
def test_a_missing_part_is_found_before_any_work(tmp_path, container, scheme, gone, kind):
    _, done = written(tmp_path, scheme, container)
    edited(done.output, lambda tensors: tensors.pop(DOWN + gone))
    found = inspect(done.output).findings
    assert {one.kind for one in found} == {kind}
    for run in (quantize, dequantize):
        with pytest.raises(CheckpointError, match="disagrees with itself"):
            run(done.output, tmp_path / "x", device="cpu")
        assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("container", DEFAULT)
def test_excluded_and_quantized_is_a_contradiction(tmp_path, container):
    _, done = written(tmp_path, DEFAULT[container], container)
    (done.output / "hf_quant_config.json").unlink(missing_ok=True)
    key = "ignore" if container == "modelopt" else "modules_to_not_convert"
    set_config(done.output, **{key: [DOWN]})
    found = inspect(done.output).findings
    assert [(one.kind, one.tensor) for one in found] == [("mismatch", DOWN + ".weight")]


def test_a_scale_of_the_inputs_that_was_folded_out_is_not_ignored(tmp_path):
    _, done = written(tmp_path, "nvfp4", "modelopt")
    edited(done.output, lambda t: t.update({DOWN + ".pre_quant_scale": weight(1, 128)[0]}))
    assert [one.kind for one in inspect(done.output).findings] == ["unknown"]
