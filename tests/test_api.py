"""The library's front door: it can what the commands can, and keeps still."""

import dataclasses
import inspect
import os
import threading
from pathlib import Path

import pytest
import torch

from lowbitcli import api, cli, cli_recipe
from lowbitcli.errors import UsageError
from tests.checkpoints import weight, write

COMMANDS = {
    name: value
    for module in (cli, cli_recipe)
    for name, value in vars(module).items()
    if inspect.isfunction(value) and value.__module__ == module.__name__ and name[0] != "_"
}
ON_A_TERMINAL = {"context", "as_json", "quiet", "verbose", "timings", "dry_run"}
NAMED_OTHERWISE = {"fail_under": "fail_under_db", "new": "fix"}
PAGES = {("recipe_auto", "report"): "lowbitcli.report.write_curve writes it of the result"}
DOORS = {
    "quantize": (api.quantize, api.Request, api.Spread),
    "plan": (api.plan, api.Request),
    "dequantize": (api.dequantize, api.Spread),
    "finish": (api.finish,),
    "verify": (api.verify,),
    "inspect": (api.inspect,),
    "importance": (api.importance,),
    "recipe_auto": (api.choose, api.Wanted, api.Allowed),
}
NOT_OF_CHECKPOINTS = {"doctor", "lowbit", "main", "recipe_check", "recipe_group", "recipe_init"}
NOT_OF_CHECKPOINTS |= {"recipe_list", "recipe_schema", "recipe_show", "report_diff", "report_group"}


def defaults(*doors):
    """Return what functions and values take, with its default."""
    found = {}
    for door in doors:
        for name, parameter in inspect.signature(door).parameters.items():
            found[name] = parameter.default
    return found


@pytest.mark.parametrize("command", DOORS)
def test_every_option_is_a_parameter(command):
    taken = defaults(*DOORS[command])
    options = inspect.signature(COMMANDS[command]).parameters
    assert len(set(options) - ON_A_TERMINAL) >= 2
    for name, option in options.items():
        if name in ON_A_TERMINAL or (command, name) in PAGES:
            continue
        parameter = NAMED_OTHERWISE.get(name, name)
        assert parameter in taken, f"{command} has {name}, the library has not"
        if isinstance(option.default, bool | int) and name != "fix":
            assert taken[parameter] == option.default


def test_every_command_for_checkpoints_has_a_door():
    assert COMMANDS.keys() == set(DOORS) | NOT_OF_CHECKPOINTS


def source_in(folder, number=6, seed=0):
    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(number)]
    weights = {name: weight(64, 128, seed=seed + i) for i, name in enumerate(names)}
    return write(folder / f"source{seed}.safetensors", weights)


def test_results_are_typed_and_nothing_is_printed(tmp_path, capfd):
    source = source_in(tmp_path)
    planned = api.plan(source)
    assert isinstance(planned, api.Plan) and len(planned.quantized) == 6
    assert list(tmp_path.iterdir()) == [source]
    made = api.quantize(source, tmp_path / "q.safetensors", api.Request(scheme="mxfp8"))
    assert isinstance(made, api.Outcome) and made.output == tmp_path / "q.safetensors"
    assert made.bytes_out < made.bytes_in and len(made.worst(3)) == 3
    back = api.dequantize(made.output, tmp_path / "d.safetensors", dtype="fp32")
    assert isinstance(back, api.Outcome) and back.output.exists()
    found = api.verify(made.output, against=source, fail_under_db=20.0)
    assert isinstance(found, api.Verification) and found.exit_code == 0
    held = api.inspect(made.output)
    assert isinstance(held, api.Inspection) and not held.findings
    assert api.is_finished(made.output)
    for value in (planned, made, found, held, api.Request(), api.Spread()):
        assert dataclasses.is_dataclass(value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("work", ["quantize", "dequantize", "verify"])
def test_progress_goes_up_to_all(tmp_path, work):
    source = source_in(tmp_path)
    made = api.quantize(source, tmp_path / "q.safetensors").output
    calls = []
    if work == "verify":
        api.verify(made, against=source, progress=lambda *call: calls.append(call))
    else:
        given = source if work == "quantize" else made
        run = getattr(api, work)
        run(given, tmp_path / "new.safetensors", progress=lambda *call: calls.append(call))
    done, totals, names = zip(*calls, strict=True)
    assert list(done) == sorted(done) and done[-1] == totals[-1] > 0 and len(set(totals)) == 1
    assert all(isinstance(name, str) for name in names)
    assert any("up_proj" in name for name in names)


def test_what_progress_raises_stops_the_run_and_leaves_no_output(tmp_path):
    class EnoughError(Exception):
        pass

    def stop(done, total, what):
        raise EnoughError

    source, output = source_in(tmp_path), tmp_path / "q.safetensors"
    with pytest.raises(EnoughError):
        api.quantize(source, output, progress=stop)
    assert not output.exists()
    assert api.quantize(source, output).output == output and output.exists()


def test_runs_in_threads_know_nothing_of_each_other(tmp_path):
    """Two at a time write what each alone does, and leave the process as they found it."""
    sources = [source_in(tmp_path, 12, seed) for seed in (0, 50)]
    schemes = ("nvfp4", "mxfp8")
    before = (torch.get_num_threads(), dict(os.environ), Path.cwd(), torch.get_default_dtype())

    def run(i, folder):
        (tmp_path / folder).mkdir(exist_ok=True)
        output = tmp_path / folder / f"{i}.safetensors"
        return api.quantize(sources[i], output, api.Request(scheme=schemes[i]), device="cpu")

    alone = [run(i, "alone").output.read_bytes() for i in range(2)]
    threads = [threading.Thread(target=run, args=(i, "together")) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(tmp_path / "together" / f"{i}.safetensors").read_bytes() for i in range(2)] == alone
    after = (torch.get_num_threads(), dict(os.environ), Path.cwd(), torch.get_default_dtype())
    assert after == before


def test_what_makes_no_sense_is_refused(tmp_path):
    """As a usage error, before anything is written: no default, and no limit that all keep."""
    source = source_in(tmp_path)
    made = api.quantize(source, tmp_path / "q.safetensors").output
    before = sorted(tmp_path.iterdir())
    calls = {
        "no request": lambda: api.quantize(source, None, {"scheme": "mxfp8"}),
        "is no request": lambda: api.plan(source, None, "mxfp8"),
        "0 bytes": lambda: api.quantize(source, max_memory=0),
        "number of bytes, not '2GiB'": lambda: api.dequantize(made, max_memory="2GiB"),
        "max_gpu_memory is": lambda: api.quantize(source, max_gpu_memory="8GiB"),
        "nan is no limit": lambda: api.verify(made, against=source, fail_under_db=float("nan")),
        "inf is no limit": lambda: api.verify(made, against=source, max_rel_error=float("inf")),
        "'20dB' is no limit": lambda: api.verify(made, against=source, fail_under_db="20dB"),
        "several names": lambda: api.verify(made, consumers="vllm"),
        "no device is called": lambda: api.quantize(source, device="tpu"),
        "is the source": lambda: api.quantize(source, source),
    }
    for words, call in calls.items():
        with pytest.raises(UsageError, match=words):
            call()
    assert sorted(tmp_path.iterdir()) == before
