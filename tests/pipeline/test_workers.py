"""Several processes at the jobs of one run: the bytes are those of one, and one that dies is
survived."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lowbitcli.api import Request, Spread, quantize
from lowbitcli.errors import (
    DeviceError,
    NonFiniteError,
    StoppedError,
    UsageError,
    WorkerLostError,
)
from lowbitcli.pipeline import processes, shares
from lowbitcli.pipeline.spread import named
from tests import checkpoints
from tests.checkpoints import LAYER, sharded, single, weight

ROOT = Path(__file__).parents[2]


def case_6(root):
    """Return the checkpoint of case 6: q, k and v of a layer in shards of their own."""

    def part(layer, letter, scale=1.0):
        return {f"model.layers.{layer}.self_attn.{letter}_proj.weight": weight(64, 64, scale)}

    return sharded(
        root,
        part(0, "q") | part(1, "q") | {"model.norm.weight": weight(1, 64)[0]},
        part(0, "k", 10) | part(1, "v"),
        part(1, "k", 10) | part(0, "v"),
    )


def large(root, count=24):
    """Return a checkpoint whose jobs last long enough to be caught at."""
    names = [f"{LAYER}mlp.{number:02}_proj.weight" for number in range(count)]
    return single(root, {name: weight(512, 1024, seed=seed) for seed, name in enumerate(names)})


def spread(number):
    return Spread(devices=",".join(["cpu"] * number))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return case_6(tmp_path_factory.mktemp("case") / "source")


@pytest.fixture(scope="module")
def whole(source):
    done = quantize(source, source.parent / "whole", device="cpu")
    return checkpoints.hashes(done.output), done.errors


@pytest.mark.parametrize("number", (1, 2, 4))
def test_the_bytes_are_those_of_one(tmp_path, source, whole, number):
    done = quantize(source, tmp_path / "out", spread=spread(number))
    assert (checkpoints.hashes(done.output), done.errors) == whole
    assert list(done.errors) == list(whole[1])
    assert os.listdir(tmp_path) == ["out"]
    assert done.stages["compute"] > 0


def test_a_lone_file_too(tmp_path):
    source = checkpoints.write(tmp_path / "a.safetensors", {"a.weight": weight(64, 64)})
    one = quantize(source, tmp_path / "one.safetensors", device="cpu")
    two = quantize(source, tmp_path / "two.safetensors", spread=spread(2))
    assert one.output.read_bytes() == two.output.read_bytes()


def workers_of(pid):
    """Return the processes that were started by `pid` and have jobs to do."""
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        try:
            command = Path(f"/proc/{child}/cmdline").read_bytes()
        except OSError:
            continue
        if b"spawn_main" in command:
            found.append(int(child))
    return found


def killing(times):
    """Return a callback of progress that kills a worker at `times` of its calls."""
    calls, killed = [], []

    def progress(done, total, name):
        calls.append(name)
        if name and len(calls) in times:
            victim = workers_of(os.getpid())[0]
            os.kill(victim, signal.SIGKILL)
            killed.append(victim)

    return progress, killed


def test_a_killed_worker_is_survived(tmp_path):
    source = large(tmp_path / "source")
    one = quantize(source, tmp_path / "one", device="cpu")
    progress, killed = killing({2, 9})
    two = quantize(source, tmp_path / "two", spread=spread(2), progress=progress)
    assert len(set(killed)) == 2
    assert checkpoints.hashes(one.output) == checkpoints.hashes(two.output)
    assert one.errors == two.errors


def test_workers_that_always_die_end_the_run_and_what_is_done_is_kept(tmp_path, monkeypatch):
    source = large(tmp_path / "source", 4)
    hit = f"{LAYER}mlp.02_proj.weight"
    real = processes._Team._give

    def give(team, member):
        real(team, member)
        if hit in member.jobs:
            member.process.kill()

    monkeypatch.setattr(processes._Team, "_give", give)
    monkeypatch.setattr(shares, "BUNDLE_JOBS", 1)
    with pytest.raises(WorkerLostError, match=r"on cpu died 3 times .*02_proj.*by signal 9") as e:
        quantize(source, tmp_path / "out", spread=spread(1))
    assert (e.value.exit_code, "run again" in e.value.hint) == (7, True)
    assert sorted(os.listdir(tmp_path)) == [".out.journal", ".out.partial", "source"]
    monkeypatch.undo()
    done = quantize(source, tmp_path / "out", device="cpu")
    assert done.resumed >= 2


def test_an_error_of_the_source_ends_it_at_once(tmp_path):
    tensors = {f"{LAYER}mlp.{n}_proj.weight": weight(64, 64, seed=n) for n in range(4)}
    tensors[f"{LAYER}mlp.2_proj.weight"][3, 5] = float("nan")
    source = single(tmp_path / "source", tensors)
    with pytest.raises(NonFiniteError, match=r"2_proj.*1 NaN and 0 Inf.*\(3, 5\)") as caught:
        quantize(source, tmp_path / "out", spread=spread(2))
    assert caught.value.hint == "--nonfinite keep leaves such weights as they are"
    assert os.listdir(tmp_path) == ["source"]
    assert not workers_of(os.getpid())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_it_and_it_goes_on(tmp_path, number, code):
    source = large(tmp_path / "source")
    begun = []

    def progress(done, total, name):
        if name and not begun:
            begun.append(name)
            os.kill(os.getpid(), number)

    with pytest.raises(StoppedError) as caught:
        quantize(source, tmp_path / "out", spread=spread(2), progress=progress)
    assert caught.value.exit_code == code
    done = int(caught.value.hint.split("(")[1].split("/")[0])
    assert 1 <= done < 24
    again = quantize(source, tmp_path / "out", spread=spread(2))
    assert again.resumed == done
    one = quantize(source, tmp_path / "one", device="cpu")
    assert checkpoints.hashes(one.output) == checkpoints.hashes(again.output)


def test_ctrl_c_at_a_terminal_reaches_all_and_says_one_thing(tmp_path):
    """The terminal sends it to every process of the group."""
    source = large(tmp_path / "source", 200)
    command = [sys.executable, "-m", "lowbitcli", "quantize", source, "-o", tmp_path / "out"]
    run = subprocess.Popen(
        [*map(str, command), "--devices", "cpu,cpu"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
    )
    journal = tmp_path / ".out.journal"
    until = time.monotonic() + 60
    while time.monotonic() < until and not (journal.exists() and journal.stat().st_size > 200):
        time.sleep(0.01)
    os.killpg(run.pid, signal.SIGINT)
    _, said = run.communicate(timeout=60)
    assert run.returncode == 130
    said = "".join(x for x in said.splitlines(True) if not x.startswith("quantizing: "))
    assert said.count("\n") <= 3 and "run again to continue (" in said and "Trace" not in said


def test_the_first_process_starts_deaf_to_signals():
    """It imports much before it knows what a signal means to it: a traceback, if it heard one."""
    script = """
