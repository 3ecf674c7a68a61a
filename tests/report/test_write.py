"""Where a report is written: over another report, never over anything else that is there."""

import json
import os
import socket
from pathlib import Path

import pytest

from lowbitcli import api, report
from lowbitcli.errors import LowbitError, OutputError, UsageError
from lowbitcli.report import curve, sides_page
from lowbitcli.report.heads import BYTES, is_report
from lowbitcli.report.markdown import markdown
from lowbitcli.report.sides import diff
from lowbitcli.report.write import SUFFIXES, document
from tests.checkpoints import single, weight
from tests.report.made import found, hostile

LONG = "x" * 300


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Return a report of every kind and form, also of names that do their worst."""
    source = single(tmp_path_factory.mktemp("r") / 'a "b" \\', {"down_proj.weight": weight(32, 32)})
    search = api.choose(source, api.Wanted(bits=8.5), api.Allowed("cpu"))
    both = diff(found(), found(), ("a.json", "b.json"))
    texts = [form(one) for one in (found(), hostile()) for form in SUFFIXES.values()]
    texts += [form(both) for form in sides_page.SUFFIXES.values()]
    texts += [form(search) for form in curve.SUFFIXES.values()]
    texts.append(json.dumps(found(target=LONG).to_dict(), indent=2))  # as `verify --json` prints it
    return texts


def test_every_report_is_known_by_its_head(reports):
    assert len(reports) == 13
    assert [text[:99] for text in reports if not is_report(text.encode()[:BYTES])] == []


@pytest.mark.parametrize(
    "text",
    [
        "{}", '{"architectures": ["LlamaForCausalLM"], "schema": 1}', '{"schema": 1}',
        '{"lowbit": 1, "version": "0.1.0"}', '{"weight_map": {}}', "# A model\n\n# lowbit verify: ",
        '<!doctype html>\n<p class="brand">other</p>', '{"source": "x", "container": "y"}',
    ],
)  # fmt: skip
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_is_no_report_stays(tmp_path, suffix, text):
    path = tmp_path / f"config{suffix}"
    path.write_text(text)
    for do in (lambda: report.check_path(path), lambda: report.write(found(), path)):
        with pytest.raises(UsageError, match="is there and is no report") as caught:
            do()
        assert str(path) in caught.value.message and "name another file" in caught.value.hint
    assert path.read_text() == text and os.listdir(tmp_path) == [path.name]


def test_an_empty_file_is_nothing_to_lose(tmp_path):
    path = tmp_path / "made-by-mktemp.json"
    path.touch()
    report.write(found(), path)
    assert json.loads(path.read_text())["passed"] == found().passed


def test_a_link_to_a_file_of_another_form_is_refused(tmp_path, reports):
    (tmp_path / "a.json").write_text(document(found()))
    (tmp_path / "a.html").symlink_to("a.json")
    with pytest.raises(UsageError, match="has another suffix"):
        report.write(found(), tmp_path / "a.html")
    assert (tmp_path / "a.json").read_text() == document(found())


def test_files_of_a_checkpoint_are_no_reports_and_stay(tmp_path):
    """Before any work: there is not so much as a checkpoint of the name."""
    source = single(tmp_path / "source", {"a.down_proj.weight": weight(32, 32)})
    (source / "config.json").write_text('{"model_type": "llama"}')
    made = api.quantize(source, tmp_path / "out", api.Request(scheme="mxfp8"), device="cpu").output
    named = [*source.glob("*.json"), *made.glob("*.json")]
    before = {path: path.read_bytes() for path in named}
    assert {path.name for path in named} >= {"config.json", "lowbit.json"}
    for path in named:
        with pytest.raises(UsageError, match="no report of lowbit"):
            api.verify(tmp_path / "none", report=path, device="cpu")
    assert {path: path.read_bytes() for path in named} == before


def test_any_report_is_replaced_by_any_other(tmp_path, reports):
    path = tmp_path / "r.md"
    for text in reports:
        path.write_text(text)
        report.write(found(), path)
        assert path.read_text() == markdown(found())


def test_a_link_stays_and_what_it_leads_to_is_checked_and_written(tmp_path):
    (tmp_path / "there").mkdir()
    link, target = tmp_path / "link.json", tmp_path / "there" / "config"
    link.symlink_to(Path("there") / "config")
    report.write(found(), link)
    assert link.is_symlink() and target.read_text() == document(found())
    report.write(found(target="again"), link)
    assert link.is_symlink() and target.read_text() == document(found(target="again"))
    assert os.listdir(target.parent) == ["config"]
    target.write_text("{}")
    with pytest.raises(UsageError, match=f"link.json, a link to {target}, is there"):
        report.write(found(), link)
    assert link.is_symlink() and target.read_text() == "{}"


def links(folder: Path) -> Path:
    (folder / "a.md").symlink_to("b.md")
    (folder / "b.md").symlink_to("a.md")
    return folder / "a.md"


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "r.html")
    return folder / "r.html"


def listener(folder: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(folder / "r.json"))
    return folder / "r.json"


def device(folder: Path) -> Path:
    (folder / "r.json").symlink_to("/dev/null")
    return folder / "r.json"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (pipe, "r.html is no file but a device, pipe or socket"),
        (listener, "r.json is no file but"),
        (device, "r.json, a link to /dev/null, is no file but"),
        (lambda _: Path("/dev/full"), "/dev/full is no file but"),
        (lambda folder: folder, "is a directory"),
        (links, "a.md"),
        (lambda folder: folder / f"{LONG}.md", "name too long"),
    ],
)
def test_what_is_no_file_is_an_output_error_and_stays(tmp_path, make, said):
    path = make(tmp_path)
    before = path.lstat() if len(path.name) < 256 else None
    for do in (lambda: report.check_path(path), lambda: report.write(found(), path)):
        with pytest.raises(OutputError, match="(?i)" + said) as caught:
            do()
        assert caught.value.hint and caught.value.exit_code == 5
    assert before is None or os.path.samestat(path.lstat(), before)


@pytest.mark.parametrize("kind", ["same", "other way", "link", "hard link"])
def test_an_input_is_not_replaced(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    a, output = tmp_path / "a.json", Path("o.json")
    report.write(found(), a)
    if kind == "same":
        output = a
    elif kind == "other way":
        output = Path("..") / tmp_path.name / "a.json"
    elif kind == "link":
        output.symlink_to("a.json")
    else:
        output.hardlink_to(a)
    with pytest.raises(UsageError, match=r"json.* is to be read, not to be replaced") as caught:
        report.check_path(output, ("b.json", a))
    assert caught.value.hint == "name another file for the report"
    assert isinstance(caught.value, LowbitError)
    report.check_path(Path("new.json"), ("b.json", a))
