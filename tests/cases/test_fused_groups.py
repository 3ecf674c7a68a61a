"""Cases 6, 7 and 9: weights that are served as one matrix share one global scale, wherever they
are, and a recipe that gives them different schemes is refused.

vllm-project/llm-compressor PR#2566 and PR#1988, vllm-project/vllm#54974 and PR#55073, PR#11354,
NVIDIA/TensorRT-LLM PR#14199, ROCm/ATOM PR#2292: readers take the largest for all, or the first, or
refuse the file.
"""

import json

import pytest
import torch

from lowbitcli.api import Request, dequantize, quantize
from lowbitcli.errors import RecipeError
from tests import checkpoints
from tests.checkpoints import LAYER, sharded, single, weight

SHARED = {"nvfp4": ".weight_global_scale", "fp8": ".weight_scale"}


def attention(layer, letter, **options):
    scale = 10.0 if letter == "k" else 1.0
    w = weight(64, 64, scale, seed=10 * layer + ord(letter))
    return {f"model.layers.{layer}.self_attn.{letter}_proj.weight": w}


def six(root):
    """Case 6: two layers whose q, k and v lie in three shards, out of order."""
    return sharded(
        root,
        {**attention(0, "q"), **attention(1, "q")},
        {**attention(0, "k"), **attention(1, "v")},
        {**attention(1, "k"), **attention(0, "v")},
    )


def six_b(root):
    """Case 6b: a shard that holds nothing but partners."""
    return sharded(
        root,
        {**attention(0, "q"), **attention(1, "q"), **attention(1, "k"), **attention(1, "v")},
        {**attention(0, "k"), **attention(0, "v")},
    )


def six_c(root):
    """Case 6c: the simple split, q | k, v."""
    return sharded(
        root,
        {**attention(0, "q"), **attention(1, "q")},
        {**attention(0, "k"), **attention(0, "v"), **attention(1, "k"), **attention(1, "v")},
    )


def placement(root):
    """Return file -> modules of it."""
    return {
        file.name: {
            name.rsplit(".", 1)[0] for name in checkpoints.header_of(file) if name != "__metadata__"
        }
        for file in root.glob("*.safetensors")
    }


@pytest.mark.parametrize("container", ("compressed-tensors", "lowbit"))
@pytest.mark.parametrize("scheme", SHARED)
@pytest.mark.parametrize("build", (six, six_b, six_c))
def test_qkv_over_shards(tmp_path, build, scheme, container):
    source = build(tmp_path / "source")
    request = Request(scheme=scheme, container=container)
    done = quantize(source, tmp_path / "out", request, device="cpu")
    written, weights = checkpoints.read(done.output), checkpoints.read(source)
    expected = []
    for layer in (0, 1):
        stem = f"model.layers.{layer}.self_attn."
        stored = [written[f"{stem}{x}_proj{SHARED[scheme]}"] for x in "qkv"]
        assert all(checkpoints.same(stored[0], other) for other in stored[1:])
        amax = max(float(weights[f"{stem}{x}_proj.weight"].float().abs().max()) for x in "qkv")
        expected.append(torch.tensor(amax) / (2688 if scheme == "nvfp4" else 448))
        scale = stored[0].reshape(())
        if scheme == "nvfp4" and container == "compressed-tensors":
            assert torch.equal(scale, expected[-1].reciprocal())
        else:
            assert torch.equal(scale, expected[-1])
    assert expected[0] != expected[1], "layers are independent"
    assert placement(done.output) == placement(source)
    index = json.loads((done.output / checkpoints.INDEX).read_text())
    assert index["weight_map"] == {
        name: file.name
        for file in done.output.glob("*.safetensors")
        for name in checkpoints.header_of(file)
        if name != "__metadata__"
    }


def test_the_order_of_shards_does_not_matter(tmp_path):
    first = quantize(six(tmp_path / "a"), tmp_path / "out-a", device="cpu")
    second = quantize(six_c(tmp_path / "b"), tmp_path / "out-b", device="cpu")
    one, other = checkpoints.read(first.output), checkpoints.read(second.output)
    assert one.keys() == other.keys()
    assert all(checkpoints.same(one[name], other[name]) for name in one)


NAMES = {
    "gate": ("mlp.experts", "gate_proj", "up_proj", "down_proj"),
    "w1": ("block_sparse_moe.experts", "w1", "w3", "w2"),
}


