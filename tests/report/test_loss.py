"""What was lost, over many weights: totals, reasons, blocks."""

import math

import pytest

from lowbitcli.report import loss, words
from lowbitcli.report.page import page
from lowbitcli.verify import Check, WorstBlock
from tests.report.made import Page, figures, found, row

NAN = float("nan")


def test_a_total_adds_errors_and_signals():
    one, other = figures(20.0, norm=3.0), figures(40.0, norm=4.0)
    total = loss.total([one, other])
    assert total is not None
    error = math.hypot(3.0 * 0.1, 4.0 * 0.01)
    assert total.relative == pytest.approx(error / 5.0)
    assert total.sqnr_db == pytest.approx(20 * math.log10(5.0 / error))
    assert (total.number, loss.total([])) == (2, None)


def test_a_total_of_what_has_no_error_or_no_end():
    assert loss.total([figures(math.inf, relative=0.0)]) == loss.Total(1, 0.0, math.inf)
    assert loss.total([figures(NAN, norm=NAN)]) is None  # of an older report
    assert loss.total([figures(20.0, norm=0.0, relative=math.inf)]) == loss.Total(1, 0.0, math.inf)
    assert loss.total([figures(20.0, relative=math.inf)]) == loss.Total(1, math.inf, -math.inf)


def reason(odd, *others) -> str:
    usual = [row(f"usual.{n}", 20.0) for n in range(5)]
    return loss.Reasons(found(weights=(*usual, odd, *others))).of(odd, odd.figures)


@pytest.mark.parametrize(
    ("odd", "told"),
    [
        (row("w", 20.0), "like the others"),
        (row("w", 25.0), "like the others"),
        (row("w", 19.5), "like the others, 0.5 dB below the median"),
        (row("w", 12.0), "8.0 dB below the median"),
        (row("w", 12.0, zeros=2000), "outliers: 48.8% became zero (median 7.3%)"),
        (row("w", 12.0, underflow_blocks=64), "underflow: 25.0% of its blocks are lost"),
        (row("w", 12.0, outside=1234), "1,234 elements outside their interval"),
        (row("w", NAN), "values that are not finite"),
        (
            row("w", 12.0, worst_block=WorstBlock((0, 0), (1, 16), 1.0, 0.1, 3.0, 128.0)),
            "one block has 50% of the error",
        ),
        (row("w", 12.0, blocks=None, worst_block=None, zeros=None), "8.0 dB below the median"),
        (row("w", 12.0, scheme="fp8_tensor"), "like the others"),  # there are no others
    ],
)
def test_a_reason_is_read_off_the_figures(odd, told):
    assert reason(odd) == told


def test_the_lowest_sqnr_is_named_first_and_nan_is_lower():
    tiles = {tile.label: tile for tile in words.tiles(found())}
    assert tiles["Lowest SQNR"].value == "19.25 dB"
    assert tiles["Lowest SQNR"].name == "layers.10.a.weight"
    assert tiles["Size"] == ("Size", "32.30 kB", ("from 62.90 kB: 51.3% of it",), "")
    assert tiles["Bits per quantized weight"].value == "4.51"
    worst = loss.least(loss.measured(found(weights=(row("a", -math.inf), row("b", NAN)))))
    assert worst is not None and worst[0].name == "a"
    assert loss.least([]) is None


def test_a_checkpoint_without_a_source_has_no_loss_to_tell_of():
    alone = found(source=None, weights=(), errors={}, checks=(Check("a", 1, True),))
    text = Page(page(alone)).all_text
    assert "not measured no source was named" in text
    assert "1 check by itself, without a source" in text
    assert "Layers and kinds" not in text and "Largest errors" not in text


def test_a_sample_is_said_to_be_one():
    told = words.scope(found(sample={"share": 0.05, "seed": 0, "tensors": ["a", "b", "c"]}))
    assert told.endswith("; numbers of a sample: 3 of 12 tensors")
    assert "sample" not in words.scope(found())


def test_blocks_that_stand_out_come_first_and_say_where():
    high = WorstBlock((3, 128, 256), (128, 128), 2.0, 0.5, 9.0, 1234.5)
    rows = (row("a"), row("b", worst_block=high), row("c", worst_block=None))
    blocks = words.blocks(found(weights=rows))
    assert [block.name for block in blocks] == ["b", "a"]
    dash = "\N{EN DASH}"
    assert blocks[0][1:] == (
        f"matrix 3, rows 128{dash}255, columns 256{dash}383", "1,234.5\u00d7", "50.0%", "9",
    )  # fmt: skip
    assert blocks[1].where == f"row 1, columns 16{dash}31"


@pytest.mark.parametrize(
    ("part", "text"),
    [(None, ""), (0.0, "0.00%"), (1.0, "100%"), (0.598, "59.8%"), (0.0954, "9.54%"),
     (0.00001234, "0.00123%"), (1e-12, "0.000000%"), (12.5, "1250%"), (math.inf, "inf%")],
)  # fmt: skip
def test_per_cent_have_three_digits(part, text):
    assert words.percent(part) == text
