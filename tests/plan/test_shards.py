"""Output shards hold tensors: what a source's shard held may have moved to another one, and where
a size is asked for, all of them are cut anew.
"""

import json

import pytest
import torch

from lowbitcli import api
from lowbitcli.errors import UsageError
from tests import checkpoints
from tests.checkpoints import INDEX, LAYER, shard_name, sharded, single, weight

DOWN, UP = LAYER + "mlp.down_proj.weight", LAYER + "mlp.up_proj.weight"


def only_scales(tmp_path):
    """A quantized weight whose data is in one shard, and whose scales are in the other."""
    made = api.quantize(single(tmp_path / "source", {DOWN: weight(64, 64)}), tmp_path / "made")
    tensors = checkpoints.read(made.output)
    data = {name: x for name, x in tensors.items() if name.endswith("_packed")}
    scales = {name: x for name, x in tensors.items() if name not in data}
    config = checkpoints.config_of(made.output)
    return sharded(tmp_path / "split", data, scales, config=config)


def an_empty_one(tmp_path, *, index):
    root = sharded(tmp_path / "split", {DOWN: weight(64, 64)}, {})
    if not index:
        (root / INDEX).unlink()
    return root


def files(output):
    return sorted(path.name for path in output.glob("*.safetensors"))


@pytest.mark.parametrize("run", [api.quantize, api.dequantize])
@pytest.mark.parametrize("shape", ["scales", "empty", "empty without an index"])
def test_a_shard_without_tensors_is_not_written(tmp_path, shape, run):
    if shape == "scales":
        source = only_scales(tmp_path)
    else:
        source = an_empty_one(tmp_path, index=shape == "empty")
    done = run(source, tmp_path / "out")
    assert files(done.output) == [shard_name(1, 2)]
    index = json.loads((done.output / INDEX).read_text())
    assert set(index["weight_map"].values()) == {shard_name(1, 2)}
    assert set(index["weight_map"]) == set(checkpoints.read(done.output))
    assert api.verify(done.output, against=source, device="cpu").failures == ()


def test_no_tensors_at_all_still_give_a_file(tmp_path):
    for source in (single(tmp_path / "one", {}), tmp_path / "one" / "model.safetensors"):
        done = api.quantize(source)
        assert checkpoints.read(done.output) == {}
        assert api.verify(done.output, against=source, device="cpu").failures == ()


def test_shards_that_are_all_empty_stay_as_they_are(tmp_path):
    source = sharded(tmp_path / "source", {}, {})
    (source / INDEX).unlink()
    done = api.quantize(source, tmp_path / "out")
    assert files(done.output) == [shard_name(1, 2), shard_name(2, 2)]
    assert not (done.output / INDEX).exists()
    assert api.verify(done.output, against=source, device="cpu").failures == ()


Q, K = LAYER + "self_attn.q_proj.weight", LAYER + "self_attn.k_proj.weight"
NORM = LAYER + "input_layernorm.weight"
EACH = 64 * 64 // 2 + 64 * 64 // 16 + 4  # bytes of an NVFP4 weight [64, 64], scales counted


@pytest.fixture
def two(tmp_path):
    """Two shards whose order is not that of the names, with metadata of their own."""
    return sharded(
        tmp_path / "source",
        {UP: weight(64, 64), Q: weight(64, 64, seed=1)},
        {NORM: weight(1, 64)[0], K: weight(64, 64, seed=2), DOWN: weight(64, 64, seed=3)},
        metadata={"format": "pt", "from": "a test"},
    )


def places(output):
    index = json.loads((output / INDEX).read_text())
    held = {
        path.name: set(checkpoints.header_of(path)) - {"__metadata__"}
        for path in output.glob("*.safetensors")
    }
    assert {name: {k for k, v in index["weight_map"].items() if v == name} for name in held} == held
    bytes_in_all = sum(len(checkpoints.raw(x)) for x in checkpoints.read(output).values())
    assert index["metadata"]["total_size"] == bytes_in_all
    return {name: {x.partition(".weight")[0] for x in names} for name, names in held.items()}


