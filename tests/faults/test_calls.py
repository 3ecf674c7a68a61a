"""F1, F2, F3: calls that fail for want of space or of a disk, and writes that are cut short.

`FAULTS=all` (make faults) hits every call instead of every third.
"""

import errno
import os

import pytest

from tests.faults.commands import COMMANDS, content, models_in, names_in
from tests.faults.shim import EVERY, fail, run
from tests.faults.spread import spread


@pytest.mark.parametrize("code", (errno.ENOSPC, errno.EIO), ids=errno.errorcode.get)
@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_f1_f2_a_call_fails(command, code, models, tmp_path, expected):
    whole = expected(command)

    def case(n, place):
        words, where = command.words(models, place)
        done = run(place, words, n, fail(code))
        assert done.fired == 1, n
        if done.code == 0:  # what fails after the rename, or removing the lock, changes nothing
            assert content(where) == whole.content, n
        else:
            assert done.code == 5, (n, done.err)
            lines = done.err.splitlines()
            assert lines[0].startswith("error: ") and str(place) in lines[0], (n, done.err)
            assert os.strerror(code) in lines[0], (n, done.err)
            if code == errno.ENOSPC:
                assert "bytes needed" in lines[0] and "free" in lines[0], (n, done.err)
            assert content(where) in (None, whole.content), n
        again = run(place, words)
        assert again.code == 0, (n, again.err)
        assert content(where) == whole.content and models_in(place) == [where.name], n
        assert names_in(place) == [where.name], n
        return done.code

    codes = spread(case, range(1, whole.calls + 1, EVERY), tmp_path)
    print(
        f"F1 F2 {command}: {len(codes)} of {whole.calls} calls failed with {errno.errorcode[code]}"
    )
    assert len(codes) >= whole.calls // EVERY > 5
    assert codes.count(5) > len(codes) // 2


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_f3_short_writes(command, models, tmp_path, expected):
    whole = expected(command)

    def short(*args):
        """Cut a write; what else is hit happens as it is."""
        if len(args) == 3 and isinstance(args[1], memoryview):
            return args[0], args[1][: max(1, len(args[1]) // 2)], args[2]
        return None

    def case(every, place):
        words, where = command.words(models, place)
        done = run(place, words, lambda n: n % every == 0, short)
        assert done.code == 0, done.err
        assert content(where) == whole.content
        return done.fired

    fired = spread(case, (EVERY, 2, 1), tmp_path)
    print(f"F3 {command}: {sum(fired)} faults, {whole.calls} calls undisturbed")
    assert sum(fired) > whole.calls > 10
