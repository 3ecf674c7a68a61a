"""F4, F5: a run that is killed at each of its calls, and at any time; the same command goes on."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.faults.commands import COMMANDS, content, models_in, names_in
from tests.faults.shim import EVERY, LONG, kill, run, start
from tests.faults.spread import spread

TIMES = 200 if LONG else 20  # F5, over all commands
PROCESSES = 20 if LONG else 1  # of those, how many are new processes and no forks
SLOW = 0.01  # seconds that a write takes longer


@pytest.mark.parametrize("forced", (False, True), ids=("new", "forced"))
@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_f4_killed_at_a_call(command, forced, models, tmp_path, expected):
    whole = expected(command)
    old = whole.other if forced else None
    kept = tmp_path / "kept"
    if forced:
        kept.mkdir()
        words, other = command.words(models, kept, *command.otherwise)
        assert run(kept, words).code == 0

    def case(n, place):
        words, where = command.words(models, place, *(["--force"] if forced else []))
        if forced:
            copy = shutil.copytree if other.is_dir() else shutil.copy
            copy(other, where)
        done = run(place, words, n, kill)
        if done.code == 0:  # fewer calls than counted: nothing was hit
            return 0, False
        assert done.code == -signal.SIGKILL, (n, done.code, done.err)
        assert models_in(place) in ([], [where.name]), n
        assert content(where) in (old, whole.content), n
        again = run(place, words)
        assert again.code == 0, (n, again.err)
        assert content(where) == whole.content, n
        assert names_in(place) == [where.name], n
        return done.fired, json.loads(again.out)["resumed"] > 0

    every = min(EVERY, max(1, whole.calls // 8))
    results = spread(case, range(1, whole.calls + 1, every), tmp_path)
    fired, resumed = sum(hit for hit, _ in results), sum(on for _, on in results)
    print(f"F4 {command}, forced {forced}: killed at {fired} calls, {resumed} went on")
    assert fired >= whole.calls // every - 1 > 5
    assert resumed > 0


def slow():
    """Let a write take longer, so that most of a run is writing, as with a large model."""
    real, one = os.pwrite, threading.Lock()

    def call(*args):
        with one:
            time.sleep(SLOW)
        return real(*args)

    os.pwrite = call


def _begun(place):
    """Wait for the first name that a run makes, for a minute at most."""
    until = time.monotonic() + 60
    while not names_in(place) and time.monotonic() < until:
        time.sleep(0.002)


def _forked(place, words, moment, *, at_once=False):
    """Kill a fork `moment` seconds after it began to write, or was begun itself."""
    child = start(place, words, prepare=slow)
    if not at_once:
        _begun(place)
    time.sleep(moment)
    os.kill(child.pid, signal.SIGKILL)  # not waited for yet, so the number is still its own
    return child.end().code


def _process(place, words, moment):
    """Kill a new process, which imports everything itself, in the same way."""
    line = "from tests.faults.test_killed import slow; slow(); from lowbitcli.cli import main; main"
    process = subprocess.Popen(
        [sys.executable, "-c", line + "()", *(str(word) for word in words)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _begun(place)
    time.sleep(moment)
    process.kill()
    return process.wait()


def _writing(command, models, place):
    """Return the seconds for which an undisturbed run writes."""
    child = start(place, command.words(models, place)[0], prepare=slow)
    _begun(place)
    began = time.monotonic()
    assert child.end().code == 0
    return time.monotonic() - began


def test_f5_killed_at_any_time(models, tmp_path, expected):
    took = {}
    for command in COMMANDS:
        expected(command)
        folder = tmp_path / str(command)
        folder.mkdir()
        took[command] = _writing(command, models, folder)

    def case(number, place):
        command = COMMANDS[number % len(COMMANDS)]
        words, where = command.words(models, place)
        moment = random.Random(number).uniform(0, took[command])
        if number < PROCESSES:
            code = _process(place, words, moment)
        else:
            code = _forked(place, words, moment, at_once=number % 10 == 9)
        assert code in (0, -signal.SIGKILL)
        found = content(where)
        assert found in (None, expected(command).content), (number, moment)
        writing = found is None and f".{where.name}.partial" in names_in(place)
        again = run(place, words)
        assert again.code == 0, (number, again.err)
        assert content(where) == expected(command).content, (number, moment)
        assert names_in(place) == [where.name], (number, moment)
        return code != 0, writing, json.loads(again.out)["resumed"] > 0

    results = spread(case, range(TIMES), tmp_path)
    killed, writing, resumed = (sum(column) for column in zip(*results, strict=True))
    print(f"F5: {killed} of {TIMES} killed, {writing} while writing, {resumed} went on")
    assert writing >= 0.6 * TIMES, "killed before or after the writing: this proves little"
