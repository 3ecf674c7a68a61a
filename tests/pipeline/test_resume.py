"""A run that goes on with what another left: only what is proved is kept, and the bytes are those
of an undisturbed run.
"""

import os
import signal
import time

import pytest

from lowbitcli.api import Request, quantize
from lowbitcli.checkpoint.journal import Journal
from lowbitcli.errors import OutputError, StoppedError
from lowbitcli.pipeline import memory, proof, write
from lowbitcli.pipeline.clock import Clock
from lowbitcli.pipeline.memory import Budget
from tests import checkpoints
from tests.checkpoints import LAYER, single, weight

COUNT = 20
NAMES = [f"{LAYER}mlp.{number:02}_proj.weight" for number in range(COUNT)]


def model():
    return {name: weight(64, 64, seed=seed) for seed, name in enumerate(NAMES)}


@pytest.fixture
def source(tmp_path):
    return single(tmp_path / "source", model())


@pytest.fixture
def stopped(tmp_path, source, monkeypatch):
    """Leave a run that was stopped after some of its jobs, and return where."""
    monkeypatch.setattr(memory, "budget", lambda *_: Budget(1, 1, 0))
    monkeypatch.setattr(proof, "SYNC_BYTES", 1)
    real, calls = write.Writer.write, []

    def send(self, part, offset, data):
        real(self, part, offset, data)
        calls.append(part)
        if len(calls) == 7:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(write.Writer, "write", send)
        with pytest.raises(StoppedError) as caught:
            quantize(source, tmp_path / "out", device="cpu")
    assert caught.value.exit_code == 130
    done = int(caught.value.hint.split("(")[1].split("/")[0])
    assert 2 <= done < COUNT and caught.value.hint == f"run again to continue ({done}/{COUNT})"
    assert sorted(os.listdir(tmp_path)) == [".out.journal", ".out.partial", "source"]
    return done


def whole(tmp_path, source):
    """Return the bytes of an undisturbed run."""
    done = quantize(source, tmp_path / "other" / "out", device="cpu")
    return checkpoints.hashes(done.output), done.errors


def again(tmp_path, source, **options):
    done = quantize(source, tmp_path / "out", device="cpu", **options)
    left = [name for name in os.listdir(tmp_path) if name.startswith(".")]
    assert left == []
    return done


def test_what_was_done_is_not_done_again_and_the_bytes_are_equal(tmp_path, source, stopped):
    done = again(tmp_path, source)
    assert done.resumed == stopped
    assert (checkpoints.hashes(done.output), done.errors) == whole(tmp_path, source)
    assert sorted(done.errors) == NAMES


def test_no_resume_starts_anew(tmp_path, source, stopped):
    done = again(tmp_path, source, resume=False)
    assert done.resumed == 0
    assert checkpoints.hashes(done.output) == whole(tmp_path, source)[0]


def test_another_plan_starts_anew(tmp_path, source, stopped):
    done = again(tmp_path, source, request=Request(scheme="mxfp8"))
    assert done.resumed == 0


def test_a_changed_source_is_computed_again(tmp_path, source, stopped):
    """Equal headers, so equal plans; the numbers of one weight are others."""
    tensors = model()
    tensors[NAMES[0]] = weight(64, 64, seed=99)
    file = source / "model.safetensors"
    before = file.stat().st_size
    single(source, tensors)
    assert file.stat().st_size == before
    done = again(tmp_path, source)
    assert done.resumed == stopped - 1
    assert checkpoints.hashes(done.output) == whole(tmp_path, source)[0]


@pytest.mark.parametrize("seed", range(0, 800, 97))
def test_a_flipped_bit_in_what_was_written_is_found(tmp_path, source, stopped, seed):
    """The job that it belongs to is done again."""
    other = quantize(source, tmp_path / "other" / "out", device="cpu").output / "model.safetensors"
    names = sorted(
        name for name in checkpoints.header_of(other) if name.startswith(NAMES[seed % 2])
    )
    entry = checkpoints.header_of(other)[names[seed % len(names)]]
    start, stop = entry["data_offsets"]
    base = 8 + int.from_bytes(other.read_bytes()[:8], "little")
    at = base + start + seed % (stop - start)
    with (tmp_path / ".out.partial" / "model.safetensors").open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << seed % 8]))
    done = again(tmp_path, source)
    assert done.resumed == stopped - 1
    assert checkpoints.hashes(done.output) == checkpoints.hashes(other.parent)


@pytest.mark.parametrize("seed", range(4))
def test_a_flipped_bit_in_the_journal_ends_it(tmp_path, source, stopped, seed):
    file = tmp_path / ".out.journal"
    data = bytearray(file.read_bytes())
    data[(seed * 7919 + 11) % len(data)] ^= 1 << seed
    file.write_bytes(data)
    done = again(tmp_path, source)
    assert done.resumed < stopped
    assert checkpoints.hashes(done.output) == whole(tmp_path, source)[0]


def test_a_torn_line_ends_the_journal(tmp_path, source, stopped):
    file = tmp_path / ".out.journal"
    file.write_bytes(file.read_bytes()[:-5])
    done = again(tmp_path, source)
    assert done.resumed == stopped - 1
    assert checkpoints.hashes(done.output) == whole(tmp_path, source)[0]


def test_what_does_not_belong_there_is_not_published(tmp_path, source, stopped):
    (tmp_path / ".out.partial" / "pytorch_model.bin").write_bytes(b"x")
    (tmp_path / ".out.partial" / "config.json").symlink_to("/etc/passwd")
    done = again(tmp_path, source)
    assert checkpoints.hashes(done.output) == whole(tmp_path, source)[0]


