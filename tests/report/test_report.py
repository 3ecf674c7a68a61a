"""Reports: every fact is in each of them, no name can leave its cell, a file is whole or not
there."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from lowbitcli import report
from lowbitcli.containers.plain import PLAIN
from lowbitcli.errors import OutputError, UsageError
from lowbitcli.plan.source import Source
from lowbitcli.report.markdown import markdown
from lowbitcli.report.page import page
from lowbitcli.report.write import SUFFIXES, document
from lowbitcli.verify import WARN, Kept, Problem, Sample, Verification
from lowbitcli.verify.sample import document as described
from lowbitcli.verify.sample import sampled
from tests.report.made import HOSTILE, Page, found, hostile, row

DOCS = Path(__file__).parents[2] / "docs" / "report.md"


@pytest.mark.parametrize("write", [page, markdown])
def test_every_fact_is_told(write):
    problem = Problem("bound", "layers.2.a.weight", "an element is outside", "one.safetensors")
    text = write(found(problems=(problem, Problem("nothing", "", "to know", severity=WARN))))
    text = Page(text).all_text if write is page else text.replace("\\", "")
    for fact in (
        "1 problem found, 1 warning", "out", "src", "lowbit", "62.90 kB (62,896 bytes)",
        "32.30 kB (32,296 bytes) (51.3%)", "4.51", "an element is outside", "one.safetensors",
        "to know", "hashes agree", "not done: no source was named", "21.50 dB", "19.25 dB",
        "layers.2.a.weight", "layers.10.a.weight", "norm", "nothing says why", "2.13.0", "mxfp8",
    ):  # fmt: skip
        assert fact in text, fact


def test_a_verdict_is_what_the_exit_code_says():
    assert "passed" in page(found())
    warned = found(problems=(Problem("nothing", "", "", severity=WARN),))
    assert (warned.passed, warned.exit_code) == (True, 0)
    failed = found(problems=(Problem("bound", "", ""),))
    assert (failed.passed, failed.exit_code) == (False, 1)
    assert "passed" not in Page(page(failed)).all_text


def test_a_page_runs_nothing_and_asks_for_nothing():
    text = page(found())
    parsed = Page(text)
    assert not {"script", "link", "img", "iframe", "object"} & {x for x, _ in parsed.elements}
    assert "://" not in text and "url(" not in text and "@import" not in text
    policy = [attrs["content"] for tag, attrs in parsed.elements if "http-equiv" in attrs]
    assert policy == [
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    ]
    attributes = {name for _, attrs in parsed.elements for name in attrs}
    assert not {"style", "src", "onclick", "onload"} & attributes
    links = [attrs["href"] or "" for _, attrs in parsed.elements if "href" in attrs]
    named = {attrs["id"] for _, attrs in parsed.elements if "id" in attrs}
    assert len(links) > 5 and all(link[0] == "#" and link[1:] in named for link in links)
    assert parsed.elements[1] == ("head", {}) or parsed.elements[0] == ("html", {"lang": "en"})


def test_no_name_leaves_its_cell_in_html():
    plain, parsed = Page(page(found())), Page(page(hostile()))
    extra = {x for x, _ in parsed.elements} - {x for x, _ in plain.elements}
    assert extra <= {"ul", "li", "br", "strong"}
    assert "script" not in {x for x, _ in parsed.elements}
    text = page(hostile())
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", text)
    assert "\\u202e\\x0a" in text


def test_no_name_leaves_its_cell_in_markdown():
    text = markdown(hostile())
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", text)
    assert not re.search(r"(?<!\\)[<>`*]", text.replace("| --- |", ""))
    lines = [line for line in text.splitlines() if "script" in line]
    (heading,) = (line for line in lines if line[0] == "#")  # of the map: the name of a stack
    assert heading.startswith("## SQNR in dB: \\<script\\>")
    lines.remove(heading)
    assert not re.search(r"(?<!\\)\|", heading)
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} <= {3, 4, 6, 9}
    assert all(line[0] == "|" and line[-1] == "|" for line in lines)


def test_json_keeps_names_as_they_are_and_has_no_bare_infinity():
    rows = (row("a", float("inf")), row("b", float("nan")), row("c", float("-inf")))
    one = replace(hostile(), weights=rows)
    text = document(one)
    read = json.loads(text, parse_constant=lambda word: pytest.fail(word))
    assert read["target"] == HOSTILE
    assert [x["figures"]["sqnr_db"] for x in read["weights"]] == ["inf", "nan", "-inf"]
    assert read["worst"] == ["b", "c", "a"]


def test_every_kind_of_problem_is_documented():
    room = Path(report.__file__).parents[1] / "verify"
    source = "".join(path.read_text() for path in room.glob("*.py"))
    kinds = set(re.findall(r'Problem\(\s*"([a-z]+)"', source))
    assert len(kinds) > 10
    table = DOCS.read_text().partition("| kind | what is wrong |")[2].partition("\n\n")[0]
    assert kinds <= set(re.findall(r"`([a-z]+)`", table))


def test_infinities_have_words():
    rows = (row("a", float("inf")), row("b", float("nan")), row("c", float("-inf")))
    for write in (page, markdown):
        text = write(found(weights=rows))
        assert "no error" in text and "nan dB" in text and "-inf dB" in text.replace("\\", "")


def many(number: int) -> Verification:
    rows = tuple(
        row(
            f"model.language_model.layers.{n // 7}.mlp.experts.{n}.{'abcdefg'[n % 7]}_proj.weight",
            15 + n % 9,
        )
        for n in range(number)
    )
    kept = tuple(Kept(r.name + ".norm", "BF16", (4096,), "norm") for r in rows)
    problems = tuple(
        Problem("bound", r.name, "an element is not in its interval", "model.safetensors")
        for r in rows[: number // 10]
    )
    return found(weights=rows, kept=kept, problems=problems)


def test_a_thousand_weights_and_as_many_others_fit_in_300_kb():
    text = page(many(1000))
    assert len(text.encode()) < 300_000
    assert "800 better weights are not listed here" in Page(text).all_text


def test_thirty_thousand_weights_make_a_page_that_is_no_larger():
    text = page(many(30_000))
    assert len(text.encode()) < 350_000
    seen = Page(text).all_text
    assert "29800 better weights are not listed here" in seen
    assert "and 2800 more" in seen and "layers and 0 kinds that are better" in seen
    assert "norm: 30000" in seen and "and 29600 more" in seen


def test_a_page_of_a_sample_of_thirty_thousand_tensors_is_no_larger_than_300_kb():
    """Who was looked at stands in the JSON alone."""
    names = [f"model.layers.{n // 7}.mlp.experts.{n}.down_proj.weight" for n in range(30_000)]
    ours = Source(PLAIN, dict.fromkeys(names), (), {})  # type: ignore[arg-type]
    looked = replace(ours, weights=dict.fromkeys(names[::2]))
    (step,) = sampled(Sample(0.5), looked, ours)
    assert step.note[:99] == "of 30,000, seed 0: 15,000 looked at"
    told = {"checks": (step.check,), "sample": described(Sample(0.5), looked)}
    one = replace(many(1000), **told)
    assert len(page(one).encode()) < 300_000 and len(markdown(one)) < 300_000
    assert max(map(len, markdown(one).splitlines())) < 2000
    assert json.loads(document(found(**told)))["sample"]["tensors"] == names[::2]


def test_long_lists_end_with_how_many_more():
    problems = tuple(Problem("bound", f"w{n}", "x") for n in range(1234))
    for write in (page, markdown):
        assert "and 1034 more" in write(found(problems=problems))


def test_an_empty_verification_can_be_told():
    one = Verification("out", None, "", (Problem("unreadable", "", "cut short"),), ())
    for write in SUFFIXES.values():
        assert "cut short" in write(one)


@pytest.mark.parametrize("suffix", [".html", ".md", ".json", ".HTML"])
def test_a_report_is_written_over_an_old_one(tmp_path, suffix):
    path = tmp_path / f"r{suffix}"
    path.write_text(SUFFIXES[suffix.lower()](found(target="before")))
    report.write(found(), path)
    assert path.read_text() == SUFFIXES[suffix.lower()](found())
    assert os.listdir(tmp_path) == [path.name]
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask()


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("name", ["r", "r.txt", "r.htm", ".html"])
def test_an_unknown_suffix_is_refused(tmp_path, name):
    with pytest.raises(UsageError, match="no report can be written"):
        report.write(found(), tmp_path / name)
    assert os.listdir(tmp_path) == []


def test_a_directory_is_refused(tmp_path):
    (tmp_path / "r.html").mkdir()
    with pytest.raises(OutputError, match="is a directory"):
        report.write(found(), tmp_path / "r.html")


def test_a_folder_that_is_not_there_is_an_output_error(tmp_path):
    with pytest.raises(OutputError, match="is no directory"):
        report.write(found(), tmp_path / "no" / "r.html")


def test_a_disk_that_is_full_leaves_the_old_report(tmp_path, monkeypatch):
    path = tmp_path / "r.html"
    report.write(found(), path)
    old = path.read_bytes()

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="No space left"):
        report.write(found(target="after"), path)
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == ["r.html"]


def test_the_template_is_part_of_the_package():
    assert (Path(report.__file__).parent / "page.html.j2").is_file()
