"""Scales of activations: what a file of amaxes, or a constant, becomes in each container, and what
is refused by name."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from lowbitcli import api
from lowbitcli.api import Request, plan_quantize
from lowbitcli.errors import CheckpointError, RecipeError, UnsupportedError, UsageError
from lowbitcli.plan.asked import Asked
from tests.checkpoints import CONFIG, LAYER, config_of, single, weight, write

Q, K, V, OUT = (f"{LAYER}self_attn.{one}_proj" for one in "qkvo")
GATE, UP, DOWN = (f"{LAYER}mlp.{one}_proj" for one in ("gate", "up", "down"))
MODULES = (Q, K, V, OUT, GATE, UP, DOWN)
AMAX = {Q: 3.0, K: 3.0, V: 3.0, OUT: 0.7, GATE: 11.3, UP: 11.3, DOWN: 250.0}
ATTENTION = f"{LAYER}self_attn"


def f32(number):
    return float(torch.tensor(number, dtype=torch.float32))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    tensors = {f"{name}.weight": weight(64, 128, seed=n) for n, name in enumerate(MODULES)}
    tensors["lm_head.weight"] = weight(32, 128)
    return single(tmp_path_factory.mktemp("activations") / "model", tensors, CONFIG)


def saved(folder, amax, name="amax.json"):
    (folder / name).write_text(json.dumps(amax))
    return folder / name


def written(source, folder, scheme, container, amax=AMAX, **request):
    asked = Request(
        scheme=scheme, container=container, activation_scales=saved(folder, amax), **request
    )
    done = api.quantize(source, folder / "out", asked, device="cpu")
    return done, load_file(folder / "out" / "model.safetensors")


@pytest.mark.parametrize(
    ("scheme", "container", "suffix", "shape", "of"),
    [
        ("fp8_tensor", "compressed-tensors", ".input_scale", [1], lambda a: f32(a) / f32(448)),
        ("fp8_tensor", "modelopt", ".input_scale", [], lambda a: f32(a) / f32(448)),
        ("fp8_tensor", "comfyui", ".input_scale", [], lambda a: f32(a) / f32(448)),
        ("nvfp4", "modelopt", ".input_scale", [], lambda a: f32(a) / f32(2688)),
        ("nvfp4", "comfyui", ".input_scale", [], lambda a: f32(a) / f32(2688)),
        (
            "nvfp4",
            "compressed-tensors",
            ".input_global_scale",
            [1],
            lambda a: 1 / f32(f32(a) / f32(2688)),
        ),
    ],
)
def test_what_is_stored(source, tmp_path, scheme, container, suffix, shape, of):
    done, tensors = written(source, tmp_path, scheme, container)
    found = {name for name in tensors if "input" in name}
    assert found == {f"{name}{suffix}" for name in MODULES}
    for name in MODULES:
        stored = tensors[f"{name}{suffix}"]
        assert (stored.dtype, list(stored.shape)) == (torch.float32, shape)
        assert float(stored) == f32(of(AMAX[name])), name
    assert "activations of 7 weights are static, with scales from amax.json" in done.plan.notes
    assert {x.activations for x in done.plan.quantized} == {"static"}


def test_what_compressed_tensors_declares(source, tmp_path):
    written(source, tmp_path, "nvfp4", "compressed-tensors")
    group = config_of(tmp_path / "out")["quantization_config"]["config_groups"]["group_0"]
    assert group["input_activations"] == {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "symmetric": True,
        "dynamic": "local",
        "scale_dtype": "torch.float8_e4m3fn",
    }
    (tmp_path / "fp8").mkdir()
    written(source, tmp_path / "fp8", "fp8_tensor", "compressed-tensors")
    said = config_of(tmp_path / "fp8" / "out")["quantization_config"]
    assert said["config_groups"]["group_0"]["input_activations"] == {
        "num_bits": 8,
        "type": "float",
        "strategy": "tensor",
        "symmetric": True,
        "dynamic": False,
    }
    assert said["kv_cache_scheme"] is None


@pytest.mark.parametrize(
    ("scheme", "algorithm", "bits", "more"),
    [("fp8_tensor", "FP8", 8, {}), ("nvfp4", "NVFP4", 4, {"group_size": 16})],
)
def test_what_modelopt_declares(source, tmp_path, scheme, algorithm, bits, more):
    written(source, tmp_path, scheme, "modelopt")
    said = config_of(tmp_path / "out")["quantization_config"]
    numbers = {"dynamic": False, "num_bits": bits, "type": "float", **more}
    assert said["quant_algo"] == algorithm
    assert said["config_groups"] == {
        "group_0": {"weights": numbers, "input_activations": numbers, "targets": ["Linear"]}
    }
    nested = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]
    assert (nested["quant_algo"], nested["kv_cache_quant_algo"]) == (algorithm, None)


def test_static_and_weight_only_in_one(source, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "container: modelopt\nrules:\n"
        "  - {match: '*.self_attn.*', scheme: nvfp4, activations: none}\n"
        "  - {match: '*', scheme: nvfp4}\n"
    )
    amax = {name: AMAX[name] for name in (GATE, UP, DOWN)}
    request = Request(recipe=recipe, activation_scales=saved(tmp_path, amax))
    done = api.quantize(source, tmp_path / "out", request, device="cpu")
    layers = config_of(tmp_path / "out")["quantization_config"]["quantized_layers"]
    assert {name: one["quant_algo"] for name, one in layers.items()} == {
        **dict.fromkeys((Q, K, V, OUT), "W4A16_NVFP4"),
        **dict.fromkeys((GATE, UP, DOWN), "NVFP4"),
    }
    assert "activations of 3 weights are static, with scales from amax.json" in done.plan.notes


def test_the_largest_of_a_group_is_shared_and_said(source, tmp_path):
    amax = {**AMAX, K: 4.5, UP: 9.0}
    done, tensors = written(source, tmp_path, "nvfp4", "modelopt", amax)
    assert {float(tensors[f"{name}.input_scale"]) for name in (Q, K, V)} == {f32(4.5 / 2688)}
    assert {float(tensors[f"{name}.input_scale"]) for name in (GATE, UP)} == {f32(f32(11.3) / 2688)}
    (said,) = [note for note in done.plan.notes if "groups of weights" in note]
    assert said.startswith("2 groups of weights that are served as one matrix have inputs of ")
    (tmp_path / "alone").mkdir()  # ComfyUI serves each by itself
    _, alone = written(source, tmp_path / "alone", "nvfp4", "comfyui", amax)
    assert float(alone[f"{Q}.input_scale"]) == f32(3.0 / 2688)


@pytest.mark.parametrize(
    ("container", "names", "shape"),
    [
        ("compressed-tensors", (f"{ATTENTION}.k_scale", f"{ATTENTION}.v_scale"), [1]),
        ("modelopt", (f"{K}.k_scale", f"{V}.v_scale"), []),
    ],
)
def test_scales_of_a_cache(source, tmp_path, container, names, shape):
    amax = {f"{ATTENTION}.k_amax": 20.0, f"{ATTENTION}.v_amax": 1.5}
    done, tensors = written(source, tmp_path, "nvfp4", container, amax)
    assert [float(tensors[name]) for name in names] == [f32(20 / 448), f32(1.5 / 448)]
    assert [list(tensors[name].shape) for name in names] == [shape, shape]
    assert {x.activations for x in done.plan.quantized} == {"none"}
    assert "keys and values of 1 attentions have scales for an FP8 cache" in done.plan.notes
    said = config_of(tmp_path / "out")["quantization_config"]["kv_cache_scheme"]
    assert (said["num_bits"], said["type"], said["dynamic"]) == (8, "float", False)
    if container == "modelopt":
        nested = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
        assert nested["quantization"]["kv_cache_quant_algo"] == "FP8"
    else:
        assert said["strategy"] == "tensor"


def test_constants_of_a_recipe(source, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "kv_scale: 1.0\nrules:\n"
        "  - {match: '*.mlp.*', scheme: nvfp4, activation_scale: 0.5}\n"
        "  - {match: '*', scheme: fp8_tensor, activation_scale: 2}\n"
    )
    done = api.quantize(source, tmp_path / "out", Request(recipe=recipe), device="cpu")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {float(tensors[f"{name}.input_scale"]) for name in (Q, K, V, OUT)} == {2.0}
    assert {float(tensors[f"{x}.input_global_scale"]) for x in (GATE, UP, DOWN)} == {2.0}
    assert float(tensors[f"{ATTENTION}.k_scale"]) == 1.0
    told = "activations of 7 weights are static, of 7 by a constant of the recipe"
    assert told in done.plan.notes
    # what was measured wins, and a constant is for what was not
    some = saved(tmp_path, dict.fromkeys((GATE, UP), 5.0))
    plan = plan_quantize(source, None, Request(recipe=recipe, activation_scales=some))
    known = {one.spec.name: one.data for one in plan.constants}
    assert known[f"{DOWN}.input_global_scale"] == known[f"{DOWN}.input_global_scale"]
    numbers = {x: torch.frombuffer(bytearray(y), dtype=torch.float32) for x, y in known.items()}
    assert float(numbers[f"{GATE}.input_global_scale"]) == f32(1 / f32(5 / 2688))
    assert float(numbers[f"{DOWN}.input_global_scale"]) == 2.0
    assert plan.notes[0].endswith("with scales from amax.json, of 5 by a constant of the recipe")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_files_of_tensors(source, tmp_path, dtype):
    file = tmp_path / "amax.safetensors"
    write(file, {f"{name}.input_amax": torch.tensor([3.25], dtype=dtype) for name in MODULES})
    theirs = tmp_path / "theirs.safetensors"
    write(
        theirs,
        {f"{name}.input_quantizer._amax": torch.tensor(3.25, dtype=dtype) for name in MODULES},
    )
    plans = [
        plan_quantize(source, None, Request(scheme="fp8", activation_scales=one))
        for one in (file, theirs, saved(tmp_path, dict.fromkeys(MODULES, 3.25)))
    ]
    assert plans[0].digest == plans[1].digest == plans[2].digest
    assert plans[0].digest != plan_quantize(source, None, Request(scheme="fp8")).digest
    (some, *_) = plans[0].constants
    assert float(torch.frombuffer(bytearray(some.data), dtype=torch.float32)) == f32(3.25 / 448)


BAD = {
    "no module": ({**AMAX, f"{LAYER}mlp.dwon_proj": 1.0}, "has amaxes of what this checkpoint has"),
    "lacking": ({Q: 1.0, K: 1.0}, "has no amax of the inputs of 5 weights: model.layers.0.mlp"),
    "NaN": ({**AMAX, V: math.nan}, f"an amax is a finite number above zero, and {V} is nan"),
    "Inf": ({**AMAX, V: math.inf}, f"{V} is beyond the range of fp32"),
    "beyond fp32": ({**AMAX, V: 1e39}, f"{V} is beyond the range of fp32"),
    "zero": ({**AMAX, V: 0.0}, f"{V} is 0"),
    "negative": ({**AMAX, V: -3.0}, f"{V} is -3"),
    "no scale": ({**AMAX, V: 1e-44}, "makes no fp32 scale"),
    "text": ({**AMAX, V: "3"}, f"{V} is no number"),
    "several": ({**AMAX, V: [1, 2]}, f"{V} is no number"),
    "twice": ({**AMAX, f"{V}.input_amax": 3.0}, f"{V}.input_amax is the second of {V}"),
    "empty": ({}, "it has no amax"),
    "a list": ([1], "expected a JSON object"),
    "keys alone": ({f"{ATTENTION}.k_amax": 2.0}, f"lacks {ATTENTION}.v_amax"),
    "no attention": (
        {"model.layers.7.self_attn.k_amax": 2.0, "model.layers.7.self_attn.v_amax": 2.0},
        "what this checkpoint has not: model.layers.7.self_attn",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_named(source, tmp_path, case):
    amax, message = BAD[case]
    request = Request(scheme="nvfp4", activation_scales=saved(tmp_path, amax))
    with pytest.raises(CheckpointError) as caught:
        plan_quantize(source, None, request)
    assert message in caught.value.message
    assert "amax.json" in caught.value.message or case == "no scale"
    if case == "no module":
        assert DOWN in caught.value.hint


def test_another_process_makes_the_same_plan(source, tmp_path, monkeypatch):
    """What was asked for is told to processes, shares and later runs by paths from the root."""
    saved(tmp_path, AMAX)
    monkeypatch.chdir(tmp_path)
    request = Request(scheme="nvfp4", activation_scales="amax.json")
    plan = plan_quantize(source, None, request)
    document = json.loads(json.dumps(Asked.to_quantize(source, request, {}).document()))
    monkeypatch.chdir("/")
    with Asked.of(document).planned(tmp_path / "out") as (again, _):
        assert again.digest == plan.digest


def test_files_that_are_no_files_of_amaxes(source, tmp_path):
    file = tmp_path / "a.safetensors"
    for tensor in (torch.ones(2), torch.ones((), dtype=torch.int64)):
        write(file, {Q: tensor})
        with pytest.raises(CheckpointError, match="an amax is one number"):
            plan_quantize(source, None, Request(activation_scales=file))
    with pytest.raises(CheckpointError, match="No such file"):
        plan_quantize(source, None, Request(activation_scales=tmp_path / "none.json"))
    with pytest.raises(CheckpointError, match="no file of amaxes"):
        plan_quantize(source, None, Request(activation_scales=tmp_path))


@pytest.mark.parametrize(
    ("scheme", "container", "words"),
    [
        ("mxfp8", "auto", "nothing here has static activations"),
        ("nvfp4", "lowbit", "nothing here has static activations"),
        ("fp8_block128", "deepseek", "nothing here has static activations"),
    ],
)
def test_a_file_of_no_use_is_refused(source, tmp_path, scheme, container, words):
    request = Request(scheme, None, container, activation_scales=saved(tmp_path, AMAX))
    with pytest.raises(UsageError, match=words):
        plan_quantize(source, None, request)


def test_what_has_no_place(source, tmp_path):
    amax = saved(tmp_path, {f"{ATTENTION}.k_amax": 2.0, f"{ATTENTION}.v_amax": 2.0})
    with pytest.raises(RecipeError, match="comfyui has no place for scales of keys and values"):
        plan_quantize(source, None, Request(container="comfyui", activation_scales=amax))
    with pytest.raises(UsageError, match="--fake stores no scales of activations"):
        plan_quantize(source, None, Request(fake=True, activation_scales=amax))


@pytest.mark.parametrize("text", ["kv_scale: 1.0\n", "", "extends: nvfp4\n"])
def test_a_fake_tells_that_constants_of_its_recipe_are_left_out(source, tmp_path, text):
    constant = "" if text else ", activation_scale: 0.05"
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"{text}rules: [{{match: '*', scheme: fp8{constant}}}]\n")
    notes = plan_quantize(source, None, Request(recipe=recipe, fake=True)).notes
    told = [note for note in notes if "stores no scales of activations" in note]
    assert len(told) == (0 if "extends" in text else 1)
    recipe = tmp_path / "r.yaml"
    recipe.write_text("rules: [{match: '*', scheme: nvfp4, activations: static}]\n")
    with pytest.raises(RecipeError, match=r"r.yaml:1:17: activations: static needs the scales"):
        plan_quantize(source, None, Request(recipe=recipe))


def test_modules_that_are_kept_are_told_and_not_written(source, tmp_path):
    done, tensors = written(source, tmp_path, "nvfp4", "modelopt", {**AMAX, "lm_head": 3.0})
    assert "lm_head.input_scale" not in tensors
    said = "amaxes of modules without static activations are not used: lm_head"
    assert said in done.plan.notes


def test_what_stays_fp8_has_no_scales_to_go_with_it(source, tmp_path):
    written(source, tmp_path, "fp8_tensor", "modelopt")
    recipe = tmp_path / "keep.yaml"
    recipe.write_text("container: modelopt\nrules: [{match: '*', keep: true}]\n")
    with pytest.raises(UnsupportedError, match="without scales of activations"):
        plan_quantize(tmp_path / "out", None, Request(recipe=recipe))


@pytest.mark.parametrize("container", ["compressed-tensors", "modelopt", "comfyui"])
@pytest.mark.parametrize("scheme", ["fp8_tensor", "nvfp4"])
def test_the_output_verifies_and_its_consumers_take_it(source, tmp_path, scheme, container):
    amax = dict(AMAX)
    if container != "comfyui":
        amax |= {f"{ATTENTION}.k_amax": 2.0, f"{ATTENTION}.v_amax": 2.0}
    written(source, tmp_path, scheme, container, amax)
    consumers = ["comfyui"] if container == "comfyui" else ["vllm", "sglang"]
    found = api.verify(tmp_path / "out", against=source, device="cpu", consumers=consumers)
    assert [problem for problem in found.problems if problem.severity == "fail"] == []
    back = api.dequantize(tmp_path / "out", tmp_path / "back", device="cpu")
    assert any("scales of activations are not carried over" in note for note in back.plan.notes)
