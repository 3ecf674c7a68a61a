"""The bar on a terminal, the lines elsewhere, and nothing where quiet is asked for."""

import sys
import textwrap

import pexpect
import pytest

from lowbitcli import progress

HOSTILE = "\x1b]0;owned\x07[/red]\u202e\x9b31m\nname"

SCRIPT = textwrap.dedent(
    """
    import time
    from lowbitcli.progress import show_progress
    with show_progress("quantizing") as progress:
        for done in range(5):
            progress(done * 10**9, 4 * 10**9, {name!r})
            time.sleep(0.15)
    print("finished")
    """
)


def on_a_terminal(name, environment=()):
    """Return all that a run of the bar sends to a terminal of 24 rows and 120 columns."""
    child = pexpect.spawn(
        sys.executable,
        ["-c", SCRIPT.format(name=name)],
        env={"PATH": "/usr/bin:/bin", "TERM": "xterm-256color", **dict(environment)},
        dimensions=(24, 120),
        timeout=60,
    )
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    return child.before.decode()


def test_a_terminal_gets_one_bar_that_goes_away():
    shown = on_a_terminal("model.layers.0.mlp.down_proj.weight")
    for word in ("quantizing", "2.0 GB of 4.0 GB", "GB/s", "model.layers.0.mlp.down_proj.weight"):
        assert word in shown
    last = shown.rstrip().rsplit("\r\n", 1)[-1]
    assert "\x1b[1A\x1b[2K" in last and last.endswith("finished")
    # Each picture is drawn over the one before: the cursor never moves on to a second line.
    assert "\r\n" not in shown.split("4.0 GB of 4.0 GB")[0]
    assert "\x1b[2K" in shown


def test_no_color_means_no_color():
    plain = on_a_terminal("a", {"NO_COLOR": "1"}.items())
    coloured = on_a_terminal("a")
    assert "\x1b[38;" in coloured or "\x1b[3" in coloured
    assert "\x1b[38;" not in plain
    assert "\x1b[3" not in plain
    assert "GB/s" in plain


def test_a_dumb_terminal_gets_no_bar():
    assert on_a_terminal("a", {"TERM": "dumb"}.items()) == "finished\r\n"


def test_a_hostile_name_does_nothing_to_the_terminal():
    shown = on_a_terminal(HOSTILE)
    for sequence in ("\x1b]0;", "\x07", "\u202e", "\x9b"):
        assert sequence not in shown
    assert "\\x1b]0;owned\\x07[/red]\\u202e\\x9b31m\\x0aname" in shown


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_a_log_gets_a_line_each_ten_seconds(capsys):
    clock = Clock()
    lines = progress._Lines("quantizing", clock)
    with lines as show:
        for second in range(0, 26):
            clock.now = 100.0 + second
            show(second * 10**8, 4 * 10**9, "layer\x1b[2J")
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "quantizing: 1.0 GB of 4.0 GB, 0.10 GB/s, 30 s left: layer\\x1b[2J\n"
        "quantizing: 2.0 GB of 4.0 GB, 0.10 GB/s, 20 s left: layer\\x1b[2J\n"
    )


def test_the_time_left_is_not_known_before_anything_is_done(capsys):
    clock = Clock()
    with progress._Lines("verifying", clock) as show:
        clock.now += 11
        show(0, 4 * 10**9, "")
    assert capsys.readouterr().err == (
        "verifying: 0 bytes of 4.0 GB, 0.00 GB/s, unknown time left: \n"
    )


def test_quiet_means_none():
    with progress.show_progress("quantizing", quiet=True) as show:
        assert show is None


def test_without_a_terminal_there_are_lines():
    assert isinstance(progress.show_progress("quantizing"), progress._Lines)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (59.4, "59 s"), (59.6, "1 min 0 s"),
     (3599, "59 min 59 s"), (3600, "1 h 0 min"), (90061, "25 h 1 min")],
)  # fmt: skip
def test_durations(seconds, text):
    assert progress.duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 kB"), (90_856_960, "90.9 MB"),
     (1_234_567_890, "1.2 GB"), (7 * 10**12, "7.0 TB")],
)  # fmt: skip
def test_sizes(count, text):
    assert progress.size(count) == text
