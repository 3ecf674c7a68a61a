"""The tokens that a model is shown: random ones that every library makes alike, or a text's.

    id_t = lo + splitmix64(seed + t) mod (vocabulary - lo)      lo: the special tokens before it

splitmix64: the finalizer of Steele, Lea, Flood, "Fast splittable pseudorandom number generators"
(OOPSLA 2014), of one step from the state seed + t.
"""

from collections.abc import Iterator

LOW = 3  # ids before it are padding, beginning and end, or unknown
MASK = (1 << 64) - 1
SEQUENCE = 256  # tokens that are run one after the other, as one text


def splitmix64(state: int) -> int:
    """Return the number that follows from a state."""
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def random_ids(count: int, vocabulary: int, seed: int) -> list[int]:
    """Return ids of random tokens.

    Raises ValueError for a vocabulary that has nothing but special tokens.
    """
    if vocabulary <= LOW:
        raise ValueError(f"a vocabulary of {vocabulary} tokens is too small")
    return [LOW + splitmix64(seed + t) % (vocabulary - LOW) for t in range(count)]


def sequences(ids: list[int], most: int) -> Iterator[list[int]]:
    """Yield the ids in sequences of at most `most`, which a model may have a limit for."""
    length = min(SEQUENCE, most)
    for start in range(0, len(ids), length):
        yield ids[start : start + length]