@pytest.mark.parametrize("limit", [2 * EACH, 2 * EACH + 127])  # the norm has 128
def test_shards_are_cut_in_the_order_of_the_source(tmp_path, two, limit):
    request = api.Request(container="compressed-tensors", max_shard_size=limit)
    done = api.quantize(two, tmp_path / "out", request, device="cpu")
    found = places(done.output)
    assert sorted(found) == [shard_name(1, 3), shard_name(2, 3), shard_name(3, 3)]
    names = [name.removesuffix(".weight") for name in (UP, Q, NORM, K, DOWN)]
    assert found[shard_name(1, 3)] == {names[0], names[1]}
    assert found[shard_name(2, 3)] == {names[2], names[3]}
    assert found[shard_name(3, 3)] == {names[4]}
    for name in found:
        assert checkpoints.metadata_of(done.output / name)["from"] == "a test"
    assert api.verify(done.output, against=two, device="cpu").failures == ()


def test_a_weight_above_the_limit_has_a_shard_to_itself(tmp_path, two):
    done = api.quantize(two, tmp_path / "out", api.Request(max_shard_size=1), device="cpu")
    found = places(done.output)
    assert len(found) == 5
    assert all(len(names) == 1 for names in found.values())  # its scales with it


def test_below_the_limit_one_file_needs_no_index(tmp_path, two):
    done = api.quantize(two, tmp_path / "out", api.Request(max_shard_size=10**9), device="cpu")
    assert files(done.output) == ["model.safetensors"]
    assert not (done.output / INDEX).exists()
    back = api.dequantize(done.output, tmp_path / "back", max_shard_size=10_000, device="cpu")
    assert len(places(back.output)) > 1
    assert api.verify(back.output, against=done.output, device="cpu").failures == ()


def test_a_limit_moves_weights_and_changes_none(tmp_path, two):
    plain = api.quantize(two, tmp_path / "plain", device="cpu")
    cut = api.quantize(two, tmp_path / "cut", api.Request(max_shard_size=EACH), device="cpu")
    before, after = checkpoints.read(plain.output), checkpoints.read(cut.output)
    assert before.keys() == after.keys()
    assert all(checkpoints.same(before[name], after[name]) for name in before)
    assert plain.plan.digest != cut.plan.digest


def test_shards_of_a_diffusers_component_are_called_as_there(tmp_path):
    source = tmp_path / "transformer"
    source.mkdir()
    tensors = {"a.weight": weight(64, 64), "b.weight": weight(64, 64)}
    checkpoints.write(source / "diffusion_pytorch_model.safetensors", tensors)
    done = api.quantize(source, tmp_path / "out", api.Request(max_shard_size=EACH), device="cpu")
    stem = "diffusion_pytorch_model"
    assert files(done.output) == [f"{stem}-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert (done.output / f"{stem}.safetensors.index.json").exists()
    assert api.verify(done.output, against=source, device="cpu").failures == ()


def test_a_lone_file_is_not_cut(tmp_path, two):
    lone = two / shard_name(1, 2)
    done = api.quantize(lone, tmp_path / "a.safetensors", api.Request(max_shard_size=2 * EACH))
    assert done.output.is_file()
    with pytest.raises(UsageError) as caught:
        api.quantize(lone, tmp_path / "b.safetensors", api.Request(max_shard_size=2 * EACH - 1))
    assert "one file" in caught.value.message
    assert "directory" in caught.value.hint
    with pytest.raises(UsageError):
        api.plan_quantize(two, None, api.Request(max_shard_size=0))


def test_experts_that_were_a_stack_are_cut_like_others(tmp_path):
    stem = LAYER + "mlp.experts."
    source = single(
        tmp_path / "source",
        {
            stem + "down_proj": torch.stack([weight(64, 64, seed=n) for n in range(4)]),
            DOWN: weight(64, 64),
        },
        {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]},
    )
    done = api.quantize(source, tmp_path / "out", api.Request(max_shard_size=2 * EACH))
    found = places(done.output)
    experts = {f"{stem}{n}.down_proj" for n in range(4)}
    assert set().union(*found.values()) == experts | {DOWN.removesuffix(".weight")}
    assert [len(found[name]) for name in sorted(found)] == [2, 2, 1]
    assert api.verify(done.output, against=source, device="cpu").failures == ()
