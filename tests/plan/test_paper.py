"""A plan is the output on paper: each name, dtype, shape, offset and size before a byte is read."""

import json
import subprocess
import sys

import pytest
import torch

from lowbitcli.api import Request, dequantize, plan_quantize, quantize
from lowbitcli.errors import RecipeError, UnsupportedError, UsageError
from lowbitcli.plan.prepare import dequantization
from tests import checkpoints
from tests.checkpoints import CONFIG, LAYER, sharded, single, weight

SCHEMES = ("fp8", "fp8-dynamic", "mxfp8", "nvfp4")
CONTAINERS = ("lowbit", "compressed-tensors")


def model():
    return (
        {
            "model.embed_tokens.weight": weight(48, 64),
            LAYER + "self_attn.q_proj.weight": weight(64, 64),
            LAYER + "self_attn.q_proj.bias": weight(1, 64)[0],
            LAYER + "ids": torch.arange(7, dtype=torch.uint8),
        },
        {
            LAYER + "self_attn.k_proj.weight": weight(64, 64, 10, seed=1),
            LAYER + "self_attn.v_proj.weight": weight(64, 64, seed=2).float(),
            LAYER + "mlp.down_proj.weight": weight(64, 40),
            "scalar": torch.tensor(3.0, dtype=torch.float64),
            "empty": torch.zeros(0, 5, dtype=torch.float16),
        },
        {"lm_head.weight": weight(48, 64, seed=3), "model.norm.weight": weight(1, 64)[0]},
    )


@pytest.fixture
def source(tmp_path):
    root = sharded(tmp_path / "source", *model(), metadata={"format": "pt", "who": "me"})
    (root / "tokenizer.json").write_text('{"a": 1}')
    (root / "hf_quant_config.json").unlink(missing_ok=True)
    return root


def on_paper(file):
    """Return what a planned file says: name -> (dtype, shape, first byte, last)."""
    return {
        name: (entry.spec.dtype, list(entry.spec.shape), entry.start, entry.stop)
        for name, entry in file.entries.items()
    }


def on_disk(path):
    base = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    return {
        name: (entry["dtype"], entry["shape"], *(base + at for at in entry["data_offsets"]))
        for name, entry in checkpoints.header_of(path).items()
        if name != "__metadata__"
    }


def held_to_it(plan, output):
    """Hold that the files of `output` are those of the plan, to the byte."""
    assert sorted(file.name for file in plan.files) == sorted(
        path.name for path in output.glob("*.safetensors")
    )
    for file in plan.files:
        path = output / file.name
        assert on_paper(file) == on_disk(path)
        assert path.stat().st_size == file.size
        assert path.read_bytes()[: len(file.header)] == file.header
    index = json.loads((output / checkpoints.INDEX).read_text())
    assert index == json.loads(plan.index)
    assert index["metadata"]["total_size"] == sum(
        stop - start for file in plan.files for _, _, start, stop in on_paper(file).values()
    )
    assert index["weight_map"] == {
        name: file.name for file in plan.files for name in sorted(file.entries)
    }
    assert plan.bytes_out == sum(path.stat().st_size for path in output.glob("*.safetensors"))


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_files_are_those_of_the_plan(tmp_path, source, scheme, container):
    request = Request(scheme=scheme, container=container)
    plan = plan_quantize(source, tmp_path / "out", request)
    before = checkpoints.everything_below(tmp_path)
    assert "out" not in before
    done = quantize(source, tmp_path / "out", request, device="cpu")
    assert done.plan == plan
    held_to_it(plan, done.output)
    with dequantization(done.output, tmp_path / "back", "fp16") as (back, _):
        pass
    restored = dequantize(done.output, tmp_path / "back", dtype="fp16", device="cpu")
    assert restored.plan == back
    held_to_it(back, restored.output)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_single_file_is_that_of_the_plan(tmp_path, scheme):
    tensors = {name: tensor for shard in model() for name, tensor in shard.items()}
    source = checkpoints.write(tmp_path / "any.safetensors", tensors, {"who": "me"})
    request = Request(scheme=scheme)
    plan = plan_quantize(source, tmp_path / "out.safetensors", request)
    done = quantize(source, tmp_path / "out.safetensors", request, device="cpu")
    (file,) = plan.files
    assert on_paper(file) == on_disk(done.output)
    assert done.output.stat().st_size == file.size == plan.bytes_out
    assert checkpoints.metadata_of(done.output)["who"] == "me"
    assert plan.index is None


