"""F9, F19: runs that are not alone: others want the same output, or change the source."""

import os
import shutil
import time

import pytest

from tests.faults.commands import COMMANDS, Models, content, models_in, names_in
from tests.faults.shim import run, start


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
