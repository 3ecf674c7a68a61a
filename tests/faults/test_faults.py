"""What a run leaves behind when calls fail, when it is killed, stopped, or not alone.

Numbers are those of the fault matrix in docs; every test says how many faults happened, and fails
where none did. `FAULTS=all` (make faults) hits every call instead of every third.
"""

import errno
import hashlib
import json
import os
import shutil
import signal
import time

import pytest

from tests import checkpoints
from tests.faults.shim import EVERY, fail, kill, run, start

KINDS = ("directory", "file")


def words(kind, source, alone, place, *more):
    """Return the command that writes `out` of this kind, and where it goes."""
    if kind == "directory":
        where = place / "out"
        return ["quantize", source, "-o", where, "--device", "cpu", "--json", *more], where
    where = place / "out.safetensors"
    return ["quantize", alone, "-o", where, "--device", "cpu", "--json", *more], where


def content(where):
    """Return what an output holds, None where there is none."""
    if not where.exists():
        return None
    if where.is_dir():
        return checkpoints.hashes(where)
    return hashlib.sha256(where.read_bytes()).hexdigest()


def models(place):
    """Return what in a folder looks like a checkpoint or a part of one."""
    return [path.name for path in place.iterdir() if not path.name.startswith(".")]


@pytest.fixture
def expected(source, alone, tmp_path):
    """Return a function: kind -> (content of an undisturbed run, number of its calls)."""

    def do(kind):
        place = tmp_path / "undisturbed"
        place.mkdir()
        command, where = words(kind, source, alone, place)
        done = run(place, command)
        assert done.code == 0, done.err
        return content(where), done.calls

    return do


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("code", (errno.ENOSPC, errno.EIO))
def test_f1_f2_a_call_fails(kind, code, source, alone, place, expected):
    whole, calls = expected(kind)
    fired = 0
    for n in range(1, calls + 1, EVERY):
        command, where = words(kind, source, alone, place)
        done = run(place, command, n, fail(code))
        assert done.fired == 1, n
        fired += 1
        if done.code == 0:  # what fails after the rename, or removing the lock, changes nothing
            assert content(where) == whole, n
        else:
            assert done.code == 5, (n, done.err)
            lines = done.err.splitlines()
            assert lines[0].startswith("error: ") and str(place) in lines[0], (n, done.err)
            assert os.strerror(code) in lines[0], (n, done.err)
            if code == errno.ENOSPC:
                assert "bytes needed" in lines[0] and "free" in lines[0], (n, done.err)
            assert content(where) in (None, whole), n
        again = run(place, command)
        assert again.code == 0, (n, again.err)
        assert content(where) == whole and models(place) == [where.name], n
        assert [p.name for p in place.iterdir()] == [where.name], n
        _remove(place)
    print(f"{kind}: {fired} of {calls} calls failed with {errno.errorcode[code]}")
    assert fired >= calls // EVERY > 5


