"""The report of a search: the curve as a picture and a table, on a page that needs nothing else."""

import itertools
import json
import math
import re

import pytest

from lowbitcli import api, report
from lowbitcli import recipe as recipes
from lowbitcli.errors import UsageError
from lowbitcli.report import bits, curve
from lowbitcli.report.markdown import markdown
from lowbitcli.report.page import page
from lowbitcli.report.read import verification
from lowbitcli.search import told
from tests.checkpoints import single, weight
from tests.report.made import HOSTILE
from tests.report.made import found as verified
from tests.search import models


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return models.dense(tmp_path_factory.mktemp("curve") / "model")


@pytest.fixture(scope="module")
def found(source):
    return api.choose(source, api.Wanted(bits=5.8), api.Allowed("cpu"))


def test_the_page_needs_nothing_else_and_shows_what_was_chosen(found, tmp_path):
    path = tmp_path / "x.html"
    report.write_curve(found, path)
    page = path.read_text()
    assert (
        "<script" not in page and "http:" not in page and "https" not in page and "<img" not in page
    )
    assert page.count("<svg") == 1 and "chosen" in page
    assert all(score.name in page.replace("&#39;", "'") for score in found.scores)
    assert "budget   5.8 bits" in page
    assert len(page) < 100_000


def test_the_picture_lies_in_its_box_and_falls_from_right_to_left(found):
    picture = curve.picture(found)
    places = [tuple(map(float, one.split())) for one in picture.path[1:].split("L")]
    assert len(places) == sum(one.error > 0 for one in found.curve)
    marks = [(one.x, one.y) for one in (*picture.uniform, picture.chosen)]
    assert all(-1 <= x <= bits.WIDTH + 1 for x, _ in (*places, *marks))
    assert all(-1 <= y <= bits.HEIGHT + 1 for _, y in (*places, *marks))
    heights = sorted(one.at for one in picture.uniform)
    assert all(b - a >= 15 for a, b in itertools.pairwise(heights))
    assert places == sorted(places, key=lambda one: (one[0], -one[1]))
    assert places[0][1] > places[-1][1]  # less error is higher up
    assert places[0][0] == 0 and len(picture.uniform) == 3
    assert [label for _, label in picture.bits][:2] == ["5", "6"]
    heights = [y for y, _ in picture.db]
    assert heights == sorted(heights, reverse=True) and 0 <= heights[-1] < 80


@pytest.mark.parametrize("bits", [None, 9.0])
def test_what_the_container_cannot_hold_is_told(source, bits):
    found = api.choose(source, api.Wanted(bits=bits, container="native-mxfp8"), api.Allowed("cpu"))
    assert list(found.left_out) == ["nvfp4", "fp8"]
    for name, why in found.left_out.items():
        told = f"left out: {name}: {why}"
        assert told in curve.page(found).replace("&#39;", "'") and told in curve.markdown(found)


@pytest.mark.parametrize("chosen", [(2.0, 20.0), (16.0, 20.0), (5.0, 90.0), (5.0, -30.0)])
def test_what_somebody_wrote_into_a_recipe_lies_in_the_box_too(chosen):
    picture = bits.drawn([(4.5, 18.0), (8.0, 31.0)], {"nvfp4": (4.5, 18.0)}, chosen)
    assert picture is not None and picture.chosen is not None
    assert 0 <= picture.chosen.x <= bits.WIDTH and 0 <= picture.chosen.y <= bits.HEIGHT


def test_the_table_has_the_curve_the_uniform_schemes_and_what_was_chosen(found):
    rows = curve.rows(found)
    assert [float(row[0]) for row in rows] == sorted(float(row[0]) for row in rows)
    names = [row[2] for row in rows]
    assert {"all nvfp4", "all mxfp8", "all fp8", "all keep"} <= set(names)
    (chosen,) = (row for row in rows if row[2].startswith("chosen: "))
    assert chosen[0] == f"{found.bits(found.chosen.solution.cost):.3f}"
    assert chosen[1] == f"{found.db(found.chosen.solution.error):.2f}"


