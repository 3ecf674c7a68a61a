"""A diffusers pipeline goes component by component: the denoiser by the recipe, the others as they
are, byte for byte, unless a pattern names them; and all of it appears at once.
"""

import json
from dataclasses import replace

import pytest
import torch

from lowbitcli import api
from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.errors import CheckpointError, RecipeError, UsageError
from tests import checkpoints
from tests.checkpoints import hashes, sharded, single, weight

Q, K = (f"transformer_blocks.0.attn.to_{part}.weight" for part in "qk")
FF = "transformer_blocks.0.ff.net.0.proj.weight"
T5 = "encoder.block.0.layer.0.SelfAttention.q.weight"
STEM = "diffusion_pytorch_model"
FLUX = {"_class_name": "FluxTransformer2DModel"}


def renamed(root):
    """Give shards the names that diffusers gives them."""
    index = json.loads((root / checkpoints.INDEX).read_text())
    for file in set(index["weight_map"].values()):
        (root / file).rename(root / file.replace("model", STEM))
    places = {name: file.replace("model", STEM) for name, file in index["weight_map"].items()}
    (root / checkpoints.INDEX).unlink()
    (root / f"{STEM}.safetensors.index.json").write_text(
        json.dumps({**index, "weight_map": places})
    )


@pytest.fixture
def pipe(tmp_path):
    root = tmp_path / "pipe"
    sharded(
        root / "transformer",
        {Q: weight(64, 64), FF: weight(128, 64)},
        {K: weight(64, 64, 3.0), "norm_out.linear.weight": weight(64, 64, seed=5)},
        config=FLUX,
    )
    renamed(root / "transformer")
    config = {"model_type": "t5", "architectures": ["T5EncoderModel"]}
    single(root / "text_encoder", {T5: weight(64, 64), "shared.weight": weight(96, 64)}, config)
    (root / "vae").mkdir()
    kernel = weight(32, 64).reshape(32, 64, 1, 1)
    checkpoints.write(root / "vae" / f"{STEM}.safetensors", {"decoder.conv_in.weight": kernel})
    (root / "vae" / "config.json").write_text('{"_class_name": "AutoencoderKL"}')
    for file, text in {
        "model_index.json": '{"_class_name": "FluxPipeline"}',
        "README.md": "a model",
        "scheduler/scheduler_config.json": "{}",
        "tokenizer/vocab.json": "{}",
        "safety_checker/pytorch_model.bin": "not opened",
        ".cache/x": "left out",
    }.items():
        (root / file).parent.mkdir(exist_ok=True)
        (root / file).write_text(text)
    return root


def recipe(tmp_path, text):
    (tmp_path / "recipe.yaml").write_text(text)
    return api.Request(recipe=tmp_path / "recipe.yaml")


def told(pipe, output):
    found = api.verify(output, against=pipe, device="cpu")
    return [(one.kind, one.tensor, one.severity) for one in found.problems]


def test_the_denoiser_is_quantized_and_the_rest_copied_byte_for_byte(tmp_path, pipe):
    done = api.quantize(pipe, tmp_path / "out", device="cpu")
    before, after = hashes(pipe), hashes(done.output)
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed == {
        "lowbit.json",
        "transformer/config.json",
        f"transformer/{STEM}-00001-of-00002.safetensors",
        f"transformer/{STEM}-00002-of-00002.safetensors",
        f"transformer/{STEM}.safetensors.index.json",
    }
    assert set(before) - set(after) == {".cache/x"}
    names = {weight.name for weight in done.plan.quantized}
    assert names == {f"transformer/{name}" for name in (Q, K, FF)}
    assert done.plan.container == "lowbit"
    assert told(pipe, done.output) == []
    # what a component's reader sees is a checkpoint like any other
    alone = api.quantize(pipe / "transformer", tmp_path / "alone", device="cpu")
    inside, outside = hashes(done.output / "transformer"), hashes(alone.output)
    assert {**inside, "lowbit.json": ""} == {**outside, "lowbit.json": ""}


