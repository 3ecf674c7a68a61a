"""An output that several machines write, each its share: the bytes are those of one run, and
nothing is published before all is proved."""

import json
import multiprocessing
import os
import signal

import pytest

from lowbitcli.api import Request, Spread, dequantize, finish, quantize
from lowbitcli.checkpoint.atomic import beside, take_lock
from lowbitcli.checkpoint.shares import found
from lowbitcli.errors import BusyError, CheckpointError, OutputError, StoppedError, UsageError
from lowbitcli.pipeline import memory, proof, run, write
from lowbitcli.pipeline.memory import Budget
from lowbitcli.pipeline.shares import Share, share_of, shares
from lowbitcli.plan.nouns import Job
from lowbitcli.plan.prepare import quantization
from tests import checkpoints
from tests.checkpoints import LAYER, sharded, single, weight
from tests.pipeline.test_workers import case_6

COUNT = 12
NAMES = [f"{LAYER}mlp.{number:02}_proj.weight" for number in range(COUNT)]


@pytest.fixture
def source(tmp_path):
    half = COUNT // 2
    one, two = (
        {name: weight(64, 64, seed=seed) for seed, name in enumerate(NAMES) if seed // half == part}
        for part in (0, 1)
    )
    return sharded(tmp_path / "source", one, two)


def part(index, number=3):
    return Spread(shard_index=index, num_shards=str(number))


def do(tmp_path, source, index, number=3, **options):
    options.setdefault("device", "cpu")
    return quantize(source, tmp_path / "out", spread=part(index, number), **options)


def whole(tmp_path, source):
    done = quantize(source, tmp_path / "other" / "out", device="cpu")
    return checkpoints.hashes(done.output), done.errors


def left(tmp_path):
    return sorted(name for name in os.listdir(tmp_path) if name.startswith(".out"))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_the_last_share_publishes_what_one_run_would_have(tmp_path, source, order):
    done = [do(tmp_path, source, index) for index in order]
    assert [sorted(one.missing) for one in done] == [
        sorted(order[1:]),
        sorted(order[2:]),
        [],
    ]
    assert done[0].share == Share(order[0], 3)
    assert (checkpoints.hashes(done[2].output), done[2].errors) == whole(tmp_path, source)
    assert left(tmp_path) == []
    assert quantize(source, tmp_path / "out", device="cpu").complete
    assert do(tmp_path, source, 1).complete


@pytest.mark.parametrize("number", (1, 2, 3, 7))
def test_case_6_in_shares(tmp_path, number):
    """More shares than jobs leave some with nothing to do."""
    source = case_6(tmp_path / "source")
    for index in range(number):
        done = do(tmp_path, source, index, number)
    assert (checkpoints.hashes(done.output), done.errors) == whole(tmp_path, source)


def test_a_lone_file_and_a_dequantization_in_shares(tmp_path):
    source = checkpoints.write(
        tmp_path / "a.safetensors", {name: weight(64, 64, seed=5) for name in NAMES}
    )
    one = quantize(source, tmp_path / "one.safetensors", device="cpu").output
    for index in (1, 0):
        two = quantize(source, tmp_path / "two.safetensors", device="cpu", spread=part(index, 2))
    assert one.read_bytes() == two.output.read_bytes()
    back = dequantize(one, tmp_path / "back.safetensors", device="cpu").output
    for index in (0, 1):
        dequantize(one, tmp_path / "again.safetensors", device="cpu", spread=part(index, 2))
    assert back.read_bytes() == (tmp_path / "again.safetensors").read_bytes()


def test_finish_names_what_is_missing_and_then_publishes(tmp_path, source, lowbit):
    do(tmp_path, source, 0)
    do(tmp_path, source, 2)
    with pytest.raises(OutputError, match=r"of 3 shares these are not done: 1 \(4 jobs\)") as e:
        finish(tmp_path / "out")
    assert (e.value.exit_code, e.value.hint) == (
        5,
        "run the same command with --shard-index 1 --num-shards 3",
    )
    held = take_lock(beside(tmp_path / "out", "lock"), tmp_path / "out", shared=True)
    assert do(tmp_path, source, 1).missing == {1: 0}  # as if another share were still at it
    with pytest.raises(BusyError):
        finish(tmp_path / "out")
    os.close(held)
    done = finish(tmp_path / "out")
    assert (checkpoints.hashes(done.output), done.errors) == whole(tmp_path, source)
    assert left(tmp_path) == []
    with pytest.raises(OutputError, match="no shares of it are here"):
        finish(tmp_path / "out")


def busy(_):
    raise BusyError("as if another share were at it")


def test_finish_keeps_what_was_kept_for_its_nan(tmp_path, monkeypatch):
    tensors = {name: weight(64, 64, seed=seed) for seed, name in enumerate(NAMES)}
    tensors[NAMES[3]][0, 0] = float("nan")
    source = single(tmp_path / "source", tensors)
    request = Request(nonfinite="keep", recipe="mxfp8")
    with monkeypatch.context() as patched:
        patched.setattr(run._Run, "gather", busy)
        for index in (0, 1):
            assert do(tmp_path, source, index, 2, request=request).missing == {index: 0}
    done = finish(tmp_path / "out")
    one = quantize(source, tmp_path / "other" / "out", request, device="cpu")
    assert list(done.non_finite) == [NAMES[3]]
    assert checkpoints.hashes(done.output) == checkpoints.hashes(one.output)


@pytest.fixture
def stopped(tmp_path, source, monkeypatch):
    """Leave share 1 stopped after some of its jobs, and return after how many."""
    monkeypatch.setattr(memory, "budget", lambda *_: Budget(1, 1, 0))
    monkeypatch.setattr(proof, "SYNC_BYTES", 1)
    real, calls = write.Writer.write, []

    def send(self, part, offset, data):
        real(self, part, offset, data)
        calls.append(part)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(write.Writer, "write", send)
        with pytest.raises(StoppedError) as caught:
            do(tmp_path, source, 1)
    done, _, total = caught.value.hint.split("(")[1].rstrip(")").partition("/")
    assert total == "4" and 0 < int(done) < 4
    return int(done)


def test_a_share_that_was_stopped_goes_on(tmp_path, source, stopped):
    do(tmp_path, source, 0)
    do(tmp_path, source, 2)
    done = do(tmp_path, source, 1)
    assert done.resumed == stopped
    assert (checkpoints.hashes(done.output), done.errors) == whole(tmp_path, source)


def killed(source, target):
    def die(self, part, offset, data, real=write.Writer.write):
        real(self, part, offset, data)
        if part.spec.name.startswith(NAMES[6]):
            os.kill(os.getpid(), signal.SIGKILL)

    memory.budget = lambda *_: Budget(1, 1, 0)
    proof.SYNC_SECONDS = 0.01
    write.Writer.write = die
    quantize(source, target, device="cpu", spread=part(1))


def test_a_share_that_was_killed_goes_on(tmp_path, source):
    do(tmp_path, source, 0)
    child = multiprocessing.get_context("fork").Process(
        target=killed, args=(source, tmp_path / "out")
    )
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    do(tmp_path, source, 2)
    with pytest.raises(OutputError, match=r"not done: 1 \([234] jobs\)"):
        finish(tmp_path / "out")
    done = do(tmp_path, source, 1)
    assert (checkpoints.hashes(done.output), done.errors) == whole(tmp_path, source)


def test_what_the_disk_made_of_a_share_is_found_and_its_run_mends_it(tmp_path, source):
    do(tmp_path, source, 0)
    do(tmp_path, source, 1)
    staged = tmp_path / ".out.partial" / checkpoints.shard_name(1, 2)
    with staged.open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-5, os.SEEK_END)
        file.write(bytes([byte ^ 8]))
    with pytest.raises(OutputError, match="read back, it is not what was written"):
        do(tmp_path, source, 2)
    for index in range(3):
        assert not (tmp_path / "out").exists()
        try:
            done = do(tmp_path, source, index)
        except OutputError:
            continue
        break
    assert (checkpoints.hashes(done.output), done.errors) == whole(tmp_path, source)


