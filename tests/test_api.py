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
        "request is a Request or None, not dict": lambda: api.quantize(
            source, None, {"scheme": "mxfp8"}
        ),
        "request is a Request or None, not 'mxfp8'": lambda: api.plan(source, None, "mxfp8"),
        "nonfinite is error or keep, not 'kep'": lambda: api.plan(
            source, None, api.Request(nonfinite="kep")
        ),
        "scheme is the name of a scheme": lambda: api.plan(source, None, api.Request(scheme="")),
        "0 bytes": lambda: api.quantize(source, max_memory=0),
        "max_memory is an integer or None, not '2GiB'": lambda: api.dequantize(
            made, max_memory="2GiB"
        ),
        "max_gpu_memory is": lambda: api.quantize(source, max_gpu_memory="8GiB"),
        "fail_under_db is a finite number, not nan": lambda: api.verify(
            made, against=source, fail_under_db=float("nan")
        ),
        "max_rel_error is a finite number, not inf": lambda: api.verify(
            made, against=source, max_rel_error=float("inf")
        ),
        "fail_under_db is a number or None, not '20dB'": lambda: api.verify(
            made, against=source, fail_under_db="20dB"
        ),
        "consumers is a list or tuple, each a string, not 'vllm'": lambda: api.verify(
            made, consumers="vllm"
        ),
        "no device is called": lambda: api.quantize(source, device="tpu"),
        "is the source": lambda: api.quantize(source, source),
    }
    for words, call in calls.items():
        with pytest.raises(UsageError, match=words):
            call()
    assert sorted(tmp_path.iterdir()) == before


class Strange:
    """What no parameter takes."""


class NamesBytes:
    def __fspath__(self):
        return b"folder"


class NamesNothing:
    def __fspath__(self):
        return None


WRONG = (Strange(), Strange, [Strange()], {"a": 1}, ("a", 1), 1 + 1j, torch.ones(1), torch.int8)
NO_PATHS = (5, True, "", "a\0b", b"folder", "\ud800", [], NamesBytes(), NamesNothing())
GIVEN = (api.Request, api.Spread, api.Wanted, api.Allowed)


def typed_parameters():
    """Yield the name of a door or value, a parameter or field of it, and its annotation."""
    for name in api.__all__:
        if inspect.isfunction(getattr(api, name)):
            for parameter in inspect.signature(getattr(api, name)).parameters.values():
                yield name, parameter.name, parameter.annotation
    for value in GIVEN:
        for field in dataclasses.fields(value):
            yield value.__name__, field.name, field.type


def call(name, parameter, value):
    """Call a door with one argument, or the door that takes a value with one field of it."""
    needed = {"source": "source", "output": "output", "wanted": api.Wanted(bits=5)}
    if name in api.__all__ and inspect.isfunction(getattr(api, name)):
        required = inspect.signature(getattr(api, name)).parameters.values()
        given = {p.name: needed[p.name] for p in required if p.default is p.empty}
        return getattr(api, name)(**{**given, parameter: value})
    made = getattr(api, name)(**{parameter: value})
    if name == "Wanted":
        return api.choose("source", made)
    if name == "Allowed":
        return api.choose("source", api.Wanted(bits=5), made)
    return api.quantize("source", **{name.lower(): made})


@pytest.mark.parametrize(
    ("name", "parameter", "annotation"),
    [pytest.param(*t, id=".".join(t[:2])) for t in typed_parameters()],
)
def test_an_argument_of_a_wrong_type_is_refused_by_its_name(
    name, parameter, annotation, tmp_path, monkeypatch
):
    """At the door: there is no source, which nobody comes to see."""
    monkeypatch.chdir(tmp_path)
    said = f"{name.lower()}.{parameter}" if name in {v.__name__ for v in GIVEN} else parameter
    wrong = list(WRONG) + ([] if "None" in str(annotation) else [None])
    if "PathLike" in str(annotation):
        wrong += NO_PATHS
    elif annotation is bool:
        wrong += [0, 1, "yes"]
    elif "int" in str(annotation) and "str" not in str(annotation):
        wrong += [True, 1.5, "1"]
    elif "float" in str(annotation):
        wrong += [True, "1", float("nan"), float("inf")]
    elif annotation is str:
        wrong += [5, b"word", Path("word")]
    if "Callable" in str(annotation):
        wrong.remove(Strange)
    for value in wrong:
        with pytest.raises(UsageError) as caught:
            call(name, parameter, value)
        assert caught.value.message.startswith(f"{said} is "), caught.value.message
    assert not list(tmp_path.iterdir())


def test_what_is_missing_or_not_there_is_python_s_to_refuse():
    for wrong in (lambda: api.plan(), lambda: api.plan("a", "b", None, 1), lambda: api.plan(x=1)):
        with pytest.raises(TypeError):
            wrong()


def test_a_number_of_shards_may_be_a_number(tmp_path):
    for number in (1, "1"):
        assert api.Spread(shard_index=0, num_shards=number).share({}) == (
            api.Spread(shard_index=0, num_shards="1").share({})
        )
    with pytest.raises(UsageError):
        api.Spread(shard_index=0, num_shards=0).share({})
