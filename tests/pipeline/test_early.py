"""A head start starts what it says, holds the collector only while modules are imported, and loads
no tensor library."""

import gc
import signal
import subprocess
import sys
import threading

import pytest

from lowbitcli.pipeline import early, stop
from tests.checkpoints import LAYER, single, weight


def test_no_tensor_library_is_needed_for_a_head_start():
    code = (
        "import sys; from lowbitcli.pipeline import early; early.begin('nothing', 'auto'); "
        "early.wait(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("False\n", "")


@pytest.mark.parametrize(
    ("device", "begun"), [("cpu", []), ("auto", [0]), ("cuda", [0]), ("cuda:3", [3])]
)
def test_only_what_the_device_needs_is_begun(monkeypatch, tmp_path, device, begun):
    found, compiled, read = [], [], []
    monkeypatch.setattr(early, "_context", found.append)
    monkeypatch.setattr(early, "_compiler", lambda: compiled.append(True))
    monkeypatch.setattr(early, "read_ahead", read.append)
    early.begin(tmp_path, device)
    early.wait()
    assert (found, len(compiled), read) == (begun, len(begun), [tmp_path])


def test_the_collector_stands_still_within_and_is_as_before_after():
    assert gc.isenabled()
    with early.importing():
        assert not gc.isenabled()
    with pytest.raises(ImportError), early.importing():
        raise ImportError
    assert gc.isenabled()


@pytest.mark.parametrize("number", stop.SIGNALS)
def test_a_signal_waits_until_all_is_imported_and_a_second_one_does_not(number):
    """One that is heard where a library calls Python while it is loaded could end in SIGABRT."""
    heard, reached = [], []

    def hear(*_):
        heard.append(number)
        raise KeyboardInterrupt

    before = signal.signal(number, hear)
    try:
        with pytest.raises(KeyboardInterrupt), early.importing():
            signal.raise_signal(number)
            reached.append(list(heard))
        with pytest.raises(KeyboardInterrupt), early.importing():
            signal.raise_signal(number)
            signal.raise_signal(number)
            reached.append("not here")
        assert signal.getsignal(number) is hear
    finally:
        signal.signal(number, before)
    assert (heard, reached) == ([number, number], [[]])
    assert gc.isenabled()


def test_a_signal_that_nobody_answers_ends_the_process_after_the_import():
    code = (
        "import os, signal; from lowbitcli.pipeline import early\n"
        "with early.importing():\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('imported', flush=True)\n"
        "print('and on')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "imported\n")


def test_without_a_driver_nothing_happens(monkeypatch):
    monkeypatch.setattr(early, "_DRIVER", "libnowhere.so.9")
    early._context(0)
    early._compiler()


def test_commands_begin_before_they_import(lowbit, tmp_path, monkeypatch):
    source = single(tmp_path / "source", {LAYER + "mlp.up_proj.weight": weight(64, 64)})
    begun = []
    monkeypatch.setattr(early, "begin", lambda *given: begun.append(given))
    assert lowbit("quantize", source, "-o", tmp_path / "a", "--device", "cpu").code == 0
    assert lowbit("quantize", source, "-o", tmp_path / "b", "--dry-run").code == 0
    assert lowbit("dequantize", tmp_path / "a", "-o", tmp_path / "c", "--device", "cpu").code == 0
    assert begun == [(str(source), "cpu"), (str(tmp_path / "a"), "cpu")]
    assert threading.active_count() < 20
