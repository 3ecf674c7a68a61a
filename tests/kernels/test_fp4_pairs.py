"""The claim on which the NVFP4 kernel for pairs rests, by enumeration: a product with a reciprocal
in two parts lies on the same side of every tie of E2M1 as the quotient does."""

from fractions import Fraction

import numpy as np

# Ties of E2M1, and whether the code above is the even one, which a tie goes to.
TIES = {0.25: False, 0.75: True, 1.25: False, 1.75: True, 2.5: False, 3.5: True, 5.0: False}
STEPS = np.arange(2**23, 2**24, dtype=np.int64)  # mantissas of a step, as integers
BITS = 11  # of a weight's mantissa: fp16; bf16 has 8 and is contained in it
CLOSE = 4 * 2.0**-48  # more than any error of the product, see below


def rounded(x: Fraction) -> Fraction:
    """Round to fp32, to nearest, ties to even; exponents do not matter here."""
    if x == 0:
        return x
    size = abs(x)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if size < Fraction(2) ** exponent:
        exponent -= 1
    ulp = Fraction(2) ** (exponent - 23)
    return (x / ulp).__round__() * ulp


def edges(tie: float) -> list[int]:
    """Return the numbers halfway between a tie and its neighbours, as integers of 25 or 26 bits."""
    mantissa = int(np.frexp(tie)[0] * 2**24)
    below = 4 * mantissa - 1 if mantissa == 2**23 else 2 * mantissa - 1
    return [below, 2 * mantissa + 1]


def close_pairs(tie: float, edge: int) -> list[tuple[Fraction, Fraction]]:
    """Return every (weight, step) whose quotient is within CLOSE of this edge of `tie`."""
    products = STEPS * edge
    lengths = np.floor(np.log2(products.astype(np.float64))).astype(np.int64) + 1
    lengths += products >= (np.int64(1) << lengths)
    lengths -= products < (np.int64(1) << (lengths - 1))
    unit = np.int64(1) << (lengths - BITS)
    rest = products & (unit - 1)
    distance = np.minimum(rest, unit - rest)
    found = []
    for place in np.nonzero(distance / products.astype(np.float64) < CLOSE)[0]:
        product, one = int(products[place]), int(unit[place])
        scale = Fraction(2) ** round(np.log2(edge / tie))
        weight = Fraction((product + one // 2) // one * one, 2**23) / scale
        found.append((weight, Fraction(int(STEPS[place]), 2**23)))
    return found


def above(q: Fraction, tie: float) -> bool:
    return q >= Fraction(tie) if TIES[tie] else q > Fraction(tie)


def product(weight: Fraction, step: Fraction) -> Fraction:
    """Return q as the kernel computes it."""
    r = rounded(1 / step)
    e = rounded(1 - step * r)
    assert e == 1 - step * r  # exact, as the kernel counts on
    first = rounded(e * r)
    rest = rounded(e * first + first)
    return rounded(weight * r + rounded(weight * rest))


def test_no_product_falls_on_the_other_side_of_a_tie():
    """Where no pair is close, the product's error cannot part it from the quotient: that error is
    less than 3 * 2^-48 of it (2^-24 of what e / step is missing, twice, and e is below 2^-24)."""
    pairs = [(tie, *pair) for tie in TIES for edge in edges(tie) for pair in close_pairs(tie, edge)]
    assert [(tie, step) for tie, _, step in pairs] == [(0.25, 2 - Fraction(1, 2**23))]
    for tie, weight, step in pairs:
        assert above(product(weight, step), tie) == above(rounded(weight / step), tie)


def test_the_enumeration_finds_the_pair_that_a_simpler_reciprocal_gets_wrong():
    """With r' = fl(e r) alone the one close pair falls on the wrong side: the search sees it."""
    (weight, step) = close_pairs(0.25, edges(0.25)[1])[0]
    r = rounded(1 / step)
    simple = rounded(weight * r + rounded(weight * rounded((1 - step * r) * r)))
    assert above(simple, 0.25) != above(rounded(weight / step), 0.25)


def test_products_near_random_ties_decide_as_quotients():
    generator = np.random.default_rng(5)
    for _ in range(3000):
        step = Fraction(int(generator.integers(2**23, 2**24)), 2**23)
        tie = list(TIES)[generator.integers(len(TIES))]
        exact = rounded(step * Fraction(tie))
        for weight in (exact, *(exact * (1 + Fraction(n, 2**11)) for n in (-1, 1))):
            weight = Fraction(float(np.float16(float(weight))))
            assert above(product(weight, step), tie) == above(rounded(weight / step), tie)