@pytest.mark.parametrize("kind", KINDS)
def test_f3_short_writes(kind, source, alone, place, expected):
    whole, calls = expected(kind)
    command, where = words(kind, source, alone, place)

    def short(fd, data, offset):
        return fd, memoryview(data)[: max(1, len(data) // 2)], offset

    def some(n):
        return n % EVERY == 0

    fired = 0
    for at in (some, lambda _: True):
        done = run(place, command, at, _only_writes(short))
        assert done.code == 0, done.err
        assert content(where) == whole
        fired += done.fired
        _remove(place)
    print(f"{kind}: {fired} faults, {calls} calls undisturbed")
    assert fired > calls // EVERY


def _only_writes(short):
    """A write is cut short; other calls that are hit happen as they are."""

    def fault(*args):
        return short(*args) if len(args) == 3 and isinstance(args[1], memoryview) else None

    return fault


@pytest.mark.parametrize("forced", (False, True))
@pytest.mark.parametrize("kind", KINDS)
def test_f4_killed_at_a_call(kind, forced, source, alone, place, expected):
    whole, calls = expected(kind)
    fired = resumed = 0
    for n in range(1, calls + 1, EVERY):
        command, where = words(kind, source, alone, place, *(["--force"] if forced else []))
        old = None
        if forced:
            other, _ = words(kind, source, alone, place, "--scheme", "mxfp8")
            assert run(place, other).code == 0
            old = content(where)
        done = run(place, command, n, kill)
        if done.code == 0:  # fewer calls than counted: nothing was hit
            _remove(place)
            continue
        assert done.code == -signal.SIGKILL, (n, done.code, done.err)
        fired += done.fired
        assert models(place) in ([], [where.name]), n
        assert content(where) in (old, whole), n
        again = run(place, command)
        assert again.code == 0, (n, again.err)
        said = json.loads(again.out)
        resumed += said["resumed"] > 0
        assert content(where) == whole, n
        assert [p.name for p in place.iterdir()] == [where.name], n
        _remove(place)
    print(f"{kind}, forced {forced}: killed at {fired} of {calls} calls, {resumed} went on")
    assert fired >= calls // EVERY - 1 > 5
    assert resumed > 0


@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGTERM))
@pytest.mark.parametrize("kind", KINDS)
def test_f6_a_signal_stops_it_and_the_same_command_goes_on(
    kind, number, source, alone, place, expected
):
    whole, calls = expected(kind)

    def send(*_):
        os.kill(os.getpid(), number)

    fired = stopped = 0
    for n in range(4, calls, max(1, calls // 6)):
        command, where = words(kind, source, alone, place)
        done = run(place, command, n, send)
        fired += done.fired
        if done.code != 0:
            assert done.code == 128 + number, (n, done.err)
            word = "terminated" if number == signal.SIGTERM else "interrupted"
            assert f"error: {word}" in done.err
            assert "hint: run again to continue (" in done.err
            assert models(place) == []
            said = done.err.split("continue (")[1].split("/")
            stopped += 1
            again = run(place, command)
            assert again.code == 0, again.err
            assert json.loads(again.out)["resumed"] == int(said[0])
        assert content(where) == whole
        assert [p.name for p in place.iterdir()] == [where.name]
        _remove(place)
    print(f"{kind}, {number.name}: {fired} signals, {stopped} runs stopped")
    assert fired >= 4 and stopped >= 2


def test_f6_a_second_signal_stops_it_at_once(source, alone, place, expected):
    whole, calls = expected("directory")
    sent = []

    def send(*_):
        """Send two signals and no third, which would meet the child on its way out."""
        if len(sent) < 2:
            sent.append(signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)

    stopped = 0
    for first in range(4, calls // 2, 3):
        command, where = words("directory", source, alone, place)
        done = run(place, command, lambda n, first=first: n >= first, send)
        assert done.fired >= 2
        assert done.code == 130, (first, done.err)
        stopped += 1
        assert models(place) == []
        assert run(place, command).code == 0
        assert content(where) == whole
        _remove(place)
    print(f"{stopped} runs got a second signal")
    assert stopped >= 3


@pytest.mark.parametrize("number", (2, 4, 8))
@pytest.mark.parametrize("kind", KINDS)
def test_f9_one_of_many_writes_and_the_others_are_told(
    kind, number, source, alone, place, expected
):
    whole, _ = expected(kind)
    command, where = words(kind, source, alone, place)
    ready = place.parent / "go"

    def wait(*_):
        """The one that has the lock does not end before all have tried."""
        for _ in range(600):
            if ready.exists():
                return
            time.sleep(0.1)

    children = [start(place, command, 3, wait) for _ in range(number)]
    losers = []
    while len(losers) < number - 1:
        for child in list(children):
            if (child.folder / "report").exists():
                losers.append(child.end())
                children.remove(child)
        time.sleep(0.05)
    ready.touch()
    winner = children[0].end()
    codes = sorted([winner.code, *(one.code for one in losers)])
    print(f"{kind}: {number} at once, exit codes {codes}")
    assert codes == [0] + [6] * (number - 1), [one.err for one in losers]
    assert winner.fired == 1
    assert content(where) == whole
    assert [p.name for p in place.iterdir()] == [where.name]


@pytest.mark.parametrize("change", ("touched", "truncated", "replaced"))
def test_f19_the_source_changes_during_the_run(change, source, alone, place, expected):
    _, calls = expected("directory")
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
        command, where = words("directory", source, alone, place)
        done = run(place, command, n, alter)
        fired += done.fired
        assert done.code in (4, 5), (n, done.code, done.err)
        assert models(place) == [] and not where.exists(), n
        assert list(place.iterdir()) == [], n
        shard.write_bytes(kept)
    print(f"{change}: {fired} times during a run of {calls} calls")
    assert fired == 5


def _remove(place):
    for path in place.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