def test_what_a_component_is_told_says_which(tmp_path, pipe):
    tensors = checkpoints.read(pipe / "text_encoder")
    tensors["odd.weight"] = weight(64, 40)
    single(pipe / "text_encoder", tensors, {"model_type": "t5"})
    text = 'rules: [{match: ["text_encoder/*", "*"], scheme: mxfp8}]'
    plan = api.plan_quantize(pipe, None, recipe(tmp_path, text))
    (told,) = [note for note in plan.notes if "a rule takes these" in note]
    assert told.startswith("text_encoder: ") and "odd.weight: 40 columns" in told


def test_it_comes_back_and_is_inspected(tmp_path, pipe):
    done = api.quantize(pipe, tmp_path / "out", api.Request(scheme="mxfp8"), device="cpu")
    seen = api.inspect(done.output)
    assert (seen.container, seen.findings) == ("lowbit", ())
    assert seen.schemes["mxfp8"][0] == 3
    back = api.dequantize(done.output, tmp_path / "back", device="cpu")
    assert told(done.output, back.output) == [("nothing", "", "warn")]
    before, after = hashes(pipe), hashes(back.output)
    kept = {name for name in before if before[name] == after.get(name)}
    assert {"vae/config.json", f"vae/{STEM}.safetensors", "text_encoder/model.safetensors"} <= kept
    assert checkpoints.config_of(back.output / "transformer") == FLUX
    with Checkpoint.open(back.output) as found:
        assert set(found.tensors) == {
            *(f"transformer/{x}" for x in (Q, K, FF, "norm_out.linear.weight")),
            *(f"text_encoder/{x}" for x in (T5, "shared.weight")),
            "vae/decoder.conv_in.weight",
        }


def test_a_pattern_with_a_slash_names_another_component(tmp_path, pipe):
    request = recipe(
        tmp_path,
        'rules: [{match: "text_enc*/*", scheme: fp8_channel}, {match: "*.attn.*", scheme: nvfp4}]',
    )
    done = api.quantize(pipe, tmp_path / "out", request, device="cpu")
    found = {weight.name: weight.target.name for weight in done.plan.quantized}
    assert found == {
        f"transformer/{Q}": "nvfp4",
        f"transformer/{K}": "nvfp4",
        f"text_encoder/{T5}": "fp8_channel",
    }
    assert done.plan.container == "compressed-tensors, lowbit"
    assert [x for x in done.plan.notes if "diffusers 0.42 does not read lowbit" in x]
    assert not [x for x in done.plan.notes if "diffusers 0.42 does not read compressed" in x]
    said = checkpoints.quantization_of(done.output / "text_encoder")
    assert said["quant_method"] == "compressed-tensors"
    assert checkpoints.quantization_of(done.output / "transformer")["quant_method"] == "lowbit"
    assert told(pipe, done.output) == []


TURNED, STACK = "h.0.attn.c_attn.weight", "blocks.0.mlp.experts.down_proj"
LAYOUT = """
layout: {"text_encoder/*.c_attn": in_out, "*.experts.down_proj": in_out}
rules: [{match: ["*", "text_encoder/*"], scheme: nvfp4}]
"""


@pytest.fixture
def turned(pipe):
    """A text encoder with a matrix that is [in, out], and a denoiser with a stack that is."""
    config = {"model_type": "gpt2", "architectures": ["GPT2Model"]}
    single(pipe / "text_encoder", {TURNED: weight(64, 192), "x.weight": weight(64, 64)}, config)
    tensors = {Q: weight(64, 64), STACK: weight(64, 96).reshape(2, 32, 96)}
    for file in (pipe / "transformer").iterdir():
        file.unlink()
    checkpoints.write(pipe / "transformer" / f"{STEM}.safetensors", tensors)
    (pipe / "transformer" / "config.json").write_text(json.dumps(FLUX))
    return pipe