def test_tensors_start_where_their_dtype_can_be_mapped(tmp_path, source):
    plan = plan_quantize(source, tmp_path / "out", Request())
    width = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
    for file in plan.files:
        for name, (dtype, _, start, _) in on_paper(file).items():
            assert start % width.get(dtype, 1) == 0, name


def test_every_kept_tensor_has_its_reason(tmp_path, source):
    plan = plan_quantize(source, tmp_path / "out", Request())
    assert {weight.name: weight.kept for weight in plan.weights} == {
        "empty": "its name does not end in .weight",
        "lm_head.weight": "head",
        "model.embed_tokens.weight": "embedding",
        LAYER + "ids": "its dtype is U8",
        LAYER + "mlp.down_proj.weight": "40 columns are no multiple of 16, which nvfp4 needs",
        LAYER + "self_attn.k_proj.weight": "",
        LAYER + "self_attn.q_proj.bias": "1-dimensional",
        LAYER + "self_attn.q_proj.weight": "",
        LAYER + "self_attn.v_proj.weight": "",
        "model.norm.weight": "norm",
        "scalar": "its dtype is F64",
    }


def test_a_fused_group_is_one_job_over_the_shards(tmp_path, source):
    jobs = plan_quantize(source, tmp_path / "out", Request()).jobs
    shared = [[weight.name for weight in job.weights] for job in jobs if job.shared]
    assert shared == [[f"{LAYER}self_attn.{x}_proj.weight" for x in "kqv"]]
    names = [weight.name for job in jobs for weight in job.weights]
    assert sorted(names) == sorted(name for shard in model() for name in shard)
    alone = plan_quantize(source, tmp_path / "out", Request(scheme="mxfp8")).jobs
    assert not any(job.shared for job in alone), "MXFP8 shares nothing"


@pytest.mark.parametrize("model_type", ("gpt2", "openai-gpt", "imagegpt"))
@pytest.mark.parametrize("scheme", SCHEMES)
def test_layers_stored_in_by_out_are_kept(tmp_path, model_type, scheme):
    tensors = {
        "h.0.attn.c_attn.weight": weight(64, 192),
        "h.0.mlp.c_fc.weight": weight(64, 256),
        "h.0.mlp.c_proj.weight": weight(256, 64),
        "h.0.other.weight": weight(64, 64),
    }
    source = single(tmp_path / "source", tensors, {"model_type": model_type})
    plan = plan_quantize(source, tmp_path / "out", Request(scheme=scheme))
    kept = {weight.name: weight.kept for weight in plan.weights}
    assert kept.pop("h.0.other.weight") == ""
    assert set(kept.values()) == {"stored [in, out]"}
    llama = single(tmp_path / "llama", tensors, {"model_type": "llama"})
    plan = plan_quantize(llama, tmp_path / "out", Request(scheme=scheme))
    assert len(plan.quantized) == 4
    with pytest.raises(UnsupportedError, match="in, out"):
        plan_quantize(source, tmp_path / "out", Request(scheme=scheme, strict=True))


def test_naming_such_a_layer_is_an_error_of_the_recipe(tmp_path):
    source = single(
        tmp_path / "source", {"h.0.mlp.c_fc.weight": weight(64, 256)}, {"model_type": "gpt2"}
    )
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("rules: [{match: h.0.mlp.c_fc, scheme: nvfp4}]\n")
    with pytest.raises(RecipeError, match="in, out"):
        plan_quantize(source, tmp_path / "out", Request(recipe=recipe))


def test_header_metadata_is_kept_file_by_file(tmp_path):
    source = sharded(tmp_path / "source", *model())
    for number, shard in enumerate(model(), 1):
        said = {"format": "pt", "shard": str(number)}
        checkpoints.write(source / checkpoints.shard_name(number, 3), shard, said)
    done = quantize(source, tmp_path / "out", Request(container="lowbit"), device="cpu")
    for number in (1, 2, 3):
        metadata = checkpoints.metadata_of(done.output / checkpoints.shard_name(number, 3))
        assert metadata["shard"] == str(number)
        described = json.loads(metadata["lowbit.weights"])
        assert len(described) == (1, 2, 0)[number - 1]
    again = quantize(
        done.output, tmp_path / "again", Request(container="compressed-tensors"), device="cpu"
    )
    for path in again.output.glob("*.safetensors"):
        assert checkpoints.metadata_of(path).keys() == {"format", "shard"}


