"""Fuzz the reader of headers with what it covers to go by (atheris, libFuzzer):

    python -m tests.attacks.fuzz SECONDS

Inputs are whole files, mutated by libFuzzer and by `mutation`, and held against the safetensors
library. What breaks a rule is kept in `tests/attacks/found/`, for `test_headers.py` to try ever
after; so is one input, the shortest, for each way in which a file ended that was not there yet.
`make fuzz` installs atheris and runs this. It needs Python below 3.13.
"""

import json
import os
import random
import re
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["lowbitcli"]):
    from tests.attacks.against import SECONDS, verdict
from tests.attacks.mutation import WORDS, mutated

FOUND = Path(__file__).parent / "found"
LARGEST = 4096  # bytes of an input
_SAID = re.compile(r"\".*\"|(?<=unknown dtype ).*|for [A-Z].*|[A-Z0-9_]+ \[.*\]|-?[0-9]+")


def way(how, message):
    """Return the kind of an end: what was said, without names and numbers."""
    return how, _SAID.sub("?", message.partition("x: ")[2])[:80]


class Fuzzer:
    """Counts inputs by how they end."""

    def __init__(self, told):
        self.counts = {"both refuse": 0, "refused on purpose": 0, "both take": 0}
        self.slowest, self.told = 0.0, told

    def one(self, blob):
        how, seconds, _ = verdict(blob)
        self.slowest = max(self.slowest, seconds)
        assert seconds < SECONDS, (seconds, blob)
        self.counts[how] += 1
        if sum(self.counts.values()) % 10_000 == 0:  # libFuzzer ends without a word
            self.told.write_text(json.dumps([self.counts, self.slowest]))


def keep(corpus):
    """Write the shortest input of each way to end that `FOUND` has not; return how many."""
    known = {way(*verdict(path.read_bytes())[::2]) for path in FOUND.glob("*.safetensors")}
    new = {}
    for path in sorted(corpus.iterdir(), key=lambda path: (path.stat().st_size, path.name)):
        kind = way(*verdict(path.read_bytes())[::2])
        if kind not in known:
            known.add(kind)
            new[kind] = path.read_bytes()
    for (how, said), blob in new.items():
        words = re.sub(r"[^a-z]+", "-", f"{how}-{said}".lower()).strip("-")[:70].strip("-")
        number = sum(1 for _ in FOUND.glob(f"{words}*"))
        (FOUND / f"{words}{number or ''}.safetensors").write_bytes(blob)
    return len(new)


def mutate(blob, largest, seed):
    """Mutate a file: as bytes, in its JSON with the length kept right, or make another."""
    draw = random.Random(seed)
    choice = draw.random()
    if choice < 0.25:
        return mutated(draw)[:largest]
    if choice < 0.5 or len(blob) < 10:
        return atheris.Mutate(blob, largest)
    length = min(int.from_bytes(blob[:8], "little"), len(blob) - 8)
    text, rest = blob[8 : 8 + length], blob[8 + length :]
    if choice < 0.9:
        text = atheris.Mutate(text, max(1, largest - 8 - len(rest)))
    else:
        at = draw.randrange(len(text) + 1)
        text = text[:at] + draw.choice(WORDS) + text[at:]
    if draw.random() < 0.5:
        rest = bytes(int(_last(text, len(rest))))
    return (len(text).to_bytes(8, "little") + text + rest)[:largest]


def _last(text, otherwise):
    """Return where the last tensor of a header ends."""
    try:
        stops = [x["data_offsets"][1] for k, x in json.loads(text).items() if k != "__metadata__"]
        return (
            min(max(stops, default=0), LARGEST)
            if all(0 <= int(x) == x for x in stops)
            else otherwise
        )
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return otherwise


def fuzz(seconds, corpus, told):
    fuzzer = Fuzzer(told)
    atheris.Setup(
        [
            sys.argv[0],
            f"-max_len={LARGEST}",
            f"-artifact_prefix={FOUND}/",
            "-rss_limit_mb=4096",
            f"-max_total_time={seconds}",
            str(corpus),
            str(FOUND),
        ],
        fuzzer.one,
        custom_mutator=mutate,
    )
    atheris.Fuzz()


def main(seconds, corpus):
    corpus.mkdir(exist_ok=True, parents=True)
    FOUND.mkdir(exist_ok=True)
    told = corpus.with_suffix(".json")
    child = os.fork()
    if not child:
        fuzz(seconds, corpus, told)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    counts, slowest = json.loads(told.read_text())
    print(
        f"F12 fuzzed for {seconds} s: {sum(counts.values())} inputs, {counts}, "
        f"slowest {1000 * slowest:.1f} ms; {keep(corpus)} new ways to end are kept"
    )
    return status


if __name__ == "__main__":
    given = dict(enumerate(sys.argv))
    sys.exit(main(int(given.get(1, 3600)), Path(given.get(2, ".fuzz"))))