def test_a_recipe_says_how_weights_of_components_lie(tmp_path, turned):
    request = replace(recipe(tmp_path, LAYOUT), container="lowbit")
    done = api.quantize(turned, tmp_path / "out", request, device="cpu")
    shapes = {weight.name: weight.shape for weight in done.plan.quantized}
    assert shapes[f"text_encoder/{TURNED}"] == (192, 64)
    assert shapes[f"transformer/{STACK}"] == (2, 96, 32)
    assert done.plan.recipe["layout"] == {
        "text_encoder": [["*.c_attn", "in_out"]],
        "transformer": [["*.experts.down_proj", "in_out"]],
    }
    assert told(turned, done.output) == []
    back = api.dequantize(done.output, tmp_path / "back", dtype="fp32", device="cpu")
    for part, name in (("text_encoder", TURNED), ("transformer", STACK)):
        before = checkpoints.read(turned / part)[name].transpose(-1, -2)
        apart = before.reshape(-1, *before.shape[-2:]).contiguous()
        plain = {f"{number}.weight": one.clone() for number, one in enumerate(apart)}
        source = checkpoints.write(tmp_path / f"{part}.safetensors", plain)
        alone = api.quantize(source, tmp_path / f"{part}-q.safetensors", device="cpu")
        found = api.dequantize(alone.output, tmp_path / f"{part}-d.safetensors", dtype="fp32")
        values = checkpoints.read(found.output)
        wanted = torch.stack([values[one] for one in plain]).reshape(before.shape)
        assert torch.equal(checkpoints.read(back.output / part)[name], wanted.transpose(-1, -2))


def test_without_it_both_are_kept_and_told_of(tmp_path, turned):
    text = 'rules: [{match: ["*", "text_encoder/*"], scheme: nvfp4}]'
    plan = api.plan_quantize(turned, None, replace(recipe(tmp_path, text), container="lowbit"))
    kept = {weight.name: weight.kept for weight in plan.weights}
    assert kept[f"text_encoder/{TURNED}"] == "stored [in, out]"
    assert "nothing says which" in kept[f"transformer/{STACK}"]


@pytest.mark.parametrize("dead", ["*.c_attn", "text_encoder/*.down_proj", "vae/*", "tex/*.c_attn"])
def test_a_layout_that_no_component_has_is_refused(tmp_path, turned, dead):
    """One without a slash is for the denoiser, and the text encoder's is not."""
    text = (
        f'layout: {{"{dead}": in_out}}\nrules: [{{match: ["*", "text_encoder/*"], scheme: nvfp4}}]'
    )
    with pytest.raises(RecipeError, match="takes no stack of experts and no matrix"):
        api.plan_quantize(turned, None, recipe(tmp_path, text))


def test_what_is_taken_out_is_taken_out_where_it_is(tmp_path, pipe):
    request = recipe(
        tmp_path,
        f'rules: [{{match: ["*", "text_encoder/*"], scheme: mxfp8}}]\nkeep: ["transformer/{FF}"]',
    )
    plan = api.plan_quantize(pipe, None, request)
    assert {weight.name for weight in plan.quantized} == {
        *(f"transformer/{name}" for name in (Q, K)),
        f"text_encoder/{T5}",
    }


def test_a_pattern_without_a_slash_is_for_the_denoiser_alone(tmp_path, pipe):
    wo = "encoder.block.0.layer.1.DenseReluDense.wo.weight"
    single(pipe / "text_encoder", {T5: weight(64, 64), wo: weight(64, 64)}, {"model_type": "t5"})
    text = 'rules: [{match: ["*", "text_encoder/*SelfAttention*"], scheme: mxfp8}]'
    plan = api.plan_quantize(pipe, None, recipe(tmp_path, text))
    names = {weight.name for weight in plan.quantized if weight.name.startswith("text")}
    assert names == {f"text_encoder/{T5}"}


