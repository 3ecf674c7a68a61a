"""F1, F2, F3, F4, F6 where processes do the jobs (`--devices`): faults of the run, which has the
lock, the journal and the end, and of a process, which writes.

Processes are forked here, from a run that is a fork itself; `FAULTS=all` also kills runs whose
processes are begun as they are outside of tests.
"""

import errno
import fcntl
import json
import mmap
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from lowbitcli.pipeline import processes, shares
from tests.faults.commands import COMMANDS, content, models_in, names_in
from tests.faults.shim import LONG, fail, kill, run
from tests.faults.spread import spread

DEVICES = "cpu,cpu"
RUNS = COMMANDS if LONG else COMMANDS[:1]
CALLS = range(1, 9) if LONG else (2, 5)  # of a process, which are hit
TIMES = 24 if LONG else 0  # real processes


def words_of(command, models, place, *more):
    words, where = command.words(models, place, *more)
    at = words.index("--device")
    words[at : at + 2] = "--devices", DEVICES
    return words, where


def forking():
    """Let processes be forked, and each job be given to one by itself."""
    forked = multiprocessing.get_context("fork")
    processes.multiprocessing = SimpleNamespace(get_context=lambda _: forked)
    processes.resource_tracker = SimpleNamespace(ensure_running=lambda: None)
    shares.BUNDLE_BYTES = 1


class InRun:
    """A fault at the n-th call of the run itself."""

    def __init__(self, number):
        self.number, self.run = number, 0

    def prepare(self):
        forking()
        self.run = os.getpid()

    def at(self, count):
        return count == self.number and os.getpid() == self.run


class AtWork:
    """A fault at the n-th call of the first process that comes to it, or of each."""

    def __init__(self, number, fault, *, once=True):
        self.number, self.fault, self.once = number, fault, once
        self.shared = mmap.mmap(-1, 8)  # how often it happened, in any process
        self.run = self.before = 0

    def prepare(self):
        forking()
        self.run = os.getpid()

    def at(self, count):
        """Is this the call? Counts go on where the run's were when the process was begun."""
        if os.getpid() == self.run:
            self.before = count
            return False
        if count - self.before != self.number or (self.once and self.shared[0]):
            return False
        self.shared[0] += 1
        return True

    def happens(self, *args):
        return self.fault(*args)

    @property
    def fired(self):
        return self.shared[0]


def gone(place, where):
    """Wait until nobody holds the lock that processes inherit where they are forked."""
    path = place / f".{where.name}.lock"
    until = time.monotonic() + 30
    while path.exists() and time.monotonic() < until:
        with open(path) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(0.005)


def settled(command, models, place, whole, said):
    """The same command ends well: with the bytes of one process, and nothing beside them."""
    words, where = words_of(command, models, place)
    gone(place, where)
    assert content(where) in (None, whole.content), said
    again = run(place, words, prepare=forking)
    assert again.code == 0, (said, again.err)
    assert content(where) == whole.content, said
    assert names_in(place) == [where.name], said
    return json.loads(again.out)["resumed"]


def calls_of(command, models, tmp_path):
    folder = tmp_path / "counted"
    folder.mkdir(exist_ok=True)
    words, _ = words_of(command, models, folder)
    done = run(folder, words, prepare=forking)
    assert done.code == 0 and done.calls > 15, done.err
    return done.calls


FAULTS = {
    "ENOSPC": fail(errno.ENOSPC),
    "EIO": fail(errno.EIO),
    "kill": kill,
    "SIGINT": lambda *_: os.kill(os.getpid(), signal.SIGINT),
    "SIGTERM": lambda *_: os.kill(os.getpid(), signal.SIGTERM),
}
ENDS = {"ENOSPC": (0, 5), "EIO": (0, 5), "kill": (-9, 0), "SIGINT": (0, 130), "SIGTERM": (0, 143)}


