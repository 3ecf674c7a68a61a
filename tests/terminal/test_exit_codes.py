"""An exit code for each kind of failure."""

import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from lowbitcli import api
from lowbitcli.errors import BusyError, StoppedError
from tests.checkpoints import LAYER, header_of, read, single, weight, write

# Exit codes. 0, 2, 3, 4 and 7 are also in the texts.


def test_exit_0(lowbit):
    assert lowbit("plan", "model")[0] == 0


def test_exit_1_where_verify_finds_something_wrong_and_names_it(lowbit):
    assert lowbit("quantize", "model", "-o", "out", "-q")[0] == 0
    assert lowbit("verify", "out", "--against", "model", "-q")[0] == 0
    name = LAYER + "mlp.down_proj.weight_packed"
    file = Path("out/model.safetensors")
    data = bytearray(file.read_bytes())
    size = 8 + int.from_bytes(data[:8], "little")
    data[size + header_of(file)[name]["data_offsets"][0]] ^= 1
    file.write_bytes(data)
    code, out, err = lowbit("verify", "out", "-q")
    assert (code, err) == (1, "")
    assert name in out
    code, out, _ = lowbit("verify", "out", "--json", "-q")
    assert code == json.loads(out)["exit_code"] == 1


def test_exit_1_below_the_quality_that_is_asked_for(lowbit):
    assert lowbit("quantize", "model", "-o", "out", "-q")[0] == 0
    assert lowbit("verify", "out", "--against", "model", "--fail-under", "20dB")[0] == 0
    assert lowbit("verify", "out", "--against", "model", "--fail-under", "21dB")[0] == 1


def test_exit_2_for_what_the_command_line_cannot_mean(lowbit):
    assert lowbit("plan", "model", "--scheme", "nvfp4", "--recipe", "nvfp4")[0] == 2
    assert lowbit("plan")[0] == 2
    assert lowbit()[0] == 2
    assert lowbit("recipe")[0] == 2


def test_exit_3_for_a_recipe(lowbit):
    Path("bad.yaml").write_text("rules: 7\n")
    code, out, err = lowbit("recipe", "check", "bad.yaml")
    assert (code, out) == (3, "")
    assert err.startswith("error: bad.yaml:1:8: ")


def test_exit_4_where_inspect_finds_something_wrong_and_shows_it(lowbit):
    assert lowbit("quantize", "model", "-o", "out", "-q") == (0, "", "")
    file = Path("out/model.safetensors")
    tensors = read(file)
    del tensors[LAYER + "mlp.down_proj.weight_scale"]
    write(file, tensors, {"format": "pt"})
    code, out, _ = lowbit("inspect", "out")
    assert code == 4
    assert "weight_scale" in out.partition("wrong")[2]
    code, out, _ = lowbit("inspect", "out", "--json")
    assert (code, [one["kind"] for one in json.loads(out)["findings"]]) == (4, ["missing"])
    assert lowbit("inspect", "model")[0] == 0


def test_exit_4_for_a_truncated_source(lowbit):
    file = Path("model/model.safetensors")
    file.write_bytes(file.read_bytes()[:-100])
    code, out, err = lowbit("plan", "model")
    assert (code, out) == (4, "")
    assert "error: " in err


def test_exit_4_for_nan_and_the_output_does_not_appear(lowbit):
    w = weight(64, 64)
    w[3, 5] = float("nan")
    single(Path("bad"), {LAYER + "mlp.down_proj.weight": w})
    code, _, err = lowbit("quantize", "bad", "-q")
    assert code == 4
    assert LAYER + "mlp.down_proj.weight" in err
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["bad", "model"]


def test_exit_5_for_an_output_that_cannot_be_written(lowbit):
    Path("file").touch()
    code, out, err = lowbit("quantize", "model", "-o", "file/below", "-q")
    assert (code, out) == (5, "")
    assert err.startswith("error: ")


def test_exit_5_for_an_error_of_the_system_with_its_file(lowbit, monkeypatch):
    def fail(*_, **__):
        raise PermissionError(13, "Permission denied", "some\x1bwhere")

    monkeypatch.setattr(api, "quantize", fail)
    assert lowbit("quantize", "model") == (5, "", "error: some\\x1bwhere: Permission denied\n")


def test_exit_6_while_another_run_holds_the_output(lowbit, monkeypatch):
    def fail(*_, **__):
        raise BusyError("another run holds it", hint="wait")

    monkeypatch.setattr(api, "quantize", fail)
    assert lowbit("quantize", "model") == (6, "", "error: another run holds it\n\nhint: wait\n")


def test_exit_7_for_a_device_that_is_not_there(lowbit):
    assert lowbit("quantize", "model", "--device", "cuda:99")[0] == 7
    assert lowbit("quantize", "model", "--device", "tpu")[0] == 2


def test_exit_7_without_memory(lowbit, monkeypatch):
    def fail(*_, **__):
        raise MemoryError

    monkeypatch.setattr(api, "quantize", fail)
    assert lowbit("quantize", "model") == (7, "", "error: out of memory\n")


def test_exit_70_is_a_bug_with_its_traceback(lowbit, monkeypatch):
    def fail(*_, **__):
        raise ZeroDivisionError("of \x1b[31mours")

    monkeypatch.setattr(api, "quantize", fail)
    code, out, err = lowbit("quantize", "model")
    assert (code, out) == (70, "")
    assert err.startswith("Traceback (most recent call last):\n")
    assert "error: this is a bug of lowbit: ZeroDivisionError: of \\x1b[31mours\n\nhint: " in err
    assert "\x1b" not in err


def test_exit_130_when_interrupted(lowbit, monkeypatch):
    def fail(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "quantize", fail)
    assert lowbit("quantize", "model") == (130, "", "error: interrupted\n")


def test_exit_of_a_run_that_stopped_itself(lowbit, monkeypatch):
    def fail(*_, **__):
        raise StoppedError(signal.SIGTERM, "stopped", hint="run again")

    monkeypatch.setattr(api, "quantize", fail)
    assert lowbit("quantize", "model") == (143, "", "error: stopped\n\nhint: run again\n")


WAITING = textwrap.dedent(
    """
    import sys, time
    from lowbitcli import api, cli
    def wait(*_, **__):
        try:
            print("waiting", flush=True)
            time.sleep(60)
        finally:
            print("cleaned up", flush=True)
    api.quantize = wait
    sys.argv = ["lowbit", "quantize", "model"]
    cli.main()
    """
)


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_a_run_and_cleans_up(sent, code):
    child = subprocess.Popen(
        [sys.executable, "-c", WAITING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "waiting\n"
    child.send_signal(sent)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out, err) == (code, "cleaned up\n", "error: interrupted\n")
