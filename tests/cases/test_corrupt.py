"""Case 13: truncated and corrupt files are found from headers and sizes, before any compute.

JustVugg/colibri PR#614, safetensors/safetensors#273.
"""

import json

import pytest

from lowbitcli.api import Request, plan_quantize, quantize
from lowbitcli.errors import CheckpointError
from tests import checkpoints
from tests.checkpoints import LAYER, shard_name, sharded, weight

ONE, TWO = shard_name(1, 2), shard_name(2, 2)
UP, DOWN = LAYER + "mlp.up_proj.weight", LAYER + "mlp.down_proj.weight"


@pytest.fixture
def source(tmp_path):
    return sharded(tmp_path / "source", {UP: weight(64, 64)}, {DOWN: weight(64, 64, seed=1)})


def cut(path):
    """Lose the last 100 bytes."""
    data = path.read_bytes()
    path.write_bytes(data[:-100])
    return f"expected {len(data)} bytes, found {len(data) - 100}"


def long_header(path):
    """Claim a header of 2^40 bytes."""
    data = path.read_bytes()
    path.write_bytes((1 << 40).to_bytes(8, "little") + data[8:])
    return f"{1 << 40} bytes"


def overlap(path):
    """Let two tensors share bytes."""
    header = {
        "a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]},
        DOWN: {"dtype": "U8", "shape": [8], "data_offsets": [4, 12]},
    }
    size = 8 + len(json.dumps(header))
    checkpoints.write_raw(path, header, bytes(12))
    index = path.parent / checkpoints.INDEX
    places = json.loads(index.read_text())
    places["weight_map"]["a"] = path.name
    index.write_text(json.dumps(places))
    return f"overlaps the one before it: expected to start at byte {size + 8}, found {size + 4}"


@pytest.mark.parametrize("spoil", (cut, long_header, overlap), ids=lambda spoil: spoil.__name__)
def test_it_is_refused_with_what_was_expected_and_found(tmp_path, source, spoil):
    says = spoil(source / TWO)
    before = checkpoints.everything_below(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        plan_quantize(source, tmp_path / "out", Request())
    assert caught.value.exit_code == 4
    assert TWO in caught.value.message
    assert says in caught.value.message
    with pytest.raises(CheckpointError):
        quantize(source, tmp_path / "out", device="cpu")
    assert checkpoints.everything_below(tmp_path) == before


def test_the_command(tmp_path, source, lowbit):
    says = cut(source / TWO)
    said = lowbit("quantize", source, "-o", tmp_path / "out")
    assert said.code == 4
    assert says in said.err
    assert not (tmp_path / "out").exists()