@pytest.mark.parametrize("how", FAULTS)
@pytest.mark.parametrize("command", RUNS, ids=str)
def test_f1_f2_f4_f6_a_fault_of_the_run(command, how, models, tmp_path, expected):
    whole = expected(command)
    calls = calls_of(command, models, tmp_path)

    def case(n, place):
        words, where = words_of(command, models, place)
        hit = InRun(n)
        done = run(place, words, hit.at, FAULTS[how], prepare=hit.prepare)
        # How many calls there are depends on what is done by when: the last may not come.
        fired = done.fired or how == "kill"
        assert done.code in (ENDS[how] if fired else (0,)), (n, done.code, done.err)
        assert "Traceback" not in done.err, (n, done.err)
        if done.code == 5:
            first = done.err.splitlines()[0]
            assert os.strerror(getattr(errno, how)) in first and str(place) in first, first
        if done.code > 5:
            assert "hint: run again to continue (" in done.err, (n, done.err)
        if done.code:
            assert models_in(place) in ([], [where.name]), n
        return done.code, settled(command, models, place, whole, (how, n))

    first = 2 + 3 * list(FAULTS).index(how)
    which = range(first % 3 + 1, calls, 3) if LONG else range(first, calls, calls // 2)
    results = spread(case, which, tmp_path)
    failed = sum(code != 0 for code, _ in results)
    resumed = sum(n > 0 for _, n in results)
    print(f"F1 F2 F4 F6 --devices {command}, {how}: {failed} of {len(results)} ended, {resumed} on")
    assert failed > len(results) // 3


def short(*args):
    """Cut a write; what else is hit happens as it is."""
    if len(args) == 3 and isinstance(args[1], memoryview):
        return args[0], args[1][: max(1, len(args[1]) // 2)], args[2]
    return None


AT_WORK = {
    "ENOSPC": (fail(errno.ENOSPC), True, 5),
    "EIO": (fail(errno.EIO), True, 5),
    "short": (short, False, 0),
    "kill": (kill, True, 0),
    "kill each": (kill, False, 7),
}


@pytest.mark.parametrize("how", AT_WORK)
@pytest.mark.parametrize("command", RUNS, ids=str)
def test_f1_f2_f3_f4_a_fault_of_a_process(command, how, models, tmp_path, expected):
    whole = expected(command)
    fault, once, end = AT_WORK[how]

    def case(n, place):
        words, where = words_of(command, models, place)
        hit = AtWork(n, fault, once=once)
        done = run(place, words, hit.at, hit.happens, prepare=hit.prepare)
        # It may have come to its end before; and where each dies of another job, all get done.
        ends = (end, 0) if how == "kill each" else (end,)
        assert done.code in (ends if hit.fired else (0,)), (n, done.code, done.err)
        if done.code == 7:
            assert "died" in done.err and "run again to continue" in done.err, done.err
        if done.code:
            assert done.err.startswith("error: ") and models_in(place) == [], (n, done.err)
        else:
            assert content(where) == whole.content and names_in(place) == [where.name], n
            return hit.fired
        settled(command, models, place, whole, (how, n))
        return hit.fired

    fired = spread(case, CALLS, tmp_path)
    print(f"F1 F2 F3 F4 --devices {command}, {how} in a process: {sum(fired)} times")
    assert sum(n > 0 for n in fired) > len(fired) // 4  # a lone file takes few calls


def _begin(words):
    line = "from tests.faults.test_killed import slow; slow(); from lowbitcli.cli import main; main"
    return subprocess.Popen(
        [sys.executable, "-c", line + "()", *(str(word) for word in words)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.skipif(not TIMES, reason="with FAULTS=all: processes of their own take seconds")
def test_f5_f6_real_processes(models, tmp_path, expected):
    def case(number, place):
        command = COMMANDS[number % len(COMMANDS)]
        whole = expected(command)
        words, where = words_of(command, models, place)
        process = _begin(words)
        until = time.monotonic() + 60
        while not names_in(place) and time.monotonic() < until:
            time.sleep(0.005)
        time.sleep(random.Random(number).uniform(0, 6))
        ends = {signal.SIGKILL: -9, signal.SIGINT: 130, signal.SIGTERM: 143}
        sent = list(ends)[number % 3]
        process.send_signal(sent)
        _, said = process.communicate(timeout=60)
        assert process.returncode in (0, ends[sent]), (number, process.returncode, said)
        assert "Traceback" not in said
        writing = f".{where.name}.partial" in names_in(place)
        settled(command, models, place, whole, number)
        return process.returncode != 0, writing

    results = spread(case, range(TIMES), tmp_path)
    ended, writing = (sum(column) for column in zip(*results, strict=True))
    print(f"F5 F6 --devices: {ended} of {TIMES} real runs ended, {writing} while writing")
    assert writing > TIMES // 2