@pytest.mark.parametrize("names", NAMES)
def test_gate_and_up_of_an_expert(tmp_path, names):
    block, gate, up, down = NAMES[names]
    tensors = {}
    for expert in (0, 1):
        stem = f"{LAYER}{block}.{expert}."
        tensors[f"{stem}{gate}.weight"] = weight(64, 64, 1, seed=expert)
        tensors[f"{stem}{up}.weight"] = weight(64, 64, 10, seed=expert + 2)
        tensors[f"{stem}{down}.weight"] = weight(64, 64, seed=expert + 4)
    source = single(tmp_path / "source", tensors)
    done = quantize(source, tmp_path / "out", Request(scheme="nvfp4"), device="cpu")
    written = checkpoints.read(done.output)
    shared = []
    for expert in (0, 1):
        stem = f"{LAYER}{block}.{expert}."
        one = written[f"{stem}{gate}.weight_global_scale"]
        assert checkpoints.same(one, written[f"{stem}{up}.weight_global_scale"])
        assert not torch.equal(one, written[f"{stem}{down}.weight_global_scale"])
        shared.append(one)
        # Made for the shared value, not relabelled: a tenth of what gate's own would be.
        top = written[f"{stem}{gate}.weight_scale"].float().max()
        assert 20 < float(top) < 100
        assert float(written[f"{stem}{up}.weight_scale"].float().max()) == 448
    assert not torch.equal(*shared), "experts are independent"
    back = dequantize(done.output, tmp_path / "back", dtype="fp32", device="cpu")
    restored = checkpoints.read(back.output)
    for name, w in tensors.items():
        lost = (restored[name] - w.float()).norm() / w.float().norm()
        assert float(lost) < 0.12, name


def recipe_of(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return path


SPLITS = {
    "kept": (
        'rules:\n  - match: "*"\n    scheme: nvfp4\n    exclude: "re:.*k_proj"\n',
        "k_proj.weight: kept",
    ),
    "other scheme": (
        'rules:\n  - match: "*k_proj.weight"\n    scheme: mxfp8\n'
        '  - match: "*"\n    scheme: nvfp4\n',
        "k_proj.weight: mxfp8",
    ),
}


@pytest.mark.parametrize("split", SPLITS)
def test_a_recipe_that_splits_a_group_is_refused(tmp_path, split):
    text, k = SPLITS[split]
    source, recipe = six(tmp_path / "source"), recipe_of(tmp_path, text)
    with pytest.raises(RecipeError) as caught:
        quantize(source, tmp_path / "out", Request(recipe=recipe), device="cpu")
    message = caught.value.message
    assert caught.value.exit_code == 3
    assert f"model.layers.0.self_attn.{k}" in message
    assert "model.layers.0.self_attn.q_proj.weight: nvfp4" in message
    assert "--allow-split-groups" in caught.value.hint
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("split", SPLITS)
def test_allow_split_groups_overrides(tmp_path, split):
    source, recipe = six(tmp_path / "source"), recipe_of(tmp_path, SPLITS[split][0])
    request = Request(recipe=recipe, allow_split_groups=True)
    done = quantize(source, tmp_path / "out", request, device="cpu")
    written = checkpoints.read(done.output)
    stem = "model.layers.0.self_attn."
    q, v = (written[f"{stem}{x}_proj.weight_global_scale"] for x in "qv")
    assert checkpoints.same(q, v)
    assert f"{stem}k_proj.weight_global_scale" not in written
    assert (f"{stem}k_proj.weight_scale" in written) == (split == "other scheme")


def test_a_layout_that_splits_a_group_is_blamed_for_it(tmp_path):
    source = six(tmp_path / "source")
    recipe = tmp_path / "r.yaml"
    recipe.write_text("extends: nvfp4\nlayout:\n  '*.q_proj': in_out\n")
    with pytest.raises(RecipeError) as caught:
        quantize(source, tmp_path / "out", Request(recipe=recipe), device="cpu")
    assert caught.value.message.startswith(f"{recipe}:3:3: the recipe splits a fused group (")
    assert ".q_proj.weight: kept, stored [in, out], which readers of" in caught.value.message
    assert caught.value.hint.startswith("the layout takes some of these, and not the others; ")


def test_the_commands(tmp_path, lowbit):
    source, recipe = six(tmp_path / "source"), recipe_of(tmp_path, SPLITS["kept"][0])
    said = lowbit("quantize", source, "--recipe", recipe, "-o", tmp_path / "out")
    assert said.code == 3
    assert "splits a fused group" in said.err
    assert "k_proj.weight: kept" in said.err
    assert not (tmp_path / "out").exists()
    assert lowbit("quantize", source, "-o", tmp_path / "out", "--device", "cpu").code == 0
