"""Options and their variables do what docs/cli.md says of them."""

import json
from pathlib import Path

import pytest
import torch

from lowbitcli import api, program
from lowbitcli.errors import BusyError
from tests.checkpoints import LAYER, sharded, weight

# Options.


def test_a_variable_stands_in_for_an_option_and_the_command_line_wins(lowbit, monkeypatch):
    monkeypatch.setenv("LOWBIT_SCHEME", "mxfp8")
    monkeypatch.setenv("LOWBIT_JSON", "1")
    assert "mxfp8" in json.loads(lowbit("plan", "model")[1])["schemes"]
    chosen = json.loads(lowbit("plan", "model", "--scheme", "fp8")[1])["schemes"]
    assert sorted(chosen) == ["fp8_tensor", "kept"]


@pytest.mark.parametrize(
    ("variable", "words", "scheme"),
    [
        ("SCHEME=mxfp8", "--recipe fp8", "fp8_tensor"),
        ("RECIPE=fp8", "--scheme mxfp8", "mxfp8"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "quantize --dry-run"])
def test_a_variable_yields_to_the_option_that_excludes_it(
    lowbit, monkeypatch, command, variable, words, scheme
):
    monkeypatch.setenv(f"LOWBIT_{variable.partition('=')[0]}", variable.partition("=")[2])
    code, out, _ = lowbit(*command.split(), "model", *words.split(), "--json")
    assert code == 0
    assert scheme in json.loads(out)["schemes"]
    monkeypatch.setenv("LOWBIT_SCHEME", "mxfp8")
    monkeypatch.setenv("LOWBIT_RECIPE", "fp8")
    assert lowbit("plan", "model")[0] == 2
    assert lowbit("plan", "model", "--scheme", "fp8", "--recipe", "fp8")[0] == 2


def test_a_report_without_a_file_goes_beside_the_output(monkeypatch, lowbit):
    seen = []

    def note(*_, report, **__):
        seen.append(report and str(report))
        raise BusyError("enough")

    monkeypatch.setattr(api, "verify", note, raising=False)
    for words in ("out --report", "out --report -q", "out --report x.md", "--report=x.json out"):
        lowbit("verify", *words.split())
    lowbit("verify", "out")
    lowbit("verify", "a/out/", "--report")
    monkeypatch.setenv("LOWBIT_REPORT", "y.html")
    lowbit("verify", "out")
    assert seen == [
        "out.report.html",
        "out.report.html",
        "x.md",
        "x.json",
        None,
        "a/out.report.html",
        "y.html",
    ]


@pytest.mark.parametrize("word", ["out", "a/b"])
def test_a_report_that_took_the_checkpoint_is_told_of(lowbit, word):
    for words in (["--report", word], ["-q", "--report", word, "--json"]):
        code, _, err = lowbit("verify", *words)
        assert code == 2
        assert err.startswith("error: Missing argument 'DST'")
        assert f"hint: --report took {word} for the file to write: put DST before it\n" in err
    code, _, err = lowbit("verify", "-q")
    assert (code, err.endswith("hint: lowbit verify --help\n")) == (2, True)


@pytest.mark.parametrize("words", [["plan", "model", "--scheem"], ["plan"], ["nothing"]])
def test_the_variable_for_json_is_as_good_as_the_option(lowbit, monkeypatch, words):
    told = lowbit(*words, "--json")[1] if words != ["nothing"] else None
    for value in ("1", "TRUE", "yes"):
        monkeypatch.setenv("LOWBIT_JSON", value)
        code, out, _ = lowbit(*words)
        assert code == json.loads(out)["error"]["exit_code"] == 2
        assert told in (None, out)
    for value in ("0", ""):
        monkeypatch.setenv("LOWBIT_JSON", value)
        assert lowbit(*words)[1] == ""


@pytest.mark.parametrize(
    ("text", "number"), [("20", 20), ("20dB", 20), (" 7.5 DB", 7.5), ("-3db", -3)]
)
def test_decibels(text, number):
    assert program.decibels(text) == number


def test_fake_and_dequantize_and_force(lowbit):
    assert lowbit("quantize", "model", "-o", "q", "--scheme", "fp8")[0] == 0
    assert lowbit("quantize", "model", "-o", "q", "--scheme", "nvfp4")[0] == 5
    assert lowbit("quantize", "model", "-o", "q", "--scheme", "mxfp8", "--force")[0] == 0
    assert lowbit("dequantize", "q", "-o", "back", "--dtype", "fp32", "-q")[0] == 0
    found = json.loads(lowbit("inspect", "back", "--json")[1])
    dtypes = {one["name"]: one["dtype"] for one in found["tensors"]}
    assert dtypes[LAYER + "mlp.down_proj.weight"] == "F32"
    assert lowbit("quantize", "model", "-o", "fake", "--fake")[0] == 0
    assert json.loads(lowbit("inspect", "fake", "--json")[1])["container"] == "plain"


def test_a_dry_run_writes_nothing_and_tells_the_size_to_the_byte(lowbit):
    tensors = {f"a.{n}.weight": weight(64, 64) for n in range(20)}
    sharded(Path("two"), tensors, {"b.weight": weight(64, 32)})
    Path("two/tokenizer.json").write_text("{}" * 50)
    before = sorted(str(path) for path in Path.cwd().rglob("*"))
    code, out, _ = lowbit("quantize", "two", "--dry-run", "--json")
    assert code == 0
    assert sorted(str(path) for path in Path.cwd().rglob("*")) == before
    assert lowbit("quantize", "two", "-o", "out")[0] == 0
    files = {path.name: path.stat().st_size for path in Path("out").glob("*.safetensors")}
    assert {file["name"]: file["bytes"] for file in json.loads(out)["files"]} == files
    beside = {path.name: path.stat().st_size for path in Path("out").glob("*.json")}
    told = json.loads(out)["beside"]
    assert 0.8 < told.pop("lowbit.json") / beside.pop("lowbit.json") < 1.25
    assert told == beside


def test_recipe_init_gives_a_recipe_that_works(lowbit):
    assert lowbit("recipe", "init", "mine.yaml") == (0, "", "")
    assert lowbit("recipe", "check", "mine.yaml", "model")[0] == 0
    code, _, err = lowbit("recipe", "init", "mine.yaml")
    assert (code, err) == (5, "error: mine.yaml: exists\n\nhint: name another place\n")
    code, _, err = lowbit("recipe", "init", "none/mine.yaml")
    assert (code, err) == (5, "error: none is no directory\n\nhint: make it first\n")
    assert lowbit("recipe", "init", "mine")[0] == 2
    assert lowbit("recipe", "init")[1] == Path("mine.yaml").read_text()


def test_recipe_show_and_schema(lowbit):
    shown = lowbit("recipe", "show", "nvfp4")[1]
    Path("copy.yaml").write_text(shown)
    as_json = [json.loads(lowbit("recipe", "show", name, "--json")[1]) for name in
               ("nvfp4", "copy.yaml")]  # fmt: skip
    assert as_json[0]["rules"][0]["scheme"] == as_json[1]["rules"][0]["scheme"]
    assert json.loads(lowbit("recipe", "schema")[1])["type"] == "object"


def test_doctor_names_what_it_found(lowbit):
    code, out, err = lowbit("doctor")
    assert (code, err) == (0, "")
    assert f"torch {torch.__version__}" in out
    assert "\ncpu: " in out
    found = json.loads(lowbit("doctor", "--json")[1])
    assert found["packages"]["torch"] == torch.__version__
    assert found["devices"][-1]["name"] == "cpu"


def test_shares_are_told_of_and_finished(lowbit, monkeypatch):
    words = ("quantize", "model", "-o", "out", "--scheme", "fp8")
    code, out, _ = lowbit(*words, "--shard-index", "1", "--num-shards", "2")
    assert code == 0
    assert "share 1 of 2 of out is done; not done: 0 (" in out.replace(str(Path.cwd()) + "/", "")
    assert not Path("out").exists()
    code, _, err = lowbit("finish", "out")
    assert code == 5
    assert err.endswith("hint: run the same command with --shard-index 0 --num-shards 2\n")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, out, _ = lowbit(*words, "--num-shards", "auto", "--json")
    assert (code, json.loads(out)["share"], json.loads(out)["missing"]) == (0, [0, 2], {})
    assert lowbit("verify", "out", "--against", "model")[0] == 0
    assert lowbit(*words, "--shard-index", "0")[0] == 2
    assert lowbit(*words, "--devices", "cpu", "--cluster", "local")[0] == 2


def test_a_variable_for_a_device_yields_to_devices(lowbit, monkeypatch):
    monkeypatch.setenv("LOWBIT_DEVICE", "cuda:99")
    assert lowbit("quantize", "model", "-o", "out", "--devices", "cpu", "-q")[0] == 0
    assert lowbit("dequantize", "out", "-o", "back", "--devices", "cpu", "-q")[0] == 0
    assert lowbit("quantize", "model", "-o", "two", "--devices", "cpu", "--device", "cpu")[0] == 2
