"""Reports: every fact is in each of them, no name can leave its cell, a file is whole or not
there."""

import json
import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lowbitcli import report
from lowbitcli.errors import OutputError, UsageError
from lowbitcli.report import page as pages
from lowbitcli.report.markdown import markdown
from lowbitcli.report.page import page, picture
from lowbitcli.report.write import SUFFIXES, document
from lowbitcli.verify import (
    WARN,
    Check,
    Figures,
    Kept,
    Problem,
    Summary,
    Verification,
    WeightRow,
)

DOCS = Path(__file__).parents[2] / "docs" / "report.md"
HOSTILE = "<script>alert(1)</script>|*a*`b`\x1b[31m\u202e\n\"'&amp;"


def figures(sqnr: float, outside: int | None = 0) -> Figures:
    return Figures(0.25, 10 ** (-sqnr / 20), sqnr, 0.99, outside, None, 3, 1)


def row(name: str, sqnr: float = 20.0, scheme: str = "nvfp4") -> WeightRow:
    return WeightRow(name, scheme, "quantized", (64, 64), 8192, 2308, figures(sqnr))


def found(**more) -> Verification:
    one = Verification(
        target="out",
        source="src",
        container="lowbit",
        problems=(),
        checks=(Check("hashes agree", 20, True), Check("numbers", 0, None, "no source was named")),
        weights=(row("layers.2.a.weight", 21.5), row("layers.10.a.weight", 19.25, "mxfp8")),
        kept=(Kept("norm.weight", "BF16", (64,), "norm"), Kept("x", "F32", (2, 2), "")),
        untouched=2,
        summary=Summary(12, 62896, 32296, 4.5078125, {"kept": (2, 12928), "nvfp4": (6, 13848)}),
        manifest={"version": "0.1.0", "plan": "ab", "recipe": {"name": "nvfp4"}},
        environment={"lowbit": "0.1.0", "torch": "2.13.0", "device": "cpu"},
    )
    return replace(one, **more)


class Page(HTMLParser):
    """What a browser would make of a page: elements, attributes, text; and is it well nested?"""

    VOID = ("meta",)

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.stack: list[str] = []
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        if self.stack[-1:] != ["style"]:
            self.text.append(data)

    @property
    def all_text(self) -> str:
        return " ".join(" ".join(self.text).split())

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)


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
    assert not {"script", "link", "img", "iframe", "object", "a"} & {x for x, _ in parsed.elements}
    assert "://" not in text and "url(" not in text and "@import" not in text
    policy = [attrs["content"] for tag, attrs in parsed.elements if "http-equiv" in attrs]
    assert policy == [
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    ]
    attributes = {name for _, attrs in parsed.elements for name in attrs}
    assert not {"style", "src", "href", "onclick", "onload"} & attributes
    assert parsed.elements[1] == ("head", {}) or parsed.elements[0] == ("html", {"lang": "en"})


def hostile() -> Verification:
    return found(
        target=HOSTILE,
        source=HOSTILE,
        container=HOSTILE,
        problems=(Problem(HOSTILE, HOSTILE, HOSTILE, HOSTILE),),
        checks=(Check(HOSTILE, 1, True), Check("x", 0, None, HOSTILE)),
        weights=(row(HOSTILE, scheme=HOSTILE),),
        kept=(Kept(HOSTILE, HOSTILE, (1,), HOSTILE),),
        summary=Summary(1, 1, 1, 1.0, {HOSTILE: (1, 1)}),
        manifest={"version": HOSTILE, "plan": HOSTILE, "recipe": {"name": HOSTILE}},
        environment={HOSTILE: HOSTILE},
    )


def test_no_name_leaves_its_cell_in_html():
    plain, parsed = Page(page(found())), Page(page(hostile()))
    assert {x for x, _ in parsed.elements} <= {x for x, _ in plain.elements} | {"h2"}
    assert "script" not in {x for x, _ in parsed.elements}
    text = page(hostile())
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", text)
    assert "\\u202e\\x0a" in text


def test_no_name_leaves_its_cell_in_markdown():
    text = markdown(hostile())
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", text)
    assert not re.search(r"(?<!\\)[<>`*]", text.replace("| --- |", ""))
    widths = {len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines() if "script" in line}
    assert widths <= {3, 4, 6, 9}
    assert all(line[0] == "|" and line[-1] == "|" for line in text.splitlines() if "script" in line)


