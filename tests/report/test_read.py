"""JSON reports read back: what was written, what older ones lack, and what is no report."""

import json

import pytest

from lowbitcli.errors import CheckpointError
from lowbitcli.report.read import read, verification
from lowbitcli.report.write import document
from tests.report.made import found, hostile, row


@pytest.mark.parametrize("one", [found(), hostile(), found(source=None, weights=(), manifest=None)])
def test_what_was_written_is_read(tmp_path, one):
    (tmp_path / "r.json").write_text(document(one))
    assert read(tmp_path / "r.json") == one


def test_numbers_without_a_word_in_json_come_back(tmp_path):
    one = found(weights=(row("a", float("inf")), row("b", float("-inf")), row("c", float("nan"))))
    back = verification(json.loads(document(one)))
    assert [str(row.figures.sqnr_db) for row in back.weights if row.figures] == [
        "inf",
        "-inf",
        "nan",
    ]


def test_a_report_of_an_older_lowbit_is_read():
    old = json.loads(document(found()))
    del old["errors"]
    old["more"] = {"unknown": 1}
    for weight in old["weights"]:
        del weight["bits_per_weight"]
        for key in ("norm", "zeros", "mean_steps", "bias_steps", "blocks", "underflow_blocks",
                    "scale_least", "scale_most", "worst_block"):  # fmt: skip
            del weight["figures"][key]
    back = verification(old)
    assert back.errors == {}
    assert back.weights[0].figures is not None and back.weights[0].figures.zeros is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no JSON"),
        ("{", "is no JSON"),
        ("\xff", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[]", "is no report of lowbit"),
        ("null", "is no report of lowbit"),
        ('{"a": 1}', "is no report of lowbit"),
        ('{"schema": 2}', "has schema 2, not 1"),
        ('{"schema": "\\u202e\\n"}', r"has schema \\u202e\\x0a, not 1"),
        ('{"schema": 1}', "its summary is not one"),
        ('{"schema": 1, "summary": []}', "its summary is not one"),
        ('{"schema": 1, "summary": {"schemes": {"a": 1}}}', "its summary is not one"),
        ('{"schema": 1, "summary": {"schemes": {}}}', "is no report of lowbit: target: "),
    ],
)
def test_what_is_no_report_is_refused(tmp_path, text, message):
    path = tmp_path / "r.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=message) as caught:
        read(path)
    assert caught.value.exit_code == 4 and "r.json" in caught.value.message
    assert not any(ord(c) < 32 for c in caught.value.message)


def test_a_report_that_is_not_there(tmp_path):
    with pytest.raises(CheckpointError, match=r"no\.json: No such file"):
        read(tmp_path / "no.json")
    with pytest.raises(CheckpointError, match="directory"):
        read(tmp_path)
