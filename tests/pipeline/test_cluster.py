"""Ray does the jobs of a run: the bytes are those of one process, and one that dies is survived.

Skipped where Ray is not installed (`pip install 'lowbit[cluster]'`).
"""

import os
import signal
import sys
from pathlib import Path

import pytest

from lowbitcli.api import Spread, quantize
from lowbitcli.errors import NonFiniteError, UsageError
from lowbitcli.pipeline import cluster
from tests import checkpoints
from tests.checkpoints import LAYER, single, weight
from tests.pipeline.test_workers import case_6, large


def test_without_ray_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match="needs Ray, which is not installed") as caught:
        quantize("nothing", spread=Spread(cluster="local"))
    assert caught.value.hint == "pip install 'lowbit[cluster]'"


@pytest.fixture(scope="module")
def here():
    """Skip where there is no Ray, and let its workers find this package."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'lowbit[cluster]'")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        with cluster.connected("local", "cpu") as engine:
            yield engine


@pytest.fixture
def ray(here, monkeypatch):
    """Let runs use the one cluster of this module: starting one takes seconds."""

    class Connected:
        def __init__(self, *_):
            pass

        def __enter__(self):
            return here

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(cluster, "connected", Connected)
    return Spread(cluster="local")


def test_case_6_on_ray(tmp_path, ray):
    source = case_6(tmp_path / "source")
    one = quantize(source, tmp_path / "one", device="cpu")
    two = quantize(source, tmp_path / "two", spread=ray)
    assert checkpoints.hashes(one.output) == checkpoints.hashes(two.output)
    assert one.errors == two.errors and list(one.errors) == list(two.errors)
    assert sorted(os.listdir(tmp_path)) == ["one", "source", "two"]


def test_an_error_of_the_source_is_the_one_that_a_run_here_has(tmp_path, ray):
    bad = weight(64, 64)
    bad[1, 2] = float("inf")
    source = single(tmp_path / "source", {f"{LAYER}mlp.up_proj.weight": bad})
    with pytest.raises(NonFiniteError, match=r"0 NaN and 1 Inf.*\(1, 2\)"):
        quantize(source, tmp_path / "out", spread=ray)
    assert os.listdir(tmp_path) == ["source"]


def workers():
    """Return the processes of Ray that are at a task."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(b"ray::do"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_a_killed_worker_is_survived(tmp_path, ray, monkeypatch):
    monkeypatch.setattr("lowbitcli.pipeline.shares.BUNDLE_BYTES", 1)
    source = large(tmp_path / "source")
    one = quantize(source, tmp_path / "one", device="cpu")
    killed = []

    def progress(done, total, name):
        if name and not killed:
            killed.extend(workers()[:1])
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

    two = quantize(source, tmp_path / "two", spread=ray, progress=progress)
    assert len(killed) == 1
    assert checkpoints.hashes(one.output) == checkpoints.hashes(two.output)
