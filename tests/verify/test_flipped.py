"""One code of 16,777,216 changed to its neighbour is found, and it is said where."""

import json

import pytest

from lowbitcli import api
from tests.checkpoints import single, weight
from tests.verify.planted import poke

NAME = "model.layers.0.mlp.down_proj.weight"
SIZE = 4096
ROW, COLUMN = 2741, 1235  # an odd column: the high four bits of NVFP4


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return single(tmp_path_factory.mktemp("large"), {NAME: weight(SIZE, SIZE, 0.02)})


def neighbour(byte: int) -> int:
    """Return a byte of two codes, the second of them moved by one magnitude."""
    code = byte >> 4
    return (byte & 15) | ((code + (-1 if code & 7 else 1)) << 4)


CASES = [  # scheme, byte, block, is the manifest there
    ("nvfp4", ROW * SIZE // 2 + COLUMN // 2, [ROW, COLUMN // 16], True),
    ("mxfp8", ROW * SIZE + COLUMN, [ROW, COLUMN // 32], False),
    ("fp8_block128", ROW * SIZE + COLUMN, [ROW // 128, COLUMN // 128], False),
]


@pytest.mark.parametrize(("scheme", "at", "block", "proof"), CASES)
def test_one_flipped_code_among_16_million(source, tmp_path, scheme, at, block, proof):
    output, packed = tmp_path / "out", scheme == "nvfp4"
    api.quantize(source, output, api.Request(scheme=scheme), device="cpu")
    if not proof:
        (output / "lowbit.json").unlink()
    tensor = NAME + ("_packed" if packed else "")

    def change(byte):
        return neighbour(byte) if packed else byte ^ 1

    poke(output, tensor, at, change)
    found = api.verify(output, against=source, device="cpu")
    (bound,) = [one for one in found.failures if one.kind == "bound"]
    assert (bound.tensor, bound.file) == (NAME, "model.safetensors")
    where = f"1 of {SIZE * SIZE} elements are not in the interval of their code; the first at "
    assert bound.message.startswith(f"{where}row {ROW}, column {COLUMN}, block {block}: ")
    (row,) = found.weights
    assert row.figures is not None and row.figures.first_outside == (ROW, COLUMN)
    assert [one.kind for one in found.failures] == ["manifest"] * proof + ["bound"]
    assert json.dumps(found.to_dict(), allow_nan=False)
