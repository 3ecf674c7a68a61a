"""What a checkpoint is taken for: no weight is lost between what is declared and what is stored."""

import pytest

from lowbitcli import api
from lowbitcli.errors import CheckpointError
from tests import checkpoints
from tests.checkpoints import LAYER, single, weight

DOWN = LAYER + "mlp.down_proj.weight"


@pytest.fixture
def twice(tmp_path):
    """A weight that is stored packed, with a plain tensor of its name beside it."""
    made = api.quantize(single(tmp_path / "source", {DOWN: weight(64, 64)}), tmp_path / "made")
    tensors = {**checkpoints.read(made.output), DOWN: weight(64, 64, 100.0)}
    return single(tmp_path / "twice", tensors, checkpoints.config_of(made.output))


def test_a_weight_that_is_stored_twice_is_refused(twice, tmp_path):
    for run in (api.quantize, api.dequantize):
        with pytest.raises(CheckpointError, match="stored twice") as caught:
            run(twice, tmp_path / "out")
        assert caught.value.exit_code == 4
        assert DOWN in caught.value.message
        assert not (tmp_path / "out").exists()


def test_verify_names_the_weight_that_is_stored_twice(twice):
    found = api.verify(twice, device="cpu")
    assert found.exit_code == 1
    (problem,) = found.failures
    assert (problem.kind, problem.tensor, problem.file) == ("duplicate", DOWN, "model.safetensors")