def test_shares_of_different_plans_are_refused(tmp_path, source):
    do(tmp_path, source, 0)
    for other in ({"request": Request(scheme="mxfp8")}, {"number": 4}):
        with pytest.raises(UsageError, match="share 0 of 3 was begun with another plan"):
            do(tmp_path, source, 1, **other)
    assert sorted(found(tmp_path / "out")) == [(0, 3)]
    do(tmp_path, source, 1, 2, resume=False)  # begins anew
    assert sorted(found(tmp_path / "out")) == [(1, 2)]
    assert do(tmp_path, source, 0, 2).missing == {}


def test_a_whole_run_does_not_discard_shares_unasked(tmp_path, source):
    do(tmp_path, source, 0, 2)
    before = checkpoints.everything_below(tmp_path)
    with pytest.raises(UsageError, match=r"begun in shares \(share-0-of-2\)") as caught:
        quantize(source, tmp_path / "out", device="cpu")
    assert "lowbit finish" in caught.value.hint
    assert "--force" in caught.value.hint
    assert checkpoints.everything_below(tmp_path) == before
    assert do(tmp_path, source, 1, 2).missing == {}  # and nothing of it is lost
    assert left(tmp_path) == []


@pytest.mark.parametrize("how", [{"force": True}, {"resume": False}])
def test_a_whole_run_starts_over_where_that_is_asked_for(tmp_path, source, how):
    do(tmp_path, source, 0, 2)
    done = quantize(source, tmp_path / "out", device="cpu", **how)
    assert (checkpoints.hashes(done.output), done.errors) == whole(tmp_path, source)
    assert left(tmp_path) == []


