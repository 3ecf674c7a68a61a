"""F9, F19: runs that are not alone: others want the same output, or change the source."""

import ctypes
import json
import os
import shutil
import time

import pytest

from tests import checkpoints
from tests.faults.commands import COMMANDS, Models, content, models_in, names_in
from tests.faults.shim import kill, run, start
from tests.faults.test_refused import CAPABILITIES


@pytest.mark.parametrize("number", (2, 4, 8))
@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_f9_one_of_many_writes_and_the_others_are_told(command, number, models, place, expected):
    words, where = command.words(models, place)
    ready = place.parent / "go"

    def wait(*_):
        """The one that has the lock does not end before all have tried."""
        for _ in range(600):
            if ready.exists():
                return
            time.sleep(0.1)

    children = [start(place, words, 3, wait) for _ in range(number)]
    losers = []
    while len(losers) < number - 1:
        for child in list(children):
            if (child.folder / "report").exists():
                losers.append(child.end())
                children.remove(child)
        time.sleep(0.02)
    ready.touch()
    winner = children[0].end()
    codes = sorted([winner.code, *(one.code for one in losers)])
    print(f"F9 {command}: {number} at once, exit codes {codes}")
    assert codes == [0] + [6] * (number - 1), [one.err for one in losers]
    assert winner.fired == 1
    assert content(where) == expected(command).content
    assert names_in(place) == [where.name]


_KEEPCAPS, _READ_SEARCH = 8, 1 << 2  # linux/prctl.h, linux/capability.h
NOBODY = 65534


def as_somebody_else():
    """Be a user who may read all, as libraries may lie in a home, and write as others may."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_KEEPCAPS, 1, 0, 0, 0) == 0
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    head = (ctypes.c_uint32 * 2)(CAPABILITIES, 0)
    assert libc.capset(head, (ctypes.c_uint32 * 6)(_READ_SEARCH, _READ_SEARCH)) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
@pytest.mark.parametrize("mode", (0o777, 0o1777), ids=oct)
@pytest.mark.parametrize("command", COMMANDS[::3], ids=str)
def test_f9_two_users_on_one_output(command, mode, models, place, expected):
    """What one has begun is neither gone on with nor thrown away by the other."""
    words, where = command.words(models, place)
    whole = expected(command)
    place.chmod(mode)
    assert run(place, words, whole.calls * 2 // 3, kill).code < 0
    left = checkpoints.everything_below(place)
    assert len(left) > 1
    other = run(place, words, prepare=as_somebody_else)
    assert other.code == 5 and other.err.startswith("error: "), (other.code, other.err)
    assert "hint: " in other.err and "ermi" in other.err
    assert checkpoints.everything_below(place) == left
    again = run(place, words)
    assert again.code == 0 and json.loads(again.out)["resumed"] > 0, again.err
    assert content(where) == whole.content and names_in(place) == [where.name]
    print(f"F9 {command}, {mode:o}: another user is told, exit code 5, and all is as it was")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_f9_what_another_user_began_is_not_believed(models, place, expected):
    command = COMMANDS[0]
    words, where = command.words(models, place)
    whole = expected(command)
    place.chmod(0o777)
    at = whole.calls * 2 // 3
    assert run(place, words, at, kill, prepare=as_somebody_else).code < 0
    assert place.joinpath(".out.journal").stat().st_uid == NOBODY
    mine = run(place, words)
    assert mine.code == 0 and json.loads(mine.out)["resumed"] == 0, mine.err
    assert content(where) == whole.content and names_in(place) == [where.name]


@pytest.mark.parametrize("change", ("touched", "truncated", "replaced"))
@pytest.mark.parametrize("command", COMMANDS[::2], ids=str)
def test_f19_the_source_changes_during_the_run(command, change, models, place, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(command.reads(models), source)
    own = Models(source, models.alone, source, models.quantized_alone)
    shard = sorted(source.glob("*.safetensors"))[-1]
    kept = shard.read_bytes()

    def alter(*_):
        if change == "touched":
            os.utime(shard, ns=(1, 1))
        elif change == "truncated":
            os.truncate(shard, len(kept) // 2)
        else:
            beside = shard.with_name("beside")
            beside.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
            os.replace(beside, shard)

    fired = 0
    for n in range(3, 8):
        words, where = command.words(own, place)
        done = run(place, words, n, alter)
        fired += done.fired
        assert done.code in (4, 5), (n, done.code, done.err)
        assert models_in(place) == [] and not where.exists(), n
        assert names_in(place) == [], n
        shard.write_bytes(kept)
    print(f"F19 {command}, {change}: {fired} times")
    assert fired == 5