import multiprocessing, pathlib
from types import SimpleNamespace
from lowbitcli.pipeline import processes

team = processes._Team(SimpleNamespace(jobs=()), None, (), None, ("cpu",))
processes.serve = print  # whatever it does: its mask is the parent's from its first instruction
team._start("cpu")
pid = team._members[0].process.pid
print(pathlib.Path(f"/proc/{pid}/status").read_text())
team.close()
"""
    ran = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
    )
    blocked = next(line for line in ran.stdout.splitlines() if line.startswith("SigBlk:"))
    mask = int(blocked.split()[1], 16)
    assert all(mask >> (number - 1) & 1 for number in (signal.SIGINT, signal.SIGTERM)), ran.stdout


def test_processes_die_with_their_run(tmp_path):
    source = large(tmp_path / "source", 200)
    command = [sys.executable, "-m", "lowbitcli", "quantize", source, "-o", tmp_path / "out"]
    run = subprocess.Popen(
        [*map(str, command), "--devices", "cpu,cpu"],
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
    )
    journal = tmp_path / ".out.journal"
    until = time.monotonic() + 60
    while time.monotonic() < until and not (journal.exists() and journal.stat().st_size > 200):
        time.sleep(0.01)
    workers = workers_of(run.pid)
    assert len(workers) == 2
    run.kill()
    run.wait()
    # One that still imports what it needs sees to it when it has done so.
    until = time.monotonic() + 30
    while time.monotonic() < until and any(map(is_running, workers)):
        time.sleep(0.05)
    assert not [pid for pid in workers if is_running(pid)]
    done = quantize(source, tmp_path / "out", device="cpu")
    assert 0 < done.resumed < 200


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def test_devices_are_known_or_refused(lowbit):
    assert named("cpu, cpu") == ["cpu", "cpu"]
    for bad in ("", "auto", "cpu,", "gpu:1", "cuda:x"):
        with pytest.raises(UsageError):
            named(bad)
    with pytest.raises(DeviceError):
        named("cuda:99")
    with pytest.raises(UsageError, match="--device and --devices exclude each other"):
        quantize("nothing", spread=spread(2), device="cpu")


def test_from_a_thread_too(tmp_path, source, whole):
    found = []
    thread = threading.Thread(
        target=lambda: found.append(quantize(source, tmp_path / "out", Request(), spread=spread(2)))
    )
    thread.start()
    thread.join()
    assert checkpoints.hashes(found[0].output) == whole[0]
