"""F1, F2, F4, F9 and limits on the other commands that write: `verify --fix`, shares of a run and
`finish`.

A share stands beside another that is done; what publishes both is what the faults hit.
"""

import errno
import functools
import json
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest

from tests.faults.commands import COMMANDS, content, models_in, names_in
from tests.faults.shim import LONG, fail, kill, run, start
from tests.faults.spread import spread

QUANTIZE = COMMANDS[0]
STEP = 1 if LONG else 6  # which of the calls are hit


class Fix:
    """`verify --fix` of an output whose config forgot what it does not quantize."""

    def __init__(self, models, folder):
        self.broken = folder / "broken"
        shutil.copytree(models.quantized, self.broken)
        path = self.broken / "config.json"
        config = json.loads(path.read_text())
        config["quantization_config"]["ignore"].remove("lm_head")
        path.write_text(json.dumps(config))

    def prepare(self, place):
        pass

    def words(self, place):
        return ["verify", self.broken, "--fix", "-o", place / "out", "--device", "cpu"]


class Share:
    """The share of a run that is done last, and publishes what all of them wrote."""

    def __init__(self, models, folder):
        self.models = models
        self.kept = folder / "kept"
        self.kept.mkdir()
        assert run(self.kept, self.part(self.kept, 1)).code == 0

    def prepare(self, place):
        shutil.copytree(self.kept, place, dirs_exist_ok=True)

    def part(self, place, number):
        more = ("--shard-index", number, "--num-shards", 2)
        return QUANTIZE.words(self.models, place, *more)[0]

    def words(self, place):
        return self.part(place, 0)


class Finish(Share):
    """`finish`, after a run that was killed when all it had to do was to publish."""

    def __init__(self, models, folder):
        super().__init__(models, folder)
        calls = run(self._copied(folder / "counted"), self.part(folder / "counted", 0)).calls
        for before in range(2, calls):
            place = self._copied(folder / f"killed{before}")
            assert run(place, self.part(place, 0), calls - before, kill).code < 0
            trial = shutil.copytree(place, folder / f"trial{before}")
            if run(trial, ["finish", trial / "out", "--json"]).code == 0:
                self.kept = place
                if not (place / "out").exists():
                    return
        raise AssertionError("no run was killed between its work and its end")

    def _copied(self, place):
        return shutil.copytree(self.kept, place)

    def words(self, place):
        return ["finish", place / "out", "--json"]


OTHERS = {"fix": Fix, "share": Share, "finish": Finish}


@pytest.fixture(scope="module")
def prepared(models, tmp_path_factory):
    """Return a function: name -> the command, what it writes undisturbed, its number of calls."""

    @functools.cache
    def do(name):
        folder = tmp_path_factory.mktemp(name)
        one = OTHERS[name](models, folder)
        place = folder / "place"
        place.mkdir()
        one.prepare(place)
        done = run(place, one.words(place))
        assert done.code == 0 and done.calls > 10, done.err
        return one, content(place / "out"), done.calls

    return do


@pytest.mark.parametrize("how", (errno.ENOSPC, errno.EIO, "kill"), ids=str)
@pytest.mark.parametrize("name", OTHERS)
def test_f1_f2_f4_a_fault_at_a_call(name, how, prepared, tmp_path):
    one, whole, calls = prepared(name)
    # 1: what was put right is there, and then could not be read to be checked.
    ends = (-signal.SIGKILL,) if how == "kill" else (0, 5, 1) if name == "fix" else (0, 5)

    def case(n, place):
        one.prepare(place)
        done = run(place, one.words(place), n, kill if how == "kill" else fail(how))
        assert done.fired == 1, (n, done.err)
        assert done.code in (ends), (n, done.err)
        if done.code == 5:
            assert done.err.startswith("error: ") and os.strerror(how) in done.err, (n, done.err)
        assert models_in(place) in ([], ["out"]), n
        assert content(place / "out") in (None, whole), n
        if content(place / "out") is None:
            again = run(place, one.words(place))
            assert again.code == 0, (n, again.err)
        assert content(place / "out") == whole, n
        return done.code

    codes = spread(case, range(1, calls + 1, STEP), tmp_path)
    print(f"F1 F2 F4 {name}, {how}: {len(codes)} faults at {calls} calls, {len(set(codes))} ends")
    assert len(codes) >= calls // STEP > 3
    assert sum(code != 0 for code in codes) > len(codes) // 3


@pytest.mark.parametrize("name", OTHERS)
def test_f9_two_want_the_same_output(name, prepared, tmp_path):
    one, whole, _ = prepared(name)
    place = tmp_path / "place"
    place.mkdir()
    one.prepare(place)
    ends = [child.end() for child in [start(place, one.words(place)) for _ in range(4)]]
    codes = sorted(end.code for end in ends)
    print(f"F9 {name}: 4 at once, exit codes {codes}")
    # Whoever comes after the first finds it busy, or done: a share and `finish` say so, `--fix`
    # does not replace it.
    assert 0 in codes and set(codes) <= {0, 2, 5, 6}, [end.err for end in ends]
    assert content(place / "out") == whole
    assert names_in(place) == ["out"]


class Nothing:
    def prepare(self, place):
        pass


FILES = 6  # that a process may open
LIMITS = {
    "files": (resource.RLIMIT_NOFILE, None),
    "memory": (resource.RLIMIT_AS, None),
    "size": (resource.RLIMIT_FSIZE, 4000),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_f8_limits_of_a_process(limit, models, prepared, tmp_path, expected):
    kind, most = LIMITS[limit]

    def low():
        """Let the process have a little more memory than it has, or few files."""
        now = most or 4096 * int(Path("/proc/self/statm").read_text().split()[0]) + (1 << 20)
        if limit == "files":  # whatever else is open here
            now = sorted(set(range(4096)) - {int(n) for n in os.listdir("/proc/self/fd")})[FILES]
        resource.setrlimit(kind, (now, now))

    def case(item, place):
        words, whole, prepare = item
        prepare(place)
        done = run(place, words(place), prepare=low)
        assert done.code in (0, 4, 5, 7), (done.code, done.err)
        assert "Traceback" not in done.err, done.err
        assert done.code == 0 or done.err.startswith("error: "), done.err
        assert content(place / "out") in (None, whole)
        again = run(place, words(place))
        assert again.code == 0 or content(place / "out") == whole, again.err
        assert content(place / "out") == whole
        return done.code

    items = [
        (lambda place, c=c: c.words(models, place)[0], expected(c).content, Nothing().prepare)
        for c in COMMANDS
        if c.kind == "directory"
    ]
    items += [(one.words, whole, one.prepare) for one, whole, _ in map(prepared, OTHERS)]
    if limit == "size":  # the others say more than that, and are held to it in test_full.py
        items = [item for item in items if item[2].__self__.__class__ is Fix]
    codes = spread(case, items, tmp_path)
    print(f"F8 {limit}: {len(items)} commands under a limit, exit codes {codes}")
    assert any(codes), "the limit was too high to be met"
