"""F1, F2, F3, F4, F6 where tasks of Ray do the jobs (`--cluster`): faults of the run, in this
process; of a task, in a process of Ray; and real runs that are stopped or killed.

Skipped where Ray is not installed (`pip install 'lowbit[cluster]'`).
"""

import contextlib
import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lowbitcli import program
from lowbitcli.checkpoint import atomic
from lowbitcli.cli import app
from lowbitcli.pipeline import cluster, proof, shares
from tests.faults.commands import COMMANDS, content, models_in, names_in
from tests.faults.shim import CALLS, LONG, Counter, fail

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'lowbit[cluster]'")

RUNS = COMMANDS if LONG else COMMANDS[:1]
TIMES = 6 if LONG else 1  # real runs
FAULTS = {
    "ENOSPC": (fail(errno.ENOSPC), 5),
    "EIO": (fail(errno.EIO), 5),
    "SIGINT": (lambda *_: os.kill(os.getpid(), signal.SIGINT), 130),
    "SIGTERM": (lambda *_: os.kill(os.getpid(), signal.SIGTERM), 143),
}


@pytest.fixture(scope="module")
def engine():
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        with cluster.connected("local", "cpu") as found:
            yield found


@pytest.fixture
def said(engine, monkeypatch, capsys):
    """Return a function that runs `lowbit ARGUMENTS` here, on the one cluster of this module."""
    monkeypatch.setattr(cluster, "connected", lambda *_: contextlib.nullcontext(engine))
    monkeypatch.setattr(shares, "BUNDLE_BYTES", 1)
    monkeypatch.setattr(proof, "SYNC_BYTES", 1)

    def do(words):
        capsys.readouterr()
        code = program.run(app, [str(word) for word in words])
        found = capsys.readouterr()
        assert "Traceback" not in found.err, found.err
        return code, found.out, found.err

    return do


def words_of(command, models, place):
    return command.words(models, place, "--cluster", "local")


@contextlib.contextmanager
def faults(place, number, fault):
    """Let a fault happen at the n-th call of this process below `place`."""
    with pytest.MonkeyPatch.context() as patched:
        for name in CALLS:
            patched.setattr(os, name, getattr(os, name))
        patched.setattr(atomic, "_renameat2", atomic._renameat2)
        counter = Counter(place, lambda n: n == number, fault)
        for name in CALLS:
            counter.wrap(name)
        counter.wrap_rename()
        yield counter


def settled(said, command, models, place, whole, which):
    """The same command ends well: with the bytes of one process, and nothing beside them."""
    words, where = words_of(command, models, place)
    assert content(where) in (None, whole.content), which
    code, out, err = said(words)
    assert code == 0, (which, err)
    assert content(where) == whole.content and names_in(place) == [where.name], which
    # What Ray says of a worker that died is kept off stdout where one connects, which is not here.
    return json.loads(out[out.index("{\n") :])["resumed"]


@pytest.mark.parametrize("how", FAULTS)
@pytest.mark.parametrize("command", RUNS, ids=str)
def test_f1_f2_f6_a_fault_of_the_run(command, how, models, tmp_path, expected, said):
    whole = expected(command)
    counted = tmp_path / "counted"
    counted.mkdir()
    with faults(counted, 0, None) as counter:
        assert said(words_of(command, models, counted)[0])[0] == 0
    calls = counter.calls
    fault, end = FAULTS[how]
    first = 2 + 3 * list(FAULTS).index(how)
    ended = resumed = 0
    which = range(first % 4 + 1, calls + 1, 4) if LONG else range(first, calls, calls // 2)
    for n in which:
        place = tmp_path / str(n)
        place.mkdir()
        words, where = words_of(command, models, place)
        with faults(place, n, fault) as counter:
            code, _, err = said(words)
        # How many calls there are depends on what is done by when: the last may not come.
        assert code in ((0, end) if counter.fired else (0,)), (n, code, err)
        assert code == 0 or models_in(place) in ([], [where.name]), n
        if code > 5:
            assert "hint: run again to continue (" in err, (n, err)
        ended += code != 0
        resumed += settled(said, command, models, place, whole, (how, n)) > 0
    print(f"F1 F2 F6 --cluster {command}, {how}: {ended} of {len(which)} ended, {resumed} on")
    assert ended > len(which) // 3


def badly(fault, brief, bundle, device, crowd):
    """Be a task in whose process a write fails, or goes on no further."""
    real = os.pwrite

    def pwrite(fd, data, offset):
        os.pwrite = real
        if fault == "short":
            return real(fd, data[: max(1, len(data) // 2)], offset)
        if fault.startswith("kill"):
            mark = Path(brief.staging).parent.with_name("killed")
            if fault == "kill each" or not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return real(fd, data, offset)
        raise OSError(getattr(errno, fault), os.strerror(getattr(errno, fault)))

    os.pwrite = pwrite
    try:
        return cluster.do(brief, bundle, device, crowd)
    finally:
        os.pwrite = real


class Badly:
    """Stands for the task of an engine."""

    def __init__(self, fault):
        takes = {"num_cpus": 1, "max_retries": cluster.ATTEMPTS - 1, "retry_exceptions": False}
        self._task = ray.remote(**takes)(badly)
        self._fault = fault

    def remote(self, *args):
        return self._task.remote(self._fault, *args)


AT_WORK = {"ENOSPC": 5, "EIO": 5, "short": 0, "kill": 0, **({"kill each": 7} if LONG else {})}


@pytest.mark.parametrize("how", AT_WORK)
def test_f1_f2_f3_f4_a_fault_of_a_task(how, models, place, expected, said, engine, monkeypatch):
    command, end = COMMANDS[0], AT_WORK[how]
    whole = expected(command)
    words, where = words_of(command, models, place)
    with monkeypatch.context() as patched:
        patched.setattr(engine, "_task", Badly(how))
        code, _, err = said(words)
    assert code == end, (code, err)
    assert place.with_name("killed").exists() == how.startswith("kill")
    if end == 0:
        assert content(where) == whole.content and names_in(place) == [where.name]
        return
    assert models_in(place) == [] and err.startswith("error: "), err
    settled(said, command, models, place, whole, how)


ENDS = {signal.SIGKILL: -9, signal.SIGINT: 130, signal.SIGTERM: 143}


def test_f5_f6_real_runs_on_a_cluster_of_their_own(models, tmp_path, expected, said):
    ended = 0
    for number in range(TIMES):
        place = tmp_path / str(number)
        place.mkdir()
        command = COMMANDS[number % len(COMMANDS)]
        words, where = words_of(command, models, place)
        line = "from tests.faults.test_killed import slow; slow(); from lowbitcli.cli import main;"
        process = subprocess.Popen(
            [sys.executable, "-c", line + "main()", *(str(word) for word in words)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        until = time.monotonic() + 120
        while not names_in(place) and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(random.Random(number).uniform(0, 4))
        sent = list(ENDS)[number % 3]
        process.send_signal(sent)
        _, err = process.communicate(timeout=120)
        done = content(where) == expected(command).content
        # When all is published Python lets go of its handlers: a signal is then the system's.
        ends = (0, ENDS[sent], *((-sent,) if done else ()))
        assert process.returncode in ends, (number, process.returncode, err)
        assert "Traceback" not in err
        ended += process.returncode != 0
        settled(said, command, models, place, expected(command), number)
    print(f"F5 F6 --cluster local: {ended} of {TIMES} real runs ended")
    assert ended > TIMES // 3