def test_json_keeps_names_as_they_are_and_has_no_bare_infinity():
    rows = (row("a", float("inf")), row("b", float("nan")), row("c", float("-inf")))
    one = replace(hostile(), weights=rows)
    text = document(one)
    read = json.loads(text, parse_constant=lambda word: pytest.fail(word))
    assert read["target"] == HOSTILE
    assert [x["figures"]["sqnr_db"] for x in read["weights"]] == ["inf", "nan", "-inf"]
    assert read["worst"] == ["b", "c", "a"]


def keys(value, path="") -> set[str]:
    if isinstance(value, dict):
        below = [keys(item, key) for key, item in value.items()]
        return set(value).union(*below) if path != "schemes" else set().union(*below)
    if isinstance(value, list):
        return set().union(*(keys(item) for item in value))
    return set()


def test_every_key_is_documented():
    one = found(problems=(Problem("bound", "", ""),), manifest={"version": "", "plan": ""})
    named = set(re.findall(r"`([a-z_]+)`", DOCS.read_text()))
    missing = keys(json.loads(document(one))) - named
    assert missing == set()


def test_every_kind_of_problem_is_documented():
    room = Path(report.__file__).parents[1] / "verify"
    source = "".join(path.read_text() for path in room.glob("*.py"))
    kinds = set(re.findall(r'Problem\(\s*"([a-z]+)"', source))
    assert len(kinds) > 10
    table = DOCS.read_text().partition("| kind | what is wrong |")[2].partition("\n\n")[0]
    assert kinds <= set(re.findall(r"`([a-z]+)`", table))


def test_infinities_have_words():
    rows = (row("a", float("inf")), row("b", float("nan")))
    for write in (page, markdown):
        text = write(found(weights=rows))
        assert "no error" in text
    assert picture(found(weights=rows)) is None


def test_the_picture_counts_numbers_as_numbers_and_stays_in_its_box():
    rows = tuple(row(f"layers.{n}.w", 10.0 + n) for n in (10, 9, 2))
    one = picture(found(weights=(*rows, row("layers.1.w", float("inf")))))
    assert one is not None
    assert [dot.title.split(":")[0] for dot in one.dots] == [
        "layers.2.w",
        "layers.9.w",
        "layers.10.w",
    ]
    assert [dot.y for dot in one.dots] == sorted((dot.y for dot in one.dots), reverse=True)
    assert all(0 <= dot.x <= one.width and 0 <= dot.y <= one.height for dot in one.dots)
    assert all(0 <= y <= one.height for y, _ in one.lines) and len(one.lines) >= 2
    assert one.without_error == 1
    assert Page(page(found(weights=rows))).count("circle") == 4


@pytest.mark.parametrize("sqnr", [-300.0, 0.0, 20.0, 747.0])
def test_the_picture_holds_any_number(sqnr):
    one = picture(found(weights=(row("a", sqnr), row("b", 20.0))))
    assert one is not None
    assert len(one.lines) < 12
    assert all(0 <= dot.y <= one.height for dot in one.dots)


def test_a_picture_of_too_many_weights_keeps_the_worst(monkeypatch):
    monkeypatch.setattr(pages, "DOTS", 10)
    one = picture(found(weights=tuple(row(f"layers.{n}.w", 40.0 - n / 10) for n in range(30))))
    assert one is not None
    assert (len(one.dots), one.left_out) == (10, 20)
    assert one.dots[-1].title.startswith("layers.29.w")


def test_a_thousand_weights_and_as_many_others_fit_in_300_kb():
    rows = tuple(
        row(f"model.language_model.layers.{n // 7}.mlp.experts.{n}.gate_proj.weight", 15 + n % 9)
        for n in range(1000)
    )
    kept = tuple(Kept(r.name + ".norm", "BF16", (4096,), "norm") for r in rows)
    problems = tuple(
        Problem("bound", r.name, "an element is not in its interval", "model.safetensors")
        for r in rows[:100]
    )
    text = page(found(weights=rows, kept=kept, problems=problems))
    assert len(text.encode()) < 300_000
    assert Page(text).count("circle") == 1001


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
    path.write_text("old")
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
    with pytest.raises(UsageError, match="is a directory"):
        report.write(found(), tmp_path / "r.html")


def test_a_folder_that_is_not_there_is_an_output_error(tmp_path):
    with pytest.raises(OutputError, match="is no directory"):
        report.write(found(), tmp_path / "no" / "r.html")


def test_a_disk_that_is_full_leaves_the_old_report(tmp_path, monkeypatch):
    path = tmp_path / "r.html"
    path.write_text("old")

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="No space left"):
        report.write(found(), path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["r.html"]


def test_the_template_is_part_of_the_package():
    assert (Path(report.__file__).parent / "page.html.j2").is_file()