def test_what_else_is_in_the_directory(tmp_path, source):
    (source / "pytorch_model.bin").write_bytes(b"old")
    (source / "generation_config.json").write_text("{}")
    done = quantize(source, tmp_path / "out", device="cpu")
    assert sorted(path.name for path in done.output.iterdir()) == [
        "config.json",
        "generation_config.json",
        "lowbit.json",
        *(checkpoints.shard_name(number, 3) for number in (1, 2, 3)),
        checkpoints.INDEX,
        "tokenizer.json",
    ]
    assert any("pytorch_model.bin" in note for note in done.plan.notes)


@pytest.mark.parametrize(
    ("config", "container"),
    [
        (CONFIG, "compressed-tensors"),
        ({"architectures": ["X"]}, "compressed-tensors"),
        ({"_class_name": "FluxTransformer2DModel"}, "lowbit"),
        (None, "lowbit"),
    ],
)
def test_the_container_that_the_source_suggests(tmp_path, config, container):
    source = single(tmp_path / "source", model()[0], config)
    assert plan_quantize(source, None, Request()).container == container


def test_compressed_tensors_needs_a_config(tmp_path):
    source = single(tmp_path / "source", model()[0], None)
    with pytest.raises(UsageError, match=r"needs a config\.json"):
        plan_quantize(source, None, Request(container="compressed-tensors"))


def test_the_plain_container_holds_nothing_quantized(tmp_path, source):
    with pytest.raises(RecipeError, match="plain has no nvfp4"):
        plan_quantize(source, None, Request(container="plain"))


def test_a_weight_that_stays_quantized_needs_a_container_that_has_it(tmp_path, source):
    done = quantize(source, tmp_path / "out", device="cpu")
    recipe = tmp_path / "keep.yaml"
    recipe.write_text('rules: [{match: "*", keep: true}]\n')
    request = Request(recipe=recipe, container="plain")
    with pytest.raises(UnsupportedError, match="stays nvfp4") as caught:
        plan_quantize(done.output, None, request)
    assert "dequantize" in caught.value.hint
    plan = plan_quantize(done.output, None, Request(recipe=recipe))
    assert {weight.name for weight in plan.weights if weight.recodes} == {
        f"{LAYER}self_attn.{x}_proj.weight" for x in "qkv"
    }


def test_a_group_of_which_a_part_is_quantized_already_is_split(tmp_path):
    """The others cannot take on the scale that is stored."""
    one = single(tmp_path / "q", {LAYER + "self_attn.q_proj.weight": weight(64, 64)})
    done = quantize(one, tmp_path / "mixed", Request(container="lowbit"), device="cpu")
    rest = {f"{LAYER}self_attn.{x}_proj.weight": weight(64, 64, seed=ord(x)) for x in "kv"}
    (done.output / "model.safetensors").rename(done.output / "model-00001-of-00002.safetensors")
    checkpoints.write(done.output / "model-00002-of-00002.safetensors", rest)
    with pytest.raises(RecipeError, match=r"q_proj\.weight: nvfp4 as it is stored"):
        plan_quantize(done.output, None, Request())
    plan = plan_quantize(done.output, None, Request(scheme="mxfp8"))
    assert {weight.target.name for weight in plan.quantized} == {"mxfp8"}
    assert len(plan_quantize(done.output, None, Request(allow_split_groups=True)).jobs) == 2


def test_digests_differ_where_the_output_would(tmp_path, source):
    requests = [
        Request(),
        Request(scheme="fp8"),
        Request(container="lowbit"),
        Request(fake=True),
        Request(scheme="fp8", fake=True),
    ]
    digests = [plan_quantize(source, None, request).digest for request in requests]
    assert len(set(digests)) == len(requests)
    again = [plan_quantize(source, tmp_path / "elsewhere", x).digest for x in requests]
    assert again == digests


def test_no_tensor_library_is_loaded():
    code = (
        "import sys, lowbitcli.plan.prepare, lowbitcli.plan.inspection;"
        "print([name for name in ('torch', 'triton', 'numpy', 'numba') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")
