"""F6: SIGINT and SIGTERM stop a run, which the same command continues; a second one ends it."""

import json
import os
import signal
import time

import pytest

from tests.faults.commands import COMMANDS, content, models_in, names_in
from tests.faults.shim import run
from tests.faults.spread import spread


@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGTERM), ids=lambda x: x.name)
@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_f6_a_signal_stops_it_and_the_same_command_goes_on(
    command, number, models, tmp_path, expected
):
    whole = expected(command)

    def send(*_):
        os.kill(os.getpid(), number)

    def case(n, place):
        words, where = command.words(models, place)
        done = run(place, words, n, send)
        if done.code != 0:
            assert done.code == 128 + number, (n, done.err)
            word = "terminated" if number == signal.SIGTERM else "interrupted"
            assert f"error: {word}" in done.err
            assert "hint: run again to continue (" in done.err
            assert models_in(place) == []
            said = done.err.split("continue (")[1].split("/")
            again = run(place, words)
            assert again.code == 0, again.err
            assert json.loads(again.out)["resumed"] == int(said[0])
        assert content(where) == whole.content
        assert names_in(place) == [where.name]
        return done.fired, done.code != 0

    step = max(1, whole.calls // 6)
    results = spread(case, range(4, whole.calls, step), tmp_path)
    fired, stopped = (sum(column) for column in zip(*results, strict=True))
    print(f"F6 {command}, {number.name}: {fired} signals, {stopped} runs stopped")
    assert fired >= 4 and stopped >= 2


@pytest.mark.parametrize("command", COMMANDS[::2], ids=str)
def test_f6_a_second_signal_stops_it_at_once(command, models, tmp_path, expected):
    whole = expected(command)

    def case(first, place):
        sent = []

        def send(*_):
            """Send two signals and no third, which would meet the child on its way out."""
            if len(sent) < 2:
                sent.append(signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.05)

        words, where = command.words(models, place)
        done = run(place, words, lambda n: n >= first, send)
        assert done.fired >= 2
        assert done.code == 130, (first, done.err)
        assert models_in(place) == []
        assert run(place, words).code == 0
        assert content(where) == whole.content
        return True

    stopped = sum(spread(case, range(4, whole.calls // 2, 4), tmp_path))
    print(f"F6 {command}: {stopped} runs got a second signal")
    assert stopped >= 3