@pytest.mark.parametrize("dead", ["vea/*", "text_encoder/*.to_q*", "re:transformer/.*ffn.*"])
def test_a_pattern_that_no_component_has_is_refused(tmp_path, pipe, dead):
    text = f'rules: [{{match: "*", scheme: mxfp8}}, {{match: "{dead}", scheme: mxfp8}}]'
    with pytest.raises(RecipeError) as caught:
        api.plan_quantize(pipe, None, recipe(tmp_path, text))
    assert dead in caught.value.message
    assert "recipe.yaml:1:" in caught.value.message


def test_two_denoisers_share_the_rules(tmp_path, pipe):
    single(
        pipe / "transformer_2",
        {Q: weight(64, 64, seed=9), "only.here.weight": weight(64, 64)},
        FLUX,
    )
    text = 'rules: [{match: "only.*", scheme: nvfp4}, {match: "*", scheme: mxfp8}]'
    done = api.quantize(pipe, tmp_path / "out", recipe(tmp_path, text), device="cpu")
    found = {weight.name: weight.target.name for weight in done.plan.quantized}
    assert found[f"transformer/{Q}"] == found[f"transformer_2/{Q}"] == "mxfp8"
    assert found["transformer_2/only.here.weight"] == "nvfp4"
    assert told(pipe, done.output) == []


def test_shards_are_cut_within_their_component(tmp_path, pipe):
    request = api.Request(scheme="mxfp8", max_shard_size=8_000)
    done = api.quantize(pipe, tmp_path / "out", request, device="cpu")
    shards = sorted(path.name for path in (done.output / "transformer").glob("*.safetensors"))
    assert shards == [f"{STEM}-0000{n}-of-00004.safetensors" for n in (1, 2, 3, 4)]
    assert (done.output / "text_encoder" / "model.safetensors").exists()
    assert told(pipe, done.output) == []


@pytest.mark.parametrize("file", ["transformer", "vae"])
def test_a_changed_byte_is_found_in_every_component(tmp_path, pipe, file):
    done = api.quantize(pipe, tmp_path / "out", device="cpu")
    path = sorted((done.output / file).glob("*.safetensors"))[0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert {kind for kind, *_ in told(pipe, done.output)} >= {"manifest"}


def test_the_index_of_a_component_is_checked(tmp_path, pipe):
    done = api.quantize(pipe, tmp_path / "out", device="cpu")
    path = done.output / "transformer" / f"{STEM}.safetensors.index.json"
    index = json.loads(path.read_text())
    index["metadata"]["total_size"] += 1
    path.write_text(json.dumps(index))
    found = api.verify(done.output, device="cpu")
    assert "index" in {one.kind for one in found.failures}


def test_nothing_appears_where_one_component_fails(tmp_path, pipe):
    shard = pipe / "vae" / f"{STEM}.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    before = checkpoints.everything_below(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        api.quantize(pipe, tmp_path / "out", device="cpu")
    assert "vae" in caught.value.message
    assert checkpoints.everything_below(tmp_path) == before


def test_a_second_run_finds_it_complete_and_a_nan_is_kept(tmp_path, pipe):
    bad = weight(64, 64)
    bad[1, 2] = float("nan")
    single(pipe / "transformer_2", {Q: bad, FF: weight(64, 64)}, FLUX)
    request = api.Request(scheme="mxfp8", nonfinite="keep")
    done = api.quantize(pipe, tmp_path / "out", request, device="cpu")
    assert set(done.non_finite) == {f"transformer_2/{Q}"}
    assert f"transformer_2/{FF}" in {weight.name for weight in done.plan.quantized}
    assert api.quantize(pipe, tmp_path / "out", request, device="cpu").complete


def test_without_a_denoiser_or_weights_it_is_refused(tmp_path, pipe):
    (pipe / "transformer").rename(pipe / "backbone")
    with pytest.raises(UsageError) as caught:
        api.plan_quantize(pipe, None, api.Request())
    assert "backbone, text_encoder, vae" in caught.value.message
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "model_index.json").write_text("{}")
    with pytest.raises(CheckpointError):
        api.plan_quantize(tmp_path / "empty", None, api.Request())
