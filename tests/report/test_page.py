"""What a page is like to read: contrast of its colours, landmarks, headings, tables, folding."""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from lowbitcli import report
from lowbitcli.report.markdown import markdown
from lowbitcli.report.page import page
from lowbitcli.verify import WARN, Problem
from tests.report.made import HOSTILE, Page, found, row

STYLE = (Path(report.__file__).parent / "style.css").read_text()


def colours(dark: bool) -> dict[str, str]:
    """Return the variables of a colour scheme."""
    light, night = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)[:2]
    return dict(re.findall(r"--(\w[\w-]*): (#[0-9a-f]+);", night if dark else light))


def luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * c for c in colour[1:])
    parts = [int(digits[n : n + 2], 16) / 255 for n in (0, 2, 4)]
    linear = [x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_read(dark):
    found_colours = colours(dark)
    pairs = [(f"t{n}", f"h{n}") for n in range(7)]
    pairs += [(ink, paper) for ink in ("ink", "soft", "link") for paper in ("paper", "raised")]
    pairs += [(tone, f"{tone}-paper") for tone in ("good", "bad", "warn")]
    pairs += [(tone, "paper") for tone in ("good", "bad", "warn", "out")]
    pairs += [("ink", f"{tone}-paper") for tone in ("good", "bad", "warn")]
    low = {pair: contrast(*(found_colours[name] for name in pair)) for pair in pairs}
    assert {pair: ratio for pair, ratio in low.items() if ratio < 4.5} == {}
    assert contrast(found_colours["bar"], found_colours["paper"]) > 3


@pytest.mark.parametrize("dark", [False, True])
def test_colours_of_the_map_can_be_told_apart_by_lightness_alone(dark):
    found_colours = colours(dark)
    steps = [luminance(found_colours[f"h{n}"]) for n in range(7)]
    assert steps == sorted(steps, reverse=dark)
    assert all((b + 0.05) / (a + 0.05) > 1.15 or (a + 0.05) / (b + 0.05) > 1.15
               for a, b in pairwise(steps))  # fmt: skip


def test_a_reader_that_cannot_see_it_finds_its_way():
    parsed = Page(page(found(problems=(Problem("bound", "w", "m"),))))
    tags = [tag for tag, _ in parsed.elements]
    assert [tags.count(tag) for tag in ("h1", "main", "header", "nav", "footer")] == [1] * 5
    headings = [int(tag[1]) for tag in tags if re.fullmatch("h[1-6]", tag)]
    assert all(below - above <= 1 for above, below in pairwise(headings))
    named = {attrs["id"] for _, attrs in parsed.elements if "id" in attrs}
    for tag, attrs in parsed.elements:
        if tag == "section":
            assert attrs["aria-labelledby"] in named
        if tag == "svg":
            assert attrs["role"] == "img" and attrs["aria-label"]
        if tag == "th":
            assert attrs["scope"] in ("row", "col")
        if attrs.get("class") == "wide":
            assert (attrs["role"], attrs["tabindex"]) == ("region", "0") and attrs["aria-label"]
    identifiers = [attrs["id"] for _, attrs in parsed.elements if "id" in attrs]
    assert len(identifiers) == len(set(identifiers))


def test_a_verdict_is_said_in_words_and_not_in_colour_alone():
    for problems, tone, said in (
        ((), "good", "Passed"),
        ((Problem("nothing", "", "m", severity=WARN),), "warn", "Passed, 1 warning"),
        ((Problem("bound", "", "m"),), "bad", "1 problem found"),
    ):
        parsed = Page(page(found(problems=problems)))
        assert said in parsed.all_text
        classes = [attrs.get("class") or "" for tag, attrs in parsed.elements if tag == "p"]
        assert f"verdict {tone}" in classes


def test_each_kind_of_problem_is_on_the_first_screen_and_long_lists_are_folded():
    problems = tuple(Problem("bound", f"w{n}", f"m{n}") for n in range(1500))
    problems += (Problem("scale", "s", "a scale"), Problem("nothing", "", "", severity=WARN))
    text = page(found(problems=problems))
    first = text[: text.index("<nav")]
    assert "bound &times; 1,500" in first and "m0" in first and "m1" not in first
    assert "<strong>scale</strong>" in first and "nothing" not in first
    section = text[text.index('id="problems"') : text.index('id="layers"')]
    shown, _, folded = section.partition("<details>")
    assert shown.count('class="bad">fail') == 10 and folded.count('class="bad">fail') == 190
    assert "190 more" in folded and "and 1302 more" in folded


def test_names_break_after_dots_and_nowhere_is_a_space_put():
    text = page(found(weights=(row("model.layers.0.q_proj.weight"),)))
    assert "model.<wbr>layers.<wbr>0.<wbr>q_proj.<wbr>weight</th>" in text


def test_a_table_that_is_too_wide_scrolls_by_itself():
    text = page(found(problems=(Problem("bound", "w", "m"),)))
    of_histograms = text.count('<summary class="small">The numbers</summary><table>')
    assert of_histograms == 1
    assert text.count("<table") == len(re.findall(r'<div class="wide"[^>]*><table', text)) + 1


def test_paper_and_small_screens_are_thought_of():
    for rule in ("@media print", "max-width: 40rem", "prefers-color-scheme: dark",
                 "details::details-content", "print-color-adjust: exact"):  # fmt: skip
        assert rule in STYLE
    assert "url(" not in STYLE and "@import" not in STYLE


def test_what_was_put_right_is_told_and_what_was_not():
    """`fixed` of a verification is what `--fix` says: changes, then what it had to leave."""
    some = found(fixed=("config.json: format added", HOSTILE, "not fixed: q_proj loses 11 %"))
    for text in (page(some), markdown(some)):
        assert "Put right" in text
        assert text.index("config.json") < text.index("loses 11")
        assert "<script>alert" not in text
    parsed = Page(page(some))
    links = [dict(attributes).get("href") for tag, attributes in parsed.elements if tag == "a"]
    assert "#fixed" in links
    assert page(some).count("not fixed") == 1
    many = found(fixed=tuple(f"change {n}" for n in range(1000)))
    assert "and 800 more" in page(many) and "and 800 more" in markdown(many)
    assert "Put right" not in page(found()) + markdown(found())


@pytest.mark.parametrize("target", [".", "./", "..", "inner/.."])
def test_a_checkpoint_that_is_here_is_called_by_its_name(tmp_path, monkeypatch, target):
    (tmp_path / "model-nvfp4" / "inner").mkdir(parents=True)
    here = tmp_path / "model-nvfp4"
    monkeypatch.chdir(here / "inner" if target == ".." else here)
    one = found(target=target, source=target)
    parsed = page(one)
    assert "<h1>model-nvfp4</h1>" in parsed and "&ndash; model-nvfp4</title>" in parsed
    assert Page(parsed).all_text.count(str(here)) == 2  # checkpoint and source, as evidence
    assert "| Checked | model-nvfp4 |" in markdown(one)
    assert "<h1>out</h1>" in page(found()) and str(here) not in page(found())


def test_how_many_weights_of_a_sample_were_measured_is_on_the_first_screen():
    rows = (row("a.1.w"), row("a.2.w"), replace(row("a.3.w"), figures=None))
    sample = {"share": 0.5, "seed": 0, "tensors": ["a.1.w", "a.2.w"]}
    for text in (page(found(weights=rows, sample=sample)), markdown(found(weights=rows))):
        assert "SQNR over 2 of 3 weights" in text and "over all weights" not in text
    assert "SQNR over all weights" in page(found()) and "SQNR over all weights" in markdown(found())


def test_no_two_sections_of_markdown_have_one_name():
    rows = (row("a.layers.1.w"), row("b_`c`.layers.1.w"), row("lm_head.weight"))
    headings = re.findall("^#+ .*", markdown(found(weights=rows)), re.M)
    assert len(set(headings)) == len(headings)
    assert "## SQNR in dB: a.layers" in headings and "## SQNR in dB: outside of layers" in headings
    assert r"## SQNR in dB: b\_\`c\`.layers" in headings


def test_paper_is_never_dark_and_what_is_wide_lies_across_it():
    schemes = re.findall(r"@media ([^{]*prefers-color-scheme[^{]*)\{", STYLE)
    assert [one.strip() for one in schemes] == ["screen and (prefers-color-scheme: dark)"]
    printed = STYLE[STYLE.index("@media print") :]
    assert "color-scheme: light" in printed and "content-visibility: visible" in printed
    assert "@page wide { size: landscape; }" in STYLE
    assert ".all-figures { page: wide; }" in printed
    assert 'class="all-figures"' in page(found(weights=(row("a.weight"),)))
