"""Random tokens are the same everywhere: the numbers that others' splitmix64 gives."""

import pytest

from lowbitcli.importance.tokens import random_ids, sequences, splitmix64

# The first five numbers of Java's SplittableRandom(0) and of the C of Vigna's page, as 64 bits.
STEP = 0x9E3779B97F4A7C15
KNOWN = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC)


def test_splitmix64():
    assert tuple(splitmix64(STEP * n % 2**64) for n in range(4)) == KNOWN


def test_ids():
    ids = random_ids(1000, 50, 7)
    assert ids == [3 + splitmix64(7 + t) % 47 for t in range(1000)]
    assert set(ids) == set(range(3, 50))
    assert random_ids(5, 50, 8) == random_ids(6, 50, 7)[1:]
    with pytest.raises(ValueError, match="too small"):
        random_ids(1, 3, 0)


def test_sequences():
    assert [len(x) for x in sequences(list(range(600)), 10**6)] == [256, 256, 88]
    assert list(sequences([1, 2, 3], 2)) == [[1, 2], [3]]
