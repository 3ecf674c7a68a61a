"""Cases 11 and 12: an index that names what is not there, or does not name what is.

sgl-project/sglang PR#32279, JustVugg/colibri#1317 and PR#1487, NVIDIA/Model-Optimizer PR#2427:
writers that reported success with half the model, or dropped tensors.
"""

import json

import pytest

from lowbitcli.api import Request, dequantize, plan_quantize, quantize
from lowbitcli.errors import CheckpointError
from tests import checkpoints
from tests.checkpoints import LAYER, shard_name, sharded, weight

ONE, TWO = shard_name(1, 2), shard_name(2, 2)
UP, DOWN, OUT = (
    f"{LAYER}{name}.weight" for name in ("mlp.up_proj", "mlp.down_proj", "self_attn.o_proj")
)
TENSORS = {UP: weight(64, 64), DOWN: weight(64, 64, seed=1), OUT: weight(64, 64, seed=2)}


@pytest.fixture
def source(tmp_path):
    return sharded(tmp_path / "source", {UP: TENSORS[UP]}, {k: TENSORS[k] for k in (DOWN, OUT)})


def change(source, edit):
    path = source / checkpoints.INDEX
    index = json.loads(path.read_text())
    edit(index["weight_map"])
    path.write_text(json.dumps(index))


def missing_shard(source):
    (source / TWO).unlink()


def unknown_name(source):
    change(source, lambda places: places.update({LAYER + "mlp.gate_proj.weight": ONE}))


def twice(source):
    checkpoints.write(source / ONE, {UP: TENSORS[UP], DOWN: TENSORS[UP]}, {"format": "pt"})


def outside(source):
    checkpoints.write(source.parent / "evil.safetensors", {DOWN: TENSORS[DOWN]})
    change(source, lambda places: places.update({DOWN: "../evil.safetensors"}))


REFUSED = {
    missing_shard: (TWO, "should hold 2 tensors", "incomplete download?"),
    unknown_name: (f"{LAYER}mlp.gate_proj.weight", f"is in {ONE}", "no shard holds it"),
    twice: (DOWN, ONE, TWO),
    outside: ("../evil.safetensors", "not a plain file name", "nothing outside"),
}


@pytest.mark.parametrize("run", (quantize, dequantize, plan_quantize))
@pytest.mark.parametrize("spoil", REFUSED, ids=lambda spoil: spoil.__name__)
def test_it_is_refused_before_anything_is_written(tmp_path, source, spoil, run):
    spoil(source)
    before = checkpoints.everything_below(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        if run is plan_quantize:
            run(source, tmp_path / "out", Request())
        else:
            run(source, tmp_path / "out", device="cpu")
    assert caught.value.exit_code == 4
    for said in REFUSED[spoil]:
        assert said in f"{caught.value.message}\n{caught.value.hint}"
    assert checkpoints.everything_below(tmp_path) == before


def test_a_tensor_that_the_index_forgot_is_kept_and_said(tmp_path, source):
    change(source, lambda places: places.pop(OUT))
    done = quantize(source, tmp_path / "out", Request(scheme="fp8"), device="cpu")
    assert any(OUT in note for note in done.plan.notes)
    index = json.loads((done.output / checkpoints.INDEX).read_text())
    assert index["weight_map"][OUT] == TWO
    assert OUT in checkpoints.read(done.output)
    with pytest.raises(CheckpointError) as caught:
        quantize(source, tmp_path / "no", Request(scheme="fp8", strict=True), device="cpu")
    assert OUT in caught.value.message
    assert not (tmp_path / "no").exists()


def test_the_commands(tmp_path, source, lowbit):
    change(source, lambda places: places.pop(OUT))
    said = lowbit("quantize", source, "-o", tmp_path / "out", "--device", "cpu")
    assert said.code == 0
    assert OUT in said.err
    assert lowbit("quantize", source, "-o", tmp_path / "no", "--strict").code == 4
    (source / TWO).unlink()
    said = lowbit("quantize", source, "-o", tmp_path / "no")
    assert said.code == 4
    assert f"shard {TWO} is missing" in said.err
    assert "incomplete download?" in said.err
    assert not (tmp_path / "no").exists()
