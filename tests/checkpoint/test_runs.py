"""Bytes that follow each other in a file are read by one call, however little that returns."""

import os

import pytest

from lowbitcli.checkpoint import Checkpoint, runs
from lowbitcli.errors import CheckpointError
from tests.checkpoint.test_reader import save


def test_runs_end_at_gaps_and_where_they_are_long_enough():
    spans = [(10, 14, "c"), (0, 4, "a"), (4, 10, "b"), (20, 30, "e"), (15, 16, "d"), (30, 90, "f")]
    found = list(runs.neighbours(spans, 14))
    assert [[name for _, _, name in run] for run in found] == [["a", "b", "c"], ["d"], ["e"], ["f"]]
    assert [len(run) for run in runs.neighbours(spans, 1)] == [1] * 6
    assert list(runs.neighbours([], 1)) == []


@pytest.fixture
def many(tmp_path):
    """A file of 3,000 tensors of 1 to 7 bytes."""
    tensors = {f"{n:04}": bytes([n % 251]) * (1 + n % 7) for n in range(3000)}
    save(tmp_path / "x.safetensors", tensors)
    return tmp_path / "x.safetensors", tensors


@pytest.mark.parametrize("most", (1 << 20, 5, 1))
def test_every_buffer_gets_its_bytes_also_from_calls_that_return_less(many, monkeypatch, most):
    path, tensors = many
    real, calls = os.preadv, []

    def short(fd, buffers, offset):
        calls.append(len(buffers))
        wanted = min(most, sum(len(one) for one in buffers))
        data = os.pread(fd, wanted, offset)
        for one in buffers:
            one[: len(data)] = data[: len(one)]
            data = data[len(one) :]
        return wanted

    with Checkpoint.open(path) as checkpoint:
        monkeypatch.setattr(os, "preadv", short if most < 1 << 20 else real)
        some = [name for n, name in enumerate(tensors) if n < 200 or most == 1 << 20]
        buffers = {name: bytearray(len(tensors[name])) for name in reversed(some)}
        checkpoint.read_all([(name, 0, memoryview(data)) for name, data in buffers.items()])
        middle = bytearray(3)
        checkpoint.read_all([("0005", 2, memoryview(middle))])
    assert all(buffers[name] == tensors[name] for name in some) and len(buffers) == len(some)
    assert middle == tensors["0005"][2:5]
    assert all(count <= 1024 for count in calls)


def test_neighbours_are_one_call_and_others_are_not(many, monkeypatch):
    path, tensors = many
    real, calls = os.preadv, []
    with Checkpoint.open(path) as checkpoint:
        monkeypatch.setattr(os, "preadv", lambda *a: calls.append(a[2]) or real(*a))
        names = list(tensors)[:600]
        checkpoint.read_all([(x, 0, memoryview(bytearray(len(tensors[x])))) for x in names])
        assert len(calls) == 1
        checkpoint.read_all([(x, 0, memoryview(bytearray(len(tensors[x])))) for x in names[::2]])
        assert len(calls) == 1 + 300


def test_a_file_that_is_shorter_now_or_has_not_that_much_is_refused(many):
    path, tensors = many
    with Checkpoint.open(path) as checkpoint:
        with pytest.raises(ValueError, match='tensor "0000" has no bytes 0 to 2'):
            checkpoint.read_all([("0000", 0, memoryview(bytearray(2)))])
        os.truncate(path, path.stat().st_size - 3)
        last = list(tensors)[-2:]
        with pytest.raises(CheckpointError, match="changed while being read"):
            checkpoint.read_all([(x, 0, memoryview(bytearray(len(tensors[x])))) for x in last])