def test_finishing_what_is_complete_is_well(tmp_path, source, lowbit):
    do(tmp_path, source, 0, 2)
    assert lowbit("finish", tmp_path / "out").code == 5
    do(tmp_path, source, 1, 2)
    said = lowbit("finish", tmp_path / "out")
    assert (said.code, said.out) == (0, f"{tmp_path / 'out'}: already complete\n")
    said = lowbit("finish", tmp_path / "out", "--json")
    assert json.loads(said.out) == {"output": str(tmp_path / "out"), "already_complete": True}
    assert lowbit("finish", source).code == 5  # not ours
    file = next((tmp_path / "out").glob("*.safetensors"))
    os.unlink(file)
    assert lowbit("finish", tmp_path / "out").code == 5


def test_a_changed_source_does_not_finish(tmp_path, source):
    for index in (0, 1):
        do(tmp_path, source, index)
    changed = {name: weight(64, 128, seed=1) for name in NAMES}
    sharded(source, changed, {"x.weight": weight(64, 64)})
    with pytest.raises(UsageError, match="begun with another plan"):
        do(tmp_path, source, 2)
    with pytest.raises(OutputError, match="not the journal of this plan"):
        finish(tmp_path / "out")
    os.rename(source, tmp_path / "gone")
    with pytest.raises(CheckpointError):
        finish(tmp_path / "out")


def test_one_share_is_written_by_one_run_and_no_whole_run_beside_it(tmp_path, source):
    out = tmp_path / "out"
    do(tmp_path, source, 0)
    held = [
        take_lock(beside(out, "lock"), out, shared=True),
        take_lock(beside(out, "share-1-of-3.lock"), out),
    ]
    with pytest.raises(BusyError, match=r"share-1-of-3\.lock"):
        do(tmp_path, source, 1)
    with pytest.raises(BusyError):
        quantize(source, out, device="cpu")
    assert do(tmp_path, source, 2).missing == {2: 0}
    for fd in held:
        os.close(fd)


def test_a_share_that_cannot_begin_leaves_nothing(tmp_path, source, monkeypatch):
    def full(fd, start, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OutputError, match="No space left"):
        do(tmp_path, source, 1)
    assert left(tmp_path) == []


@pytest.mark.parametrize("number", (1, 2, 3, 5, 40))
def test_a_split_is_even_whole_and_in_order(source, number):
    with quantization(source, None, Request()) as (plan, _, _):
        split = shares(plan.jobs, number)
        assert [place for one in split for place in one] == list(range(len(plan.jobs)))
        sizes = [sum(plan.jobs[place].bytes_in for place in one) for one in split]
        largest = max(job.bytes_in for job in plan.jobs)
        assert all(abs(size - sum(sizes) / number) <= largest for size in sizes)


def test_a_split_of_nothing():
    assert shares([], 2) == [[], []]
    assert shares([Job(())], 1) == [[0]]


@pytest.mark.parametrize(
    ("index", "number", "environment", "share"),
    [
        (None, None, {"RANK": "1", "WORLD_SIZE": "2"}, None),
        (1, "3", {"RANK": "0"}, Share(1, 3)),
        (None, "auto", {"RANK": "1", "WORLD_SIZE": "2"}, Share(1, 2)),
        (0, "auto", {"RANK": "1", "WORLD_SIZE": "2"}, Share(0, 2)),
        (None, "auto", {"SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, Share(3, 4)),
        (
            None,
            "auto",
            {
                "SLURM_ARRAY_TASK_ID": "7",
                "SLURM_ARRAY_TASK_COUNT": "4",
                "SLURM_ARRAY_TASK_MIN": "5",
            },
            Share(2, 4),
        ),
        (None, "4", {"JOB_COMPLETION_INDEX": "2"}, Share(2, 4)),
        (None, "4", {"SLURM_PROCID": "2", "SLURM_NTASKS": "9"}, Share(2, 4)),
        (0, None, {}, "--shard-index needs --num-shards"),
        (None, "4", {}, "which shard"),
        (None, "auto", {}, "how many"),
        (None, "auto", {"JOB_COMPLETION_INDEX": "2"}, "how many"),
        (4, "4", {}, "no shard 4 of 4"),
        (-1, "4", {}, "no shard -1 of 4"),
        (0, "0", {}, "0 is no number of shards"),
        (0, "many", {}, "'many' is no number"),
        (None, "2", {"RANK": "one"}, "RANK=one is no number"),
    ],
)
def test_which_share(index, number, environment, share):
    if isinstance(share, str):
        with pytest.raises(UsageError, match=share):
            share_of(index, number, environment)
    else:
        assert share_of(index, number, environment) == share
