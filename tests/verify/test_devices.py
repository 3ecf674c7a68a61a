"""A report is the same to the last digit on every path, and however many threads look."""

import pytest
import torch

from lowbit_kernels.jit import references
from lowbitcli import api
from lowbitcli.verify import rows
from tests.checkpoints import single, weight
from tests.verify.planted import DOWN, poke

SCHEMES = ("nvfp4", "mxfp8", "fp8_channel", "fp8_block128")


@pytest.fixture
def threads():
    """Return a function that sets torch's threads until the test is over."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_path_and_number_of_threads_report_the_same(tmp_path, monkeypatch, threads, scheme):
    source = single(tmp_path / "source", {DOWN + "weight": weight(700, 512)})
    output = tmp_path / "out"
    api.quantize(source, output, api.Request(scheme=scheme), device="cpu")
    (output / "lowbit.json").unlink()
    for damaged in (False, True):
        if damaged:
            name = DOWN + ("weight_packed" if scheme == "nvfp4" else "weight")
            poke(output, name, 90_001, lambda byte: byte ^ 0x11)
        threads(1)
        monkeypatch.setattr(rows, "CHUNK", 1 << 20)
        want = api.verify(output, against=source, device="cpu").to_dict()
        assert want["passed"] != damaged
        with references():
            assert api.verify(output, against=source, device="cpu").to_dict() == want
        monkeypatch.setattr(rows, "CHUNK", 1 << 16)
        threads(3)
        assert api.verify(output, against=source, device="cpu").to_dict() == want
        assert torch.get_num_threads() == 3


def test_what_a_thread_cannot_read_is_told(tmp_path, monkeypatch, threads):
    source = single(tmp_path / "source", {DOWN + "weight": weight(700, 512)})
    output = tmp_path / "out"
    api.quantize(source, output, api.Request(scheme="mxfp8"), device="cpu")

    def lose(self, matrix, start, stop):
        if self._tested and start >= 512:
            raise rows.UnreadableError("gone")
        return parts(self, matrix, start, stop)

    parts = rows.Rows.parts
    monkeypatch.setattr(rows, "CHUNK", 1 << 16)
    monkeypatch.setattr(rows.Rows, "parts", lose)
    threads(3)
    found = api.verify(output, against=source, device="cpu")
    assert ("unreadable", "gone") in {(one.kind, one.message) for one in found.failures}
    assert torch.get_num_threads() == 3
