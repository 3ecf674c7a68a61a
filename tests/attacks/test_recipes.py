"""F14: recipes made wrong, and patterns made to be slow: an error with file, line and column and
exit code 3, or a recipe that works; in a second.

`FAULTS=all` (make faults) tries tens of thousands.
"""

import random
import re
import time
from collections import Counter
from pathlib import Path

from lowbitcli.errors import RecipeError
from lowbitcli.recipe import load
from lowbitcli.regex import MAX_NAME, compile_bounded
from tests.faults.shim import LONG
from tests.faults.spread import spread

SHIPPED = [
    path.read_text() for path in sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
]
RECIPES = 20_000 if LONG else 600
PATTERNS = 50_000 if LONG else 2_000
BATCHES = 20
SECONDS = 1.0  # of processor time
PIECES = (
    *("*", "&a ", "*a", "!!python/object:os.system ", "[", "]", "{", "}", ": ", "- ", "\n", "\t"),
    *("'", '"', "\\", "%TAG ! x\n", "|\n", ">\n", "re:(a+)+$", "re:(", "? ", "#", "1e999", "nan"),
    *("\0", "\ufeff", "\u2028", "\x85", "\x1b[2J", "\U0001f600", "null", "---\n", "...\n", "<<: "),
    *("rules", "match: ", "scheme: ", "keep: true", "extends: nvfp4\n", "x" * 600, "0x10", "yes"),
)
ATOMS = (
    *(
        "a",
        "b",
        ".",
        "[ab]",
        "[^x]",
        "\\w",
        "\\d",
        "\\.",
        "(?:a|b)",
        "(a|aa)",
        "(a|b|ab)",
        "^",
        "$",
    ),
    *("(?=a)", "(?!b)", "(?<=a)", "\\1", "(?P<n>a)", "(?i)", "layers", "()", "|", "\\b", "[z-a]"),
)
REPEATS = ("", "", "", "*", "+", "?", "{2,}", "{1,30}", "*?", "++", "{999}", "{,5}")
SHARING = ("a*", ".*", "a+", "[ab]*", "\\w*", "(?:a|b)*", "a*?")
NAMES = ("a" * MAX_NAME, "ab" * (MAX_NAME // 2), "a" * (MAX_NAME - 1) + "!", "." * MAX_NAME, "")


def spoiled(draw):
    text = draw.choice(SHIPPED)
    for _ in range(draw.randint(1, 4)):
        at, cut = draw.randrange(len(text) + 1), draw.choice((0, 0, 1, 5, 40))
        text = text[:at] + draw.choice(PIECES) * draw.choice((1, 1, 2)) + text[at + cut :]
    return text


def pattern(draw, depth=3):
    if (
        depth == 3 and draw.random() < 0.3
    ):  # repeats that share what they match, and an end that fails
        return "".join(draw.choice(SHARING) for _ in range(draw.randint(2, 9))) + draw.choice("xb$")
    found = ""
    for _ in range(draw.randint(1, 4)):
        atom = draw.choice(ATOMS)
        if depth and draw.random() < 0.4:
            atom = f"({pattern(draw, depth - 1)})"
        found += atom + draw.choice(REPEATS)
    return found


def test_f14_recipes_made_wrong(tmp_path):
    def case(number, place):
        draw = random.Random(f"recipes {number}")
        counts, slowest = Counter(), 0.0
        path = place / "r.yaml"
        for _ in range(RECIPES // BATCHES):
            text = spoiled(draw)
            path.write_bytes(text.encode("utf-8", "surrogatepass"))
            began = time.process_time()
            try:
                load(str(path))
                counts["taken"] += 1
            except RecipeError as error:
                counts["refused"] += 1
                assert error.exit_code == 3
                where = re.search(r".:[0-9]+:[0-9]+: ", error.message)
                assert where, (error.message, text)
            slowest = max(slowest, time.process_time() - began)
        return counts, slowest

    results = spread(case, range(BATCHES), tmp_path)
    counts, slowest = sum((x for x, _ in results), Counter()), max(x for _, x in results)
    print(f"F14: {sum(counts.values())} recipes, {dict(counts)}, slowest {slowest:.2f} s")
    assert sum(counts.values()) == RECIPES and min(counts.values()) > RECIPES // 100
    assert slowest < SECONDS


def test_f14_patterns_made_slow(tmp_path):
    def case(number, _):
        draw = random.Random(f"patterns {number}")
        counts, slowest = Counter(), 0.0
        for _ in range(PATTERNS // BATCHES):
            text = pattern(draw)
            began = time.process_time()
            try:
                found = compile_bounded(text)
            except ValueError:
                counts["refused"] += 1
            else:
                counts["taken"] += 1
                for name in NAMES:
                    found.match(name)
            took = time.process_time() - began
            assert took < SECONDS, (text, took)
            slowest = max(slowest, took)
        return counts, slowest

    results = spread(case, range(BATCHES), tmp_path)
    counts, slowest = sum((x for x, _ in results), Counter()), max(x for _, x in results)
    print(f"F14: {sum(counts.values())} patterns, {dict(counts)}, slowest {slowest:.2f} s")
    assert sum(counts.values()) == PATTERNS and min(counts.values()) > PATTERNS // 20
