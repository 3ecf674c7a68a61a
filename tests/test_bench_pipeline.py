"""What `bench/pipeline.py` measures is what it says: the floor moves each byte of a run once, and a
bench that is cut shows what it has."""

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from lowbitcli.api import Request
from lowbitcli.plan.prepare import quantization

BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture(autouse=True)
def beside(monkeypatch):
    """Its modules import each other by their names, as a script's do."""
    monkeypatch.syspath_prepend(str(BENCH))


def test_the_floor_moves_each_byte_once(tmp_path):
    from pipeline_floor import tasks
    from pipeline_source import make

    make(tmp_path / "source", 2e6)
    with quantization(tmp_path / "source", tmp_path / "out", Request(scheme="nvfp4")) as found:
        plan = found[0]
        files = {file.name: file for file in plan.files}
        read, written = [], []
        for name, start, stop, writes in tasks(plan, files, 10_000):
            read.append((name, start, stop))
            written += writes
    assert len(read) > len(plan.weights)
    stored = sum(one.spec.nbytes for file in plan.files for one in file.entries.values())
    for places, whole in ((read, plan.bytes_in), (written, stored)):
        places = sorted(place for place in places if place[1] < place[2])
        assert sum(stop - start for _, start, stop in places) == whole
        for (file, _, stop), (after, start, _) in itertools.pairwise(places):
            assert file != after or stop <= start


@pytest.mark.parametrize("size", [3e6, 3e7, 1e9, 4e9])
def test_sources_have_about_the_bytes_that_are_asked(size):
    from pipeline_source import experts, shapes

    for listed in (shapes, experts):
        found = list(listed(size))
        weights = [2 * math.prod(shape) for _, shape in found if len(shape) == 2]
        assert size <= sum(weights) <= 1.2 * size
        assert len({name for name, _ in found}) == len(found)


def test_figures_show_what_there_is(capsys):
    from pipeline_measure import Figures
    from pipeline_show import show, show_line

    cut = Figures(bytes_in=2_000_000_000)
    cut.add("floor", 2.0)
    show(cut)
    assert "floor             2.00 s    1.000 GB/s    1.00 x floor" in capsys.readouterr().out
    less, more = Figures(bytes_in=100), Figures(bytes_in=1000)
    for one, seconds in ((less, 1.0), (more, 10.5)):
        one.add("floor", 0.5)
        one.add("run", 9 * seconds)
        one.add("run", seconds)
        one.add("run", 0.0)
    assert more.document()["seconds"]["run"] == 10.5
    show_line([less, more])
    assert "10.00 x the bytes: 10.50 x the time of the run" in capsys.readouterr().out
    show_line([less, cut])
    assert capsys.readouterr().out == ""


def test_a_step_that_is_none_is_refused(tmp_path):
    done = subprocess.run(
        ["bash", str(BENCH / "gpu.sh"), str(tmp_path)],
        env={"STEPS": "wrong", "PATH": "/usr/bin:/bin", "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (2, "no step wrong\n")


def test_the_json_line_needs_no_figures():
    from pipeline_measure import Figures

    assert json.loads(json.dumps(Figures().document()))["seconds"] == {}
