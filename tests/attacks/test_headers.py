"""F12: mutated headers, held against the safetensors library: nothing is taken that it refuses, and
what both take means the same to both.

`FAULTS=all` (make faults) tries a million. What was found is kept in `FOUND`, and in `found/`,
whose names say how each ends, what a fuzzer found that went by coverage (fuzz.py).
"""

import random
from collections import Counter
from pathlib import Path

import pytest

from tests.attacks.against import SECONDS, verdict
from tests.attacks.mutation import mutated, with_length
from tests.faults.shim import LONG
from tests.faults.spread import spread

MUTATIONS = 1_000_000 if LONG else 10_000
BATCHES = 20

ONE = b'"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}'
FOUND = {  # JSON, bytes after it, how it ends
    "a tab before it": (b"\t{}", 0, "refused on purpose"),
    "the last of two counts": (b"{%b,%b}" % (ONE, ONE), 2, "refused on purpose"),
    "metadata null": (b'{"__metadata__":null,%b}' % ONE, 2, "both take"),
    "a shape with a zero that would overflow": (
        ONE.replace(b"[2]", b"[0,9223372036854775807,4]")
        .replace(b"[0,2]", b"[0,0]")
        .join((b"{", b"}")),
        0,
        "refused on purpose",
    ),
    "minus zero": (b"{%b}" % ONE.replace(b"[0,2]", b"[-0,2]"), 2, "both refuse"),
    "one byte more": (b"{%b}" % ONE, 3, "both refuse"),
}


def test_f12_mutated_headers(tmp_path):
    def case(number, _):
        draw = random.Random(f"headers {number}")
        counts, slowest = Counter(), 0.0
        for _ in range(MUTATIONS // BATCHES):
            how, seconds, _ = verdict(mutated(draw))
            counts[how] += 1
            slowest = max(slowest, seconds)
        return counts, slowest

    results = spread(case, range(BATCHES), tmp_path)
    counts = sum((counts for counts, _ in results), Counter())
    slowest = max(seconds for _, seconds in results)
    print(f"F12: {sum(counts.values())} headers, {dict(counts)}, slowest {1000 * slowest:.1f} ms")
    assert sum(counts.values()) == MUTATIONS
    assert min(counts.values()) > MUTATIONS // 5000 and len(counts) == 3
    assert slowest < SECONDS


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_before(name):
    text, size, how = FOUND[name]
    assert verdict(with_length(text, size))[0] == how


def test_what_the_fuzzer_found():
    kept = sorted((Path(__file__).parent / "found").glob("*.safetensors"))
    for path in kept:
        how = verdict(path.read_bytes())[0]
        assert path.name.startswith(how.replace(" ", "-")), path.name
    assert len(kept) > 25


def test_a_flawless_header_is_taken():
    assert verdict(with_length(b"{%b}" % ONE, 2))[0] == "both take"
