"""What a run tells of what it read and of what it made: bytes that are not those that lowbit wrote,
weights of which hardly anything is left."""

import pytest

from lowbitcli import tables
from lowbitcli.api import Request, dequantize, quantize, verify
from lowbitcli.errors import CheckpointError
from tests import checkpoints
from tests.checkpoints import single, weight
from tests.pipeline.test_through import ATTENTION, CONTAINERS, DOWN, NORM, source

__all__ = ["source"]


@pytest.mark.parametrize("container", CONTAINERS)
def test_what_lowbit_wrote_is_not_taken_damaged(tmp_path, source, container):
    """A run reads every byte, and holds it to the manifest of its source."""
    done = quantize(
        source, tmp_path / "out", Request(scheme="nvfp4", container=container), device="cpu"
    )
    file = next(f for f in done.output.glob("*.safetensors") if NORM in checkpoints.header_of(f))
    damaged = bytearray(file.read_bytes())
    begin, _ = checkpoints.header_of(file)[NORM]["data_offsets"]
    damaged[8 + int.from_bytes(damaged[:8], "little") + begin] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(CheckpointError, match="its bytes are not those that lowbit wrote") as found:
        dequantize(done.output, tmp_path / "back", device="cpu")
    assert str(found.value).startswith(f"{NORM}: ")
    assert not (tmp_path / "back").exists()
    (done.output / "lowbit.json").unlink()
    assert dequantize(done.output, tmp_path / "back", device="cpu").output.exists()


def test_what_somebody_wrote_anew_since_is_promised_by_nobody(tmp_path, source):
    """A training may save its weights where dequantized ones were, beside their manifest."""
    quantize(source, tmp_path / "out", Request(scheme="nvfp4"), device="cpu")
    plain = dequantize(tmp_path / "out", tmp_path / "plain", device="cpu").output
    for file in plain.glob("*.safetensors"):
        trained = {name: tensor * 2 for name, tensor in checkpoints.read(file).items()}
        checkpoints.write(file, trained, {"format": "pt"})
    assert quantize(plain, tmp_path / "again", Request(scheme="nvfp4"), device="cpu").errors


@pytest.mark.parametrize("fake", [False, True])
def test_a_weight_of_which_hardly_anything_is_left_is_told(tmp_path, fake):
    tiny = weight(128, 128).float() * 1e-40
    source = single(tmp_path / "source", {DOWN: tiny, ATTENTION[0]: tiny * 0, NORM: tiny[0]})
    request = Request(scheme="fp8_block128", container="lowbit", fake=fake)
    done = quantize(source, tmp_path / "out", request, device="cpu")
    assert done.lost == [DOWN]
    told = f"hardly anything of these is left:\n{DOWN}: SQNR 0.0 dB"
    assert done.notes == (*done.plan.notes, told)
    assert tables.outcome_document(done)["notes"][-1] == told
    found = verify(done.output, against=source, device="cpu")
    told = [(x.severity, x.tensor) for x in found.problems if x.kind == "quality"]
    assert told == [("warn", DOWN)] and found.passed


def test_a_search_that_is_no_use_for_small_weights_says_what_is_left(tmp_path):
    source = single(tmp_path / "source", {DOWN: weight(64, 64).float() * 1e-22})
    for rule, lost in (("mse", []), ("mse_all", [DOWN])):
        (tmp_path / "r.yaml").write_text(f"rules: [{{match: '*', scheme: nvfp4, scale: {rule}}}]")
        request = Request(recipe=tmp_path / "r.yaml", container="lowbit")
        assert quantize(source, tmp_path / rule, request, device="cpu").lost == lost
