"""Tensors on paper: sizes, and names that a terminal cannot obey."""

import unicodedata

import pytest

from lowbitcli.tensors import TensorSpec, nbytes, safe

OBEYED = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def test_nothing_that_a_terminal_obeys_gets_through():
    for code in range(0x110000):
        character = chr(code)
        if unicodedata.category(character) in OBEYED and safe(character) == character:
            # Visible signs of single scripts, which Unicode counts as format characters.
            assert code in {
                *range(0x600, 0x606),
                0x6DD,
                0x70F,
                0x890,
                0x891,
                0x8E2,
                0x110BD,
                0x110CD,
            } or (
                0x13430 <= code <= 0x1343F
                or 0x1BCA0 <= code <= 0x1BCA3
                or 0x1D173 <= code <= 0x1D17A
            ), hex(code)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("model.layers.0.weight", "model.layers.0.weight"),
        ("[red]\u00fc\u6f22", "[red]\u00fc\u6f22"),
        ("\x1b[31m\x7f\x9b", "\\x1b[31m\\x7f\\x9b"),
        ("a\u202eb\u200b\ufeff\u2066", "a\\u202eb\\u200b\\ufeff\\u2066"),
        ("\ud800\U000e0041", "\\ud800\\U000e0041"),
    ],
)
def test_names_are_shown_whole_and_escaped(name, shown):
    assert safe(name) == shown


def test_sizes_are_whole_bytes():
    assert TensorSpec("a", "F4", (3, 2)).nbytes == 3
    assert nbytes("BF16", ()) == 2
    with pytest.raises(ValueError, match="whole number of bytes"):
        nbytes("F4", (3,))
