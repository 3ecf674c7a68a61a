"""F18: the same bytes from every setting that may change how a run goes about its work."""

import dataclasses
import os
import subprocess
import sys

import pytest
import torch

from lowbitcli.pipeline import memory
from tests.faults.commands import COMMANDS, content
from tests.faults.shim import LONG, kill, run
from tests.faults.spread import spread

# Processes of their own, which take seconds; this one has a seed too, a random one.
HASHED = COMMANDS if LONG else COMMANDS[:1]
SEEDS = ("0", "4294967295") if LONG else ("0",)


def budgeted(**fixed):
    """Return what gives a child a budget of its own."""

    def prepare():
        real = memory.budget
        memory.budget = lambda *args: dataclasses.replace(real(*args), **fixed)

    return prepare


def threads_of_torch():
    torch.set_num_threads(3)


SETTINGS = {
    "one thread": ((), {"prepare": budgeted(threads=1)}),
    "eight threads": ((), {"prepare": budgeted(threads=8)}),
    "small slices": ((), {"prepare": budgeted(elements=700, held=0)}),
    "nothing held": ((), {"prepare": budgeted(held=0)}),
    "threads of torch": ((), {"prepare": threads_of_torch}),
    "little memory": (("--max-memory", "1GiB"), {}),
    "no readback, seldom journalled": (("--no-readback",), {"journal_each": False}),
}


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_f18_settings(command, models, tmp_path, expected):
    whole = expected(command)

    def case(name, place):
        more, options = SETTINGS[name]
        words, where = command.words(models, place, *more)
        done = run(place, words, **options)
        assert done.code == 0, (name, done.err)
        assert content(where) == whole.content, name
        return True

    def gone_on(at, place):
        words, where = command.words(models, place)
        assert run(place, words, at, kill).code < 0
        assert run(place, words, prepare=budgeted(threads=1, elements=700, held=0)).code == 0
        assert content(where) == whole.content
        return True

    same = [
        *spread(case, SETTINGS, tmp_path),
        *spread(gone_on, (whole.calls // 2, whole.calls - 6), tmp_path),
    ]
    print(f"F18 {command}: {len(same)} settings, the same bytes")
    assert len(same) >= 8


@pytest.mark.parametrize("command", HASHED, ids=str)
def test_f18_hash_seeds(command, models, tmp_path, expected):
    whole = expected(command)

    def case(seed, place):
        words, where = command.words(models, place)
        given = {**os.environ, "PYTHONHASHSEED": seed, "TZ": "Asia/Tokyo", "LC_ALL": "C"}
        line = [sys.executable, "-m", "lowbitcli", *(str(word) for word in words)]
        subprocess.run(line, env=given, check=True, capture_output=True)
        assert content(where) == whole.content, seed
        return True

    print(f"F18 {command}: {len(spread(case, SEEDS, tmp_path))} hash seeds")