def test_markdown_and_json_say_the_same(found, tmp_path):
    for suffix in (".md", ".json"):
        report.write_curve(found, tmp_path / f"x{suffix}")
    text = (tmp_path / "x.md").read_text()
    assert all(f"| {bits} | {db} |" in text for bits, db, _ in curve.rows(found))
    said = json.loads((tmp_path / "x.json").read_text())
    units = told.document(found)["units"]
    assert [one["name"] for one in said["units"]] == [one["name"] for one in units]
    assert said["units"][0]["choices"]["nvfp4"] == units[0]["choices"]["nvfp4"]
    assert said["curve"][-1]["db"] == "inf"
    assert said["chosen"]["recipe"] == found.chosen.text


def test_a_curve_without_a_choice_and_one_without_an_error(tmp_path):
    source = single(tmp_path / "m", {"a.down_proj.weight": weight(32, 32) * 0})
    found = api.choose(source, api.Wanted(), api.Allowed("cpu"))
    assert curve.picture(found) is None
    assert "<svg" not in curve.page(found) and "chosen:" not in curve.page(found)
    assert found.chosen is None


def test_hostile_names_are_text(tmp_path):
    name = "<b>&\x1b[31m'x.weight"
    source = single(tmp_path / "m", {name: weight(32, 32)})
    page = curve.page(api.choose(source, api.Wanted(bits=8.5), api.Allowed("cpu")))
    assert "<b>" not in page and "\x1b" not in page
    assert re.search(r"&lt;b&gt;&amp;\\x1b\[31m", page)


def test_other_suffixes_are_refused(found, tmp_path):
    with pytest.raises(UsageError, match="no report can be written"):
        report.write_curve(found, tmp_path / "x.pdf")


@pytest.fixture(scope="module")
def made(source, found, tmp_path_factory):
    """Return the verification of an output of the recipe that was chosen."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "r.yaml").write_text(found.chosen.text)
    api.quantize(source, folder / "out", api.Request(recipe=folder / "r.yaml"), device="cpu")
    return api.verify(folder / "out", against=source, device="cpu")


def test_verify_shows_by_what_the_recipe_was_chosen(found, made):
    said = made.manifest["recipe"]["measured"]
    at = found.bits(found.chosen.solution.cost), found.db(found.chosen.solution.error)
    assert said["chosen"] == [round(at[0], 4), round(at[1], 3)]
    assert said["uniform"].keys() == {"nvfp4", "mxfp8", "fp8"}  # keep loses nothing
    assert said["curve"] == sorted(said["curve"]) and len(said["curve"]) > 10
    shown = page(made)
    assert f"at {at[0]:.2f} bits, {at[1]:.2f} dB" in shown
    assert shown.count("Error against bits:") == 1 and ">all mxfp8</text>" in shown
    assert f"| {at[0]:.3f} | {at[1]:.2f} | chosen |" in markdown(made)
    assert "measured" not in shown[shown.index("The recipe, as the checkpoint tells it") :][:900]
    again = verification(json.loads(json.dumps(made.to_dict())))
    assert page(again) == shown


def test_what_was_measured_decides_nothing_and_holds_for_one_recipe_alone(found, tmp_path):
    (tmp_path / "r.yaml").write_text(found.chosen.text)
    recipe = recipes.load(str(tmp_path / "r.yaml"))
    assert recipe.measured is not None
    assert recipe.model_copy(update={"measured": None}).digest == recipe.digest
    (tmp_path / "s.yaml").write_text("{extends: r.yaml, nonfinite: keep}")
    assert recipes.load(str(tmp_path / "s.yaml")).measured is None


@pytest.mark.parametrize(
    "said",
    [
        None, 1, [], {}, {"curve": []}, {"curve": [[4.5]]}, {"curve": [[4.5, math.nan]]},
        {"curve": [[0, 1]]}, {"curve": [[-4.5, 1]]}, {"curve": [[4.5, 1e300]]},
        {"curve": [["4.5", 20]]}, {"curve": [[4.5, 20.0]], "more": 1},
    ],
)  # fmt: skip
def test_what_is_no_curve_is_not_shown(said):
    shown = verified(manifest={"recipe": {"name": "x", "measured": said}})
    assert bits.budget(shown) is None and "Error against bits" not in page(shown)


def test_names_of_strangers_on_the_curve_are_text():
    said = {"curve": [[4.5, 20.0], [8.25, 31.0]], "uniform": {HOSTILE: [4.5, 20.0]}}
    shown = verified(manifest={"recipe": {"measured": said}})
    assert bits.budget(shown) is not None
    assert "<script>" not in page(shown) and "alert" in page(shown)
    assert "<script>" not in markdown(shown)
