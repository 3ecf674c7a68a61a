"""What runs on Ray must hold, without Ray: tasks write to the files of their run alone, signals are
ours to answer, and documents on stdout are ours."""

import contextlib
import shutil
import signal
import sys
import threading
from types import SimpleNamespace

import pytest

from lowbitcli import api
from lowbitcli.errors import OutputError
from lowbitcli.pipeline import cluster
from tests.faults.commands import content


class Tasks:
    """Stands for a cluster: does its tasks in this process, one after the other."""

    device = "cpu"

    def __init__(self):
        self.briefs = []

    def do(self, plan, brief, jobs, told, is_stopped):
        self.briefs.append(brief)
        for number in jobs:
            found = cluster.do(brief, [number], "cpu", 1)
            if isinstance(found, Exception):
                raise found
            assert not isinstance(found, str), found
            told.done(found[0][0])
        return True, []


@pytest.fixture
def tasks(monkeypatch):
    found = Tasks()
    monkeypatch.setattr(cluster, "connected", lambda *_: contextlib.nullcontext(found))
    yield found
    cluster._kept.close()


def test_a_process_of_a_cluster_writes_to_no_files_of_an_earlier_run(models, tmp_path, tasks):
    """It keeps what it has open from task to task; the same run again has files of its own."""
    where = tmp_path / "out"
    for _ in range(2):
        api.quantize(models.source, where, spread=api.Spread(cluster="local"))
        assert content(where) == content(models.quantized)
        shutil.rmtree(where)
    assert len(tasks.briefs) == 2


def test_a_task_that_is_late_does_not_write_to_another_runs_files(models, tmp_path, tasks):
    where = tmp_path / "out"
    api.quantize(models.source, where, spread=api.Spread(cluster="local"))
    brief = tasks.briefs[0]
    shutil.rmtree(where)
    cluster._kept.close()
    seen = []

    def progress(done, total, name):
        if name and not seen:  # its files are there, and a job of it is done
            seen.append(cluster.do(brief, [0], "cpu", 1))

    recipe = tmp_path / "r.yaml"  # which makes files of the same names and sizes
    recipe.write_text('rules: [{match: "*", scheme: nvfp4, scale: mse}]')
    request = api.Request(recipe=recipe)
    api.quantize(models.source, where, request, device="cpu", progress=progress)
    assert isinstance(seen[0], OutputError) and "another run's by now" in seen[0].message


@pytest.mark.parametrize("when", ("after", "meanwhile"))
def test_f6_sigterm_is_ours_to_answer_where_ray_has_an_answer_too(monkeypatch, when):
    """Ray's ends the process by an exit that says nothing."""

    def init(**_):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))
        if when == "meanwhile":
            signal.raise_signal(signal.SIGTERM)

    def hear(*_):
        raise KeyboardInterrupt

    ray = SimpleNamespace(
        init=init,
        shutdown=lambda: None,
        cluster_resources=lambda: {"CPU": 2},
        remote=lambda **_: lambda function: function,
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    before = signal.signal(signal.SIGTERM, hear)
    try:
        with pytest.raises(KeyboardInterrupt), cluster.connected("local", "cpu"):
            assert when == "after"
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_ray_says_of_a_worker_that_died_is_no_part_of_a_document(monkeypatch, capsys):
    ray = SimpleNamespace(
        init=lambda **_: None,
        shutdown=lambda: None,
        cluster_resources=lambda: {"CPU": 2},
        remote=lambda **_: lambda function: function,
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    with cluster.connected("local", "cpu"):
        print("{}")
        words = ("(raylet) A worker died",)
        theirs = threading.Thread(target=print, args=words, name="ray_listen_error_messages")
        theirs.start()
        theirs.join()
    print("[]")
    said = capsys.readouterr()
    assert (said.out, said.err) == ("{}\n[]\n", "(raylet) A worker died\n")
