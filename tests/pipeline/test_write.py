"""Space that is taken in the background: nothing is written before it is there, and what goes wrong
is raised by who needed it."""

import threading

import pytest

from lowbitcli.api import Request, plan_quantize
from lowbitcli.checkpoint.writer import StagedOutput
from lowbitcli.errors import OutputError
from lowbitcli.pipeline.write import Writer
from tests.checkpoints import LAYER, single, weight


@pytest.fixture
def plan(tmp_path):
    source = single(tmp_path / "source", {LAYER + "mlp.up_proj.weight": weight(64, 64)})
    return plan_quantize(source, tmp_path / "out", Request())


def test_a_write_waits_for_its_file(tmp_path, plan, monkeypatch):
    may, create = threading.Event(), StagedOutput.create

    def late(self, name, size):
        may.wait()
        create(self, name, size)

    monkeypatch.setattr(StagedOutput, "create", late)
    with StagedOutput(tmp_path / "out", directory=True) as staged:
        writer = Writer(plan, staged, wait=False)
        part = next(iter(plan.quantized[0].writes.values()))
        thread = threading.Thread(target=writer.write, args=(part, 0, memoryview(b"1234")))
        thread.start()
        thread.join(0.05)
        assert thread.is_alive()
        may.set()
        thread.join()
        writer.settle()
        found = bytearray(4)
        writer.read_into(part, 0, memoryview(found))
        assert found == b"1234"


def test_space_that_is_not_there_is_said_by_a_write_and_at_the_end(tmp_path, plan, monkeypatch):
    def full(self, name, size):
        raise OutputError("no space")

    monkeypatch.setattr(StagedOutput, "create", full)
    with StagedOutput(tmp_path / "out", directory=True) as staged:
        with pytest.raises(OutputError, match="no space"):
            Writer(plan, staged)
        writer = Writer(plan, staged, wait=False)
        part = next(iter(plan.quantized[0].writes.values()))
        for call in (lambda: writer.write(part, 0, memoryview(b"")), writer.settle):
            with pytest.raises(OutputError, match="no space"):
                call()
