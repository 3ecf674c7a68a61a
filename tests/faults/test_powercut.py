"""F7: the power goes at any moment of a run, and any part of what was not synced is lost.

Recorded once, cut in this process; the same command is then run on what is left.
"""

import pickle
import random
from dataclasses import dataclass

from tests.faults.commands import COMMANDS, Command, content, names_in
from tests.faults.powercut import Recorder, after_cut, materialise
from tests.faults.shim import LONG, run
from tests.faults.spread import spread

CUTS = 2000 if LONG else 200
RERUNS = 1 if LONG else 4  # every how many of them is gone on with


@dataclass(frozen=True)
class Scene:
    """A run to be cut: over nothing, over an old output, or into folders that it has to make."""

    command: Command
    what: str  # new, forced or deep

    def __str__(self):
        return f"{self.command} {self.what}"

    def words(self, models, place):
        inner = place / "a" / "b" if self.what == "deep" else place
        more = ["--force"] if self.what == "forced" else []
        return self.command.words(models, inner, *more)


SCENES = tuple(Scene(command, what) for command in COMMANDS for what in ("new", "forced", "deep"))


def record(scene, models, place, log):
    """Run a scene in `place` and write what it did to the file `log`."""
    words, _ = scene.words(models, place)
    if scene.what == "forced":
        old, _ = scene.words(models, place)
        assert run(place, [*old, *scene.command.otherwise]).code == 0

    def prepare():
        recorder = Recorder(place)
        recorder.install()
        return lambda: recorder.save(log)

    done = run(place, words, prepare=prepare)
    assert done.code == 0, done.err
    return pickle.loads(log.read_bytes())


def test_the_model_of_a_whole_disk_is_the_disk(models, tmp_path):
    for scene in SCENES[:6]:
        place = tmp_path / str(scene)
        place.mkdir()
        log = record(scene, models, place, tmp_path / "log")
        again = tmp_path / f"{scene} again"
        again.mkdir()
        kept = [step for step in log.steps if step.kind != "sync"]
        materialise(kept, log.folders, again)
        assert content(again) == content(place)


def test_f7_the_power_goes(models, tmp_path, expected):
    logs = {}
    for scene in SCENES:
        place = tmp_path / str(scene)
        place.mkdir()
        logs[scene] = record(scene, models, place, tmp_path / "log")
        expected(scene.command)

    def case(number, place):
        scene = SCENES[number % len(SCENES)]
        log = logs[scene]
        draw = random.Random(number)
        first = begin(log)
        at = len(log.steps) if number % 8 == 7 else draw.randint(first, len(log.steps))
        steps, lost = after_cut(log, at, draw)
        materialise(steps, log.folders, place)
        words, where = scene.words(models, place)
        whole = expected(scene.command)
        found, old = content(where), whole.other if scene.what == "forced" else None
        assert found in (old, whole.content), (number, str(scene), at)
        if at == len(log.steps):  # the run had said that all is well
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


def begin(log):
    """Return the step of a log at which the run itself begins, what was there before behind it."""
    for n, step in enumerate(log.steps):
        if any(name.endswith(".lock") for _, name, _ in step.names):
            return n
    raise AssertionError("no lock was taken")
