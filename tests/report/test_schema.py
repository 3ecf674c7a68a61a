"""The tables of docs/report.md against the documents that are written: every key, and its type."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lowbitcli.report import sides
from lowbitcli.report.write import document
from lowbitcli.verify import Problem, WeightRow
from tests.report.documented import complaints, tables
from tests.report.made import figures, found, row

DOCS = (Path(__file__).parents[2] / "docs" / "report.md").read_text()

FULL = found(
    problems=(Problem("bound", "w", "m", "f"),),
    weights=(
        row("a", first_outside=(1, 2), outside=1),
        WeightRow("b", "", "fake", (2, 2), None, 8, None),
        WeightRow("c", "", "dequantized", (2, 2), 8, 8, replace(figures(float("inf")),
            zeros=None, worst_block=None, outside=None, scale_least=None, scale_most=None)),
    ),
)  # fmt: skip


def told(one=FULL):
    return json.loads(document(one))


def test_every_key_has_its_type_and_no_other_key_is_written():
    assert complaints(told(), "The document", tables(DOCS)) == []
    empty = found(weights=(), kept=(), manifest=None, source=None, errors={})
    assert complaints(told(empty), "The document", tables(DOCS)) == []


def test_a_comparison_has_every_key_and_no_other():
    other = found(weights=(row("new"),), problems=(Problem("bound", "w", "m", "f"),))
    compared = json.loads(sides.text(sides.diff(FULL, other, ("a.json", "b.json"))))
    assert len(compared["changes"]) == 4 and compared["problems_b"] == compared["problems_a"] == []
    assert complaints(compared, "The comparison", tables(DOCS)) == []
    bare = found(weights=(), kept=(), source=None)
    compared = json.loads(sides.text(sides.diff(FULL, bare, ("a.json", "b.json"))))
    assert len(compared["problems_a"]) == 1
    assert complaints(compared, "The comparison", tables(DOCS)) == []


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda d: d.pop("checks"), "The document: checks is missing"),
        (lambda d: d.update(more=1), "The document: more is not documented"),
        (lambda d: d["weights"][0].update(shape="x"), "A weight: shape is 'x', not a list"),
        (lambda d: d["weights"][0]["figures"].pop("norm"), "Figures: norm is missing"),
        (lambda d: d["weights"][0]["figures"]["worst_block"].update(times=None), "A block: times"),
        (lambda d: d["errors"]["nvfp4"].update(counts=[1.5]), "A histogram: counts is 1.5"),
        (lambda d: d["summary"]["schemes"]["kept"].update(bytes=True), "A size: bytes is True"),
        (lambda d: d.update(passed=1), "The document: passed is 1, not a boolean"),
        (lambda d: d["kept"][0].update(dtype=None), "A kept tensor: dtype is None"),
        (lambda d: d["manifest"].update(files={"f": 1}), "The manifest: files is 1"),
    ],
)
def test_a_document_that_is_not_what_is_documented_is_found(spoil, complaint):
    spoiled = told()
    spoil(spoiled)
    found_wrong = complaints(spoiled, "The document", tables(DOCS))
    assert len(found_wrong) == 1 and found_wrong[0].startswith(complaint)
