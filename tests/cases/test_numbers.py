"""F16: numbers and shapes that arithmetic stumbles over, by every scheme, through a whole run: what
is stored passes `verify` element by element, zeros stay zeros, what is finite stays finite, what no
scheme can hold stays as it is; and the bytes do not depend on slices or threads.
"""

import dataclasses

import pytest
import torch

from lowbitcli import api
from lowbitcli.errors import NonFiniteError, UnsupportedError
from lowbitcli.pipeline import memory
from lowbitcli.schemes import SCHEMES
from tests import checkpoints

TINY, LEAST, MOST = 2.0**-126, 2.0**-149, 3.4028234663852886e38


def filled(value, rows=32, cols=128):
    return torch.full((rows, cols), value)


def one(value, rest=0.0):
    found = filled(rest)
    found[5, 17] = value
    return found


def by_block(*values):
    """Return blocks of 16 columns of equal numbers."""
    row = torch.tensor(values * (8 // len(values))).repeat_interleave(16)
    return row.repeat(32, 1) * torch.tensor([1.0, -1.0]).repeat(16)[:, None]


GAUSS = torch.randn(32, 128, generator=torch.Generator().manual_seed(3))
VALUES = {
    "gauss": GAUSS,
    "zeros": filled(0.0),
    "minus zeros": filled(-0.0),
    "one": filled(1.0),
    "minus one": filled(-1.0),
    "a constant": filled(0.1),
    "1e-38": filled(1e-38),
    "1e-38 here and there": GAUSS * 1e-38,
    "the least": filled(LEAST),
    "below 2^-126": GAUSS.sign() * LEAST * 3,
    "2^-126": filled(TINY),
    "one outlier": one(1e4, 1e-3),
    "one number": one(1.0),
    "one tiny number": one(1e-38),
    "one of the least": one(LEAST),
    "a zero block": by_block(0.0, 1.0),
    "blocks of 2^8": by_block(1.0, 256.0, 2.0**-8, 0.5),
    "blocks of 2^60": by_block(2.0**60, 2.0**-60),
    "448": by_block(448.0, 449.0, 464.0, 465.0),
    "6": by_block(6.0, 5.0, 6.01, 5.99),
    "ties": by_block(0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0),
    "1.75 and more": by_block(1.75, 1.75 + 2.0**-23, 1.75 - 2.0**-23, 1.875),
    "just above a power": filled(1.0 + 2.0**-23),
    "just below a power": filled(1.0 - 2.0**-24),
    "rows from small to large": torch.exp2(torch.arange(-120.0, 120.0, 7.5))[:, None] * GAUSS,
    "columns from small to large": torch.exp2(torch.arange(-64.0, 64.0))[None, :] * GAUSS,
}
# What some schemes round up beyond fp32, and then refuse by name.
EXTREMES = {
    "3e38": filled(3e38),
    "the largest": filled(MOST),
    "the largest, both signs": torch.where(GAUSS > 0, MOST, -MOST),
    "one huge number": one(3e38),
    "one huge among small": one(3e38, 1e-38),
    "blocks to the ends": by_block(3e38, 1e-38, 0.0, -0.0),
}
ENDS = ["the largest", "the largest, both signs"]
REFUSED = {"mxfp8": ENDS, "mxfp4": list(EXTREMES), "int8_channel": ENDS}
SHAPES = {
    f"shape {'x'.join(map(str, shape)) or 'of a number'}": torch.ones(shape)
    for shape in (
        *((), (0,), (1,), (7,), (1, 1), (1, 15), (1, 16), (1, 32), (1, 128), (3, 33), (16, 1)),
        *((0, 16), (16, 0), (127, 127), (129, 128), (128, 129), (2, 2, 16), (1, 1, 1, 16)),
    )
}
TENSORS = {f"{name.replace(' ', '_')}.weight": t for name, t in {**VALUES, **SHAPES}.items()}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return checkpoints.write(tmp_path_factory.mktemp("numbers") / "in.safetensors", TENSORS)


def quantized(source, output, scheme):
    request = api.Request(scheme=scheme, container="lowbit")
    return api.quantize(source, output, request, device="cpu")


@pytest.mark.parametrize("scheme", [scheme.name for scheme in SCHEMES])
def test_f16_numbers_and_shapes(source, scheme, tmp_path, monkeypatch):
    done = quantized(source, tmp_path / "out.safetensors", scheme)
    found = api.verify(done.output, against=source, device="cpu")
    assert list(found.failures) == []
    api.dequantize(done.output, tmp_path / "back.safetensors", dtype="fp32", device="cpu")
    back = checkpoints.read(tmp_path / "back.safetensors")
    assert back.keys() == TENSORS.keys()
    taken = {row.name for row in found.weights}
    assert taken >= {f"{name.replace(' ', '_')}.weight" for name in VALUES}
    for name, tensor in TENSORS.items():
        got = back[name]
        assert got.dtype == tensor.dtype and got.shape == tensor.shape, name
        if name not in taken:
            assert checkpoints.same(got, tensor), name
        assert got.isfinite().all(), name
        assert (got[tensor == 0] == 0).all(), name
        assert (got * tensor.sign() >= 0).all(), f"{name}: a sign changed"
    real = memory.budget
    fixed = {"threads": 1, "elements": 700, "held": 0}
    monkeypatch.setattr(memory, "budget", lambda *x: dataclasses.replace(real(*x), **fixed))
    again = quantized(source, tmp_path / "again" / "out.safetensors", scheme)
    assert checkpoints.hashes(again.output) == checkpoints.hashes(done.output)
    print(f"F16 {scheme}: {len(TENSORS)} tensors, {len(taken)} quantized")


@pytest.mark.parametrize("scheme", [scheme.name for scheme in SCHEMES])
def test_f16_numbers_at_the_end_of_fp32(scheme, tmp_path):
    refused = []
    for number, (name, tensor) in enumerate(EXTREMES.items()):
        source = checkpoints.write(tmp_path / f"in{number}.safetensors", {"w.weight": tensor})
        output = tmp_path / f"out{number}.safetensors"
        try:
            quantized(source, output, scheme)
        except UnsupportedError as error:
            assert "w.weight has values that" in error.message
            assert "rounds up beyond the range of fp32" in error.message
            assert not output.exists()
            refused.append(name)
            continue
        assert list(api.verify(output, against=source, device="cpu").failures) == []
        api.dequantize(
            output, tmp_path / "back.safetensors", dtype="fp32", device="cpu", force=True
        )
        assert checkpoints.read(tmp_path / "back.safetensors")["w.weight"].isfinite().all(), name
    print(f"F16 {scheme}: refused {refused}")
    assert refused == REFUSED.get(scheme, [])


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("scheme", [scheme.name for scheme in SCHEMES])
def test_f16_what_is_no_number(scheme, number, tmp_path):
    tensors = {"good.weight": GAUSS, "bad.weight": one(number, 1.0)}
    source = checkpoints.write(tmp_path / "in.safetensors", tensors)
    with pytest.raises(NonFiniteError) as caught:
        quantized(source, tmp_path / "out.safetensors", scheme)
    assert "bad.weight" in caught.value.message and "(5, 17)" in caught.value.message
    assert not (tmp_path / "out.safetensors").exists()
    request = api.Request(scheme=scheme, container="lowbit", nonfinite="keep")
    done = api.quantize(source, tmp_path / "kept.safetensors", request, device="cpu")
    found = checkpoints.read(done.output)
    assert checkpoints.same(found["bad.weight"], tensors["bad.weight"])
    assert found["good.weight"].dtype != torch.float32
