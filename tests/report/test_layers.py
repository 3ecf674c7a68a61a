"""The map of layers and kinds: what names say, what a cell shows, what is left out."""

import math

import pytest

from lowbitcli.report import layers
from lowbitcli.report.layers import STEPS, Place, Scale, maps, natural, place
from lowbitcli.report.page import page
from tests.report.made import Page, found, row


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.12.self_attn.q_proj.weight", ("model.layers", 12, "self_attn.q_proj")),
        ("m.3.mlp.experts.17.up_proj.weight", ("m", 3, "mlp.experts.*.up_proj")),
        ("transformer.h.0.weight", ("transformer.h", 0, "weight")),
        ("double_blocks.7.img_attn.qkv.weight", ("double_blocks", 7, "img_attn.qkv")),
        ("lm_head.weight", ("", None, "lm_head")),
        ("0", ("", 0, "weight")),
        ("a.99999999999999999999.b", ("", None, "a.99999999999999999999.b")),
        ("", ("", None, "")),
    ],
)  # fmt: skip
def test_a_name_says_where_its_weight_is(name, expected):
    assert place(name) == Place(*expected)


def test_rows_are_layers_in_order_and_cells_the_lowest_sqnr():
    names = {"m.10.q": 20.0, "m.2.q": 24.0, "m.2.e.0.up": 21.0, "m.2.e.1.up": 17.26}
    rows = [row(f"{name}.weight", sqnr) for name, sqnr in names.items()]
    drawn = maps(found(weights=(*rows, row("head.weight", 30.0))))
    assert drawn is not None and drawn.is_many
    one, other = drawn.maps
    assert (one.stack, one.kinds) == ("m", ("e.*.up", "q"))
    assert [label for label, _, _ in one.rows] == ["2", "10"]
    up, q = one.rows[0][1]
    assert up is not None and (up.text, up.step, up.number) == ("17.3", 0, 2)
    assert q is not None and (q.text, q.number) == ("24.0", 1)
    assert one.rows[1][1][0] is None
    assert (other.stack, other.rows[0][0], other.kinds) == ("", "head", ("SQNR",))


def test_a_total_is_of_the_sums_and_not_of_the_decibels():
    one = row("m.0.a", 20.0)
    other = row("m.0.b", 20.0 + 20 * math.log10(2), norm=16.0)  # twice the norm, the same error
    drawn = maps(found(weights=(one, other)))
    assert drawn is not None
    expected = 10 * math.log10((64 + 256) / (2 * 64 / 100))
    assert drawn.maps[0].rows[0][2] == f"{expected:.1f}" != f"{20 + 10 * math.log10(2):.1f}"


def test_what_is_alike_has_one_colour_and_what_is_not_has_all():
    alike = Scale.over([20.4, 20.5, 20.6])
    assert {alike.step(value) for value in (20.4, 20.5, 20.6)} == {STEPS - 1}
    apart = Scale.over([6.0, 41.0])
    assert [apart.step(value) for value in (6.0, 10.9, 11.1, 35.9, 36.1, 41.0)] == [
        0,
        0,
        1,
        5,
        6,
        6,
    ]
    assert (apart.step(math.nan), apart.step(-math.inf), apart.step(math.inf)) == (0, 0, None)
    assert len(apart.legend) == STEPS and apart.legend[0] == "6.0\N{EN DASH}11.0"
    assert Scale.over([]).step(math.inf) is None


def test_no_measured_weight_no_map():
    assert maps(found(weights=())) is None


def test_weights_without_any_error_need_no_legend():
    drawn = maps(found(weights=(row("m.0.a", math.inf),)))
    assert drawn is not None and drawn.legend == ()
    text = page(found(weights=(row("m.0.a", math.inf),)))
    assert 'class="legend"' not in text and "<td>\N{INFINITY}</td>" in text


def test_too_many_layers_leave_the_worst(monkeypatch):
    monkeypatch.setattr(layers, "CELLS", 12)
    rows = tuple(row(f"m.{n}.{kind}", 50.0 - n) for n in range(10) for kind in "ab")
    drawn = maps(found(weights=(*rows, row("z.1.a"))))
    assert drawn is not None
    one, other = drawn.maps
    assert [label for label, _, _ in one.rows] == ["4", "5", "6", "7", "8", "9"]
    assert (one.left_out, other.rows, other.left_out) == (4, (), 1)
    text = Page(page(found(weights=rows))).all_text
    assert "4 layers and 0 kinds that are better than these are not shown" in text


def test_too_many_kinds_leave_the_worst(monkeypatch):
    monkeypatch.setattr(layers, "KINDS", 2)
    drawn = maps(found(weights=(row("m.0.a", 9.0), row("m.0.b", 30.0), row("m.0.c", 8.0))))
    assert drawn is not None
    assert (drawn.maps[0].kinds, drawn.maps[0].kinds_left_out) == (("a", "c"), 1)


def test_every_number_stands_as_text_in_a_cell_with_headers():
    parsed = Page(page(found()))
    assert "21.5" in parsed.all_text and "19.2" in parsed.all_text
    heads = [attrs for tag, attrs in parsed.elements if tag == "th"]
    assert heads and all(attrs.get("scope") in ("row", "col") for attrs in heads)


def test_names_sort_as_numbers():
    assert sorted(["a.10", "a.9", "a.b"], key=natural) == ["a.9", "a.10", "a.b"]
