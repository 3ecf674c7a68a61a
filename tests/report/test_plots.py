"""Pictures: bars and ranges are where the numbers are, in their box, and said in words too."""

import re

import pytest

from lowbitcli.report import plots
from lowbitcli.report.page import page
from lowbitcli.report.plots import BARS, HEIGHT, WIDTH, errors, power, scales
from lowbitcli.verify import Histogram
from tests.report.made import COUNTS, Page, found, row

LIMITS = ["448, the largest E4M3", "fewer digits below", "the least"]


def numbers(path: str) -> list[float]:
    return [float(x) for x in re.findall(r"-?\d+\.?\d*", path)]


def heights(path: str) -> list[float]:
    return [float(x) for x in re.findall(r"v-(\d+\.\d)h", path)]


def test_a_bar_is_as_high_as_its_share_of_the_highest():
    (one,) = errors(found())
    assert heights(one.inside) == [round(HEIGHT * count / 16, 1) for count in COUNTS[1:-1]]
    assert heights(one.outside) == [0.0, round(HEIGHT * 2 / 16, 1)]
    lefts = [float(x) for x in re.findall(r"M(\d+\.\d) ", one.outside[:9] + one.inside)]
    assert lefts == sorted(lefts) and lefts[0] >= 0 and lefts[-1] < WIDTH
    assert (one.scheme, one.half_gap, one.top) == ("nvfp4", "1 step", f"{16 / sum(COUNTS):.1%}")


def test_a_histogram_is_told_in_words_and_numbers():
    (one,) = errors(found())
    quarter = sum(COUNTS[13:21])
    assert one.told.startswith(f"{quarter / sum(COUNTS):.1%} of {sum(COUNTS):,} elements are off")
    assert one.told.endswith(f"{2 / sum(COUNTS):.2%} by more than it: they were clipped.")
    assert [int(count) for _, _, count in one.rows] == list(COUNTS)
    assert one.rows[0][:2] == ("", "-1") and one.rows[-1][:2] == ("+1", "")
    assert one.rows[17][:2] == ("+0", "+0.0625")
    assert Page(page(found())).all_text.count("+0.0625") == 2


def test_one_element_among_many_can_be_seen():
    counts = (1, *[0] * 15, 10**9, *[0] * 17)
    (one,) = errors(found(errors={"fp8_channel": Histogram(16.0, counts)}))
    assert heights(one.outside) == [1.0, 0.0]
    assert one.half_gap == "16 steps"


def test_nothing_in_it_no_histogram():
    assert errors(found(errors={"nvfp4": Histogram(1.0, (0,) * 34)})) == []


def test_a_range_goes_from_the_least_scale_to_the_largest():
    rows = [
        row("l.10.a", scale_least=1.0, scale_most=2.0),
        row("l.9.a", scale_least=2.0**-9, scale_most=448.0),
        row("l.1.a", scale_least=None, scale_most=None),
        row("l.1.b", scheme="mxfp8", scale_least=2.0**-12, scale_most=2.0**-3),
    ]
    mx, nv = scales(found(weights=tuple(rows)))
    assert (mx.scheme, nv.scheme) == ("mxfp8", "nvfp4")
    nine, ten = re.findall(r"M(\S+) (\S+)V(\S+?)(?=M|$)", nv.bars)
    assert float(nine[0]) < float(ten[0])
    assert float(nine[1]) < float(ten[1]) < float(ten[2]) < float(nine[2])
    assert [text for _, text in nv.limits] == LIMITS and mx.limits == ()
    assert nv.told == "2 weights; scales from 0.001953 to 448"
    for plot in (mx, nv):
        assert all(0 <= y <= HEIGHT for y, _ in (*plot.lines, *plot.limits))
        assert 2 <= len(plot.lines) <= 8


@pytest.mark.parametrize(("least", "most"), [(1.0, 1.0), (2.0**-127, 2.0**127), (1e-30, 1e-30)])
def test_a_range_of_any_size_stays_in_its_box(least, most):
    (one,) = scales(
        found(weights=(row("a", scheme="fp8_tensor", scale_least=least, scale_most=most),))
    )
    x, top, bottom = numbers(one.bars)
    assert 0 <= x <= WIDTH and -1 <= top < bottom <= HEIGHT + 1


def test_more_weights_than_bars_are_drawn_together():
    rows = [row(f"l.{n}.a", scale_least=0.5 if n == 7 else 8.0) for n in range(3 * BARS)]
    (one,) = scales(found(weights=tuple(rows)))
    bars = re.findall(r"V(\d+\.\d)", one.bars)
    assert len(bars) == BARS
    assert max(map(float, bars)) == float(bars[2])


def test_no_scheme_is_needed_to_draw_it():
    (one,) = scales(found(weights=(row("a", scheme="of another world"),)))
    assert one.limits == () and one.scheme == "of another world"
    assert plots.power(-12) == power(-12) == "2\u207b\u00b9\u00b2"
