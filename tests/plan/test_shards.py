"""Output shards hold tensors: what a source's shard held may have moved to another one."""

import json

import pytest

from lowbitcli import api
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
