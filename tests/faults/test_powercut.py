"""F7: the power goes at any moment of a run, and any part of what was not synced is lost.

Recorded once, cut in this process; the same command is then run on what is left.
"""

import pickle
import random
import shutil
from dataclasses import dataclass

import pytest

from lowbitcli.checkpoint import atomic
from tests.faults.commands import COMMANDS, Command, content, names_in
from tests.faults.powercut import Recorder, after_cut, materialise
from tests.faults.shim import LONG, kill, run
from tests.faults.spread import spread

CUTS = 2000 if LONG else 200
RERUNS = 1 if LONG else 5  # every how many of them is gone on with


@dataclass(frozen=True)
class Scene:
    """A run to be cut: over nothing, over an old output, into folders that it has to make, or going
    on with what a killed one left; `plain` where the file system has no renameat2."""

    command: Command
    what: str  # new, forced, deep or resumed
    plain: bool = False

    def __str__(self):
        return f"{self.command} {self.what}{' plain' if self.plain else ''}"

    def words(self, models, place):
        inner = place / "a" / "b" if self.what == "deep" else place
        more = ["--force"] if self.what == "forced" else []
        return self.command.words(models, inner, *more)


SCENES = (
    *(
        Scene(command, what)
        for what in ("new", "forced", "deep", "resumed")
        for command in COMMANDS
    ),
    *(Scene(command, what, plain=True) for what in ("new", "forced") for command in COMMANDS[:2]),
)


def record(scene, models, place, calls):
    """Run a scene in `place` and return what it did."""
    saved = place.with_name("log")
    words, _ = scene.words(models, place)
    if scene.what == "forced":
        old, _ = scene.words(models, place)
        assert run(place, [*old, *scene.command.otherwise]).code == 0
    if scene.what == "resumed":
        assert run(place, words, calls * 2 // 3, kill).code < 0

    def prepare():
        if scene.plain:
            atomic._renameat2 = lambda *_: False
        recorder = Recorder(place)
        recorder.install()
        return lambda: recorder.save(saved)

    done = run(place, words, prepare=prepare)
    assert done.code == 0, done.err
    return pickle.loads(saved.read_bytes())


@pytest.fixture(scope="module")
def logs(models, tmp_path_factory, expected):
    """Return what the run of each scene does; nothing lost, it is what the run left."""
    for command in COMMANDS:
        expected(command)

    def case(scene, place):
        log = record(scene, models, place, expected(scene.command).calls)
        again = place.with_name("again")
        again.mkdir()
        kept = [step for step in log.steps if step.kind != "sync"]
        materialise(kept, log.folders, again)
        assert content(again) == content(place)
        shutil.rmtree(again)
        return log

    folder = tmp_path_factory.mktemp("logs")
    return dict(zip(SCENES, spread(case, SCENES, folder), strict=True))


def test_f7_the_power_goes(models, logs, tmp_path, expected):
    def case(number, place):
        scene = SCENES[number % len(SCENES)]
        log = logs[scene]
        draw = random.Random(number)
        end = len(log.steps)
        at = end if draw.random() < 0.125 else draw.randint(log.began, end)
        steps, lost = after_cut(log, at, draw)
        materialise(steps, log.folders, place)
        words, where = scene.words(models, place)
        whole = expected(scene.command)
        found = content(where)
        allowed = [whole.content, whole.other if scene.what == "forced" else None]
        if scene.plain and scene.command.kind == "directory":  # the old one is aside for a moment
            allowed.append(None)
            assert found or scene.what == "new" or content(place / ".out.old") == whole.other
        assert found in allowed, (number, str(scene), at)
        if at == end:  # the run had said that all is well
            assert found == whole.content, (number, str(scene))
        if number // len(SCENES) % RERUNS == 0:
            again = run(place, words)
            assert again.code == 0, (number, again.err)
            assert content(where) == whole.content, (number, str(scene), at)
            assert names_in(where.parent) == [where.name], (number, str(scene), at)
        return lost, found is not None

    results = spread(case, range(CUTS), tmp_path)
    lost = [number for number, _ in results]
    print(
        f"F7: {CUTS} cuts, {sum(n > 0 for n in lost)} lost something, {sum(lost)} steps in all; "
        f"{sum(there for _, there in results)} found an output, old or new, and it was whole"
    )
    assert sum(n > 0 for n in lost) > CUTS // 2
    assert 0 < sum(there for _, there in results) < CUTS
