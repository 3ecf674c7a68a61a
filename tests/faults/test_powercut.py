"""F7: the power goes at any moment of a run, and any part of what was not synced is lost.

Recorded once, cut in this process; the same command is then run on what is left. So are
`verify --fix`, shares of a run, and `finish`.
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
from tests.faults.test_others import Finish, Fix, Share

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
    words, _ = scene.words(models, place)
    if scene.what == "forced":
        old, _ = scene.words(models, place)
        assert run(place, [*old, *scene.command.otherwise]).code == 0
    if scene.what == "resumed":
        assert run(place, words, calls * 2 // 3, kill).code < 0

    return recorded(place, words, scene.plain)


def recorded(place, words, plain=False):
    """Run a command in `place` and return what it did."""
    saved = place.with_name("log")

    def prepare():
        if plain:
            atomic._renameat2 = lambda *_: False
        recorder = Recorder(place)
        recorder.install()
        return lambda: recorder.save(saved)

    done = run(place, words, prepare=prepare)
    assert done.code == 0, done.err
    return pickle.loads(saved.read_bytes())


def remade(log, place):
    """Nothing lost, what was recorded is what the run left."""
    again = place.with_name("again")
    again.mkdir()
    materialise([step for step in log.steps if step.kind != "sync"], log.folders, again)
    assert content(again) == content(place)
    shutil.rmtree(again)


@pytest.fixture(scope="module")
def logs(models, tmp_path_factory, expected):
    """Return what the run of each scene does; nothing lost, it is what the run left."""
    for command in COMMANDS:
        expected(command)

    def case(scene, place):
        log = record(scene, models, place, expected(scene.command).calls)
        remade(log, place)
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


class First(Share):
    """A share that is done first, over nothing, and publishes nothing."""

    def prepare(self, place):
        pass


SCENES_OF_OTHERS = {"fix": Fix, "first share": First, "last share": Share, "finish": Finish}
OTHER_CUTS = 1600 if LONG else 60


@pytest.fixture(scope="module")
def others(models, tmp_path_factory):
    """Return the commands, what each does, and what it leaves undisturbed."""
    found = {}
    for name, kind in SCENES_OF_OTHERS.items():
        folder = tmp_path_factory.mktemp("others")
        one = kind(models, folder)
        place = folder / "place"
        place.mkdir()
        one.prepare(place)
        log = recorded(place, one.words(place))
        remade(log, place)
        found[name] = one, log, content(place / "out")
    return found


def test_f7_the_power_goes_at_what_else_writes(others, models, tmp_path, expected):
    names = list(others)
    published = expected(COMMANDS[0]).content
    assert others["first share"][2] is None
    assert others["last share"][2] == others["finish"][2] == published

    def case(number, place):
        name = names[number % len(names)]
        one, log, whole = others[name]
        draw = random.Random(f"others {number}")
        end = len(log.steps)
        at = end if draw.random() < 0.2 else draw.randint(log.began, end)
        steps, lost = after_cut(log, at, draw)
        materialise(steps, log.folders, place)
        found = content(place / "out")
        assert found in (None, whole), (number, name, at)
        if at == end:  # it had said that all is well
            assert found == whole, (number, name)
        if number // len(names) % RERUNS == 0 and found is None:
            after(one, name, place, whole or published, (number, name, at))
        return lost, found is not None

    results = spread(case, range(OTHER_CUTS), tmp_path)
    lost = [number for number, _ in results]
    print(
        f"F7 others: {OTHER_CUTS} cuts, {sum(n > 0 for n in lost)} lost something, "
        f"{sum(there for _, there in results)} found an output, and it was whole"
    )
    assert sum(n > 0 for n in lost) > OTHER_CUTS // 4
    assert 0 < sum(there for _, there in results) < OTHER_CUTS


def after(one, name, place, whole, which):
    """The same command ends well; where shares were lost, those that are said to be missing."""
    if name == "first share":
        assert run(place, one.words(place)).code == 0, which
        words = one.part(place, 1)
    else:
        words = one.words(place)
    done = run(place, words)
    if name == "finish" and done.code == 5:  # what a share had not synced is for it to do again
        for share in (0, 1):
            done = run(place, one.part(place, share))
            assert done.code == 0 or content(place / "out") == whole, (which, done.err)
    assert content(place / "out") == whole, (which, done.err)
    assert names_in(place) == ["out"], which