def test_a_partial_without_a_journal_is_not_trusted(tmp_path, source, stopped):
    (tmp_path / ".out.journal").unlink()
    assert again(tmp_path, source).resumed == 0


def test_a_journal_of_another_user_is_not_trusted(tmp_path, source, stopped, monkeypatch):
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    assert again(tmp_path, source).resumed == 0


def test_a_finished_output_of_the_same_source_and_plan_is_complete(tmp_path, source, lowbit):
    first = quantize(source, tmp_path / "out", device="cpu")
    before = checkpoints.hashes(first.output)
    stamp = (first.output / "model.safetensors").stat().st_mtime_ns
    second = quantize(source, tmp_path / "out", device="cpu")
    assert second.complete and not first.complete
    assert (first.output / "model.safetensors").stat().st_mtime_ns == stamp
    said = lowbit("quantize", source, "-o", tmp_path / "out", "--device", "cpu")
    assert said.code == 0 and "already complete" in said.out
    forced = quantize(source, tmp_path / "out", device="cpu", force=True)
    assert not forced.complete and checkpoints.hashes(first.output) == before
    tensors = model()
    tensors[NAMES[3]][0, 0] += 1
    single(source, tensors)
    with pytest.raises(OutputError, match="exists"):
        quantize(source, tmp_path / "out", device="cpu")


def test_a_lone_file_is_complete_too(tmp_path):
    source = checkpoints.write(tmp_path / "a.safetensors", model())
    quantize(source, tmp_path / "out.safetensors", device="cpu")
    assert quantize(source, tmp_path / "out.safetensors", device="cpu").complete
    with (tmp_path / "out.safetensors").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(OutputError, match="exists"):
        quantize(source, tmp_path / "out.safetensors", device="cpu")


@pytest.mark.parametrize("readback", (True, False))
def test_what_the_disk_makes_of_it_is_read_back(tmp_path, source, monkeypatch, readback):
    real, calls = os.pwrite, []

    def wrong(fd, data, offset):
        if len(data) > 1000 and not calls:
            calls.append(offset)
            data = bytes([data[0] ^ 1]) + bytes(data[1:])
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", wrong)
    if not readback:
        quantize(source, tmp_path / "out", device="cpu", readback=False)
        assert calls and (tmp_path / "out").exists()
        return
    with pytest.raises(OutputError, match="read back, it is not what was written"):
        quantize(source, tmp_path / "out", device="cpu")
    assert calls and os.listdir(tmp_path) == ["source"]


def test_handlers_are_given_back(tmp_path, source):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    quantize(source, tmp_path / "out", device="cpu")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


class Paper:
    """A staged output that only says what it was told."""

    def __init__(self):
        self.journal, self.told = self, []

    def sync(self, name):
        self.told.append(name)

    def append(self, lines):
        self.told += [line["name"] for line in lines]


@pytest.mark.parametrize(("size", "seconds"), [(1 << 40, 0.02), (1, 60.0)])
def test_a_job_is_journalled_though_no_other_follows(monkeypatch, size, seconds):
    """After so many bytes or seconds, in a thread of its own, and once its files are synced."""
    monkeypatch.setattr(proof, "SYNC_BYTES", size)
    monkeypatch.setattr(proof, "SYNC_SECONDS", seconds)
    paper = Paper()
    scribe = proof.Scribe(paper, Clock())
    scribe.add(proof.Done("a"), 10, {"two", "one"})
    until = time.monotonic() + 10
    while len(paper.told) < 3 and time.monotonic() < until:
        time.sleep(0.005)
    assert paper.told == ["one", "two", "a"]
    scribe.flush()
    assert paper.told == ["one", "two", "a"]


def test_what_cannot_be_journalled_is_said_at_the_next_job(monkeypatch):
    monkeypatch.setattr(proof, "SYNC_BYTES", 1)
    paper = Paper()

    def fail(name):
        raise OutputError(f"{name}: full")

    monkeypatch.setattr(paper, "sync", fail)
    scribe = proof.Scribe(paper, Clock())
    scribe.add(proof.Done("a"), 10, {"one"})
    with pytest.raises(OutputError, match="one: full"):
        for _ in range(1000):
            time.sleep(0.005)
            scribe.add(proof.Done("b"), 10, {"one"})
    with pytest.raises(OutputError, match="one: full"):
        scribe.flush()


def test_a_journal_is_what_was_appended(tmp_path):
    path = tmp_path / "journal"
    journal = Journal.begin(path, "plan")
    journal.append([{"name": "a"}, {"name": "b\n"}])
    journal.append([])
    journal.close()
    assert Journal.resume(path, "another") is None
    assert Journal.resume(tmp_path / "absent", "plan") is None
    found = Journal.resume(path, "plan")
    assert found is not None and found[1] == [{"name": "a"}, {"name": "b\n"}]
    found[0].append([{"name": "c"}])
    found[0].close()
    (tmp_path / "link").symlink_to(path)
    assert Journal.resume(tmp_path / "link", "plan") is None
    for at in range(path.stat().st_size):
        data = bytearray(path.read_bytes())
        data[at] ^= 4
        (tmp_path / "flipped").write_bytes(data)
        flipped = Journal.resume(tmp_path / "flipped", "plan")
        assert flipped is None or len(flipped[1]) < 3
        if flipped is not None:
            flipped[0].close()
