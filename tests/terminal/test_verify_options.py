"""The options of verify, on a command line: consumers, limits, a sample, and what is put right."""

import json
from pathlib import Path

import pytest

from lowbitcli.verify import CONSUMERS

OUT = "out"


@pytest.fixture
def out(lowbit):
    """Return the words that begin a verification of an output against its source."""
    assert lowbit("quantize", "model", "-o", OUT, "-q")[0] == 0
    return ("verify", OUT)


def spoil(edit):
    path = Path(OUT, "config.json")
    said = json.loads(path.read_text())
    edit(said["quantization_config"])
    path.write_text(json.dumps(said))


def test_consumers_are_named_by_options_by_commas_and_by_a_variable(lowbit, out, monkeypatch):
    code, text, _ = lowbit(*out, "--for", "vllm", "--for", "sglang,transformers")
    assert code == 0
    for name in ("vllm", "sglang", "transformers"):
        assert f"{name} loads it as it is meant (rules)" in text
    spoil(lambda said: said.pop("quantization_status"))
    code, text, _ = lowbit(*out, "--for", "transformers")
    assert code == 1 and "transformers 5.24.0: config.json:" in text
    assert lowbit(*out)[0] == 0
    monkeypatch.setenv("LOWBIT_FOR", "transformers")
    assert lowbit(*out)[0] == 1


def test_a_consumer_that_is_unknown(lowbit, out):
    code, _, err = lowbit(*out, "--for", "llama.cpp")
    assert code == 2 and "no consumer 'llama.cpp'" in err
    assert all(name in err for name in CONSUMERS)


def test_limits(lowbit, out, monkeypatch):
    source = ("--against", "model")
    assert lowbit(*out, *source, "--max-rel-error", "0.5")[0] == 0
    code, text, _ = lowbit(*out, *source, "--max-rel-error", "0.01")
    assert code == 1 and "above 0.01" in text
    assert lowbit(*out, "--max-rel-error", "0.1")[0] == 2
    Path("r.yaml").write_text(
        'rules: [{match: "*", scheme: nvfp4}]\nthresholds: [{match: "*", fail_under_db: 60}]\n'
    )
    assert lowbit(*out, *source, "--recipe", "r.yaml")[0] == 1
    monkeypatch.setenv("LOWBIT_MAX_REL_ERROR", "0.01")
    assert lowbit(*out, *source)[0] == 1


def test_a_sample(lowbit, out, monkeypatch):
    code, text, _ = lowbit(*out, "--sample", "50%:3")
    assert code == 0 and "a sample is looked at: 0.5 of each kind" in text
    assert lowbit(*out, "--sample", "half")[0] == 2
    monkeypatch.setenv("LOWBIT_SAMPLE", "5%")
    document = json.loads(lowbit(*out, "--json")[1])
    assert document["sample"]["share"] == 0.05 and document["sample"]["tensors"]


def test_what_is_put_right_goes_to_a_new_output(lowbit, out):
    code, _, err = lowbit(*out, "--fix", "-o", "new")
    assert code == 0 and "nothing was written" in err and not Path("new").exists()
    spoil(lambda said: said.pop("quantization_status"))
    code, text, _ = lowbit(*out, "--fix", "-o", "new", "--for", "transformers")
    assert code == 0
    assert text.startswith("fixed: config.json: quantization_status: compressed added\n")
    assert "\nnew (compressed-tensors): good" in text
    assert lowbit(*out, "--fix", "-o", "new")[0] == 5
    document = json.loads(lowbit(*out, "--fix", "-o", "new", "--force", "--json")[1])
    assert document["fixed"] == ["config.json: quantization_status: compressed added"]
    assert document["target"] == "new"


@pytest.mark.parametrize("words", [("--fix",), ("-o", "new"), ("--fix", "-o", OUT)])
def test_what_makes_no_sense(lowbit, out, words):
    spoil(lambda said: said.pop("quantization_status"))
    assert lowbit(*out, *words)[0] == 2


def test_quiet_says_nothing_but_what_failed(lowbit, out):
    assert lowbit(*out, "-q") == (0, "", "")
    code, text, _ = lowbit(*out, "--against", "model", "--max-rel-error", "0.000001", "-q")
    assert code == 1 and "relative error" in text
