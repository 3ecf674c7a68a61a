"""F11: outputs cut off, added to, mixed up or zeroed, and stages that another run left."""

import os
import random

import pytest

from tests.faults.commands import COMMANDS, content, names_in
from tests.faults.shim import LONG, kill, run
from tests.faults.spread import spread
from tests.faults.test_flipped import copy, spans, verify

TIMES = 100 if LONG else 22  # of each kind
STAGES = 100 if LONG else 12
PAGE = 4096


def file_of(output, draw):
    """Return one of the files of an output that hold tensors."""
    return output if output.is_file() else draw.choice(sorted(output.glob("*.safetensors")))


def truncated(file, draw):
    os.truncate(file, draw.randrange(file.stat().st_size))
    return set()


def appended(file, draw):
    with open(file, "ab") as end:
        end.write(draw.randbytes(draw.choice((1, 8, 4096))))
    return set()


def swapped(file, draw):
    """Let two tensors of one size have each other's bytes."""
    raw = bytearray(file.read_bytes())
    places, _ = spans(file)
    pairs = [
        (one, other)
        for one, (a, b) in places.items()
        for other, (c, d) in places.items()
        if one < other and b - a == d - c and raw[a:b] != raw[c:d]
    ]
    one, other = draw.choice(pairs)
    (a, b), (c, d) = places[one], places[other]
    raw[a:b], raw[c:d] = raw[c:d], raw[a:b]
    file.write_bytes(raw)
    return {one, other}


def zeroed(file, draw):
    """Lose a page; return the tensors that had something in it."""
    raw = bytearray(file.read_bytes())
    pages = [at for at in range(0, len(raw), PAGE) if any(raw[at : at + PAGE])]
    page = draw.choice(pages)
    places, base = spans(file)
    lost = {n for n, (a, b) in places.items() if any(raw[max(a, page) : min(b, page + PAGE)])}
    raw[page : page + PAGE] = bytes(len(raw[page : page + PAGE]))
    file.write_bytes(raw)
    return lost if page >= base else set()


@pytest.mark.parametrize("damage", (truncated, appended, swapped, zeroed), ids=lambda x: x.__name__)
def test_f11_what_was_damaged_is_named(damage, models, tmp_path):
    def case(number, place):
        draw = random.Random(f"{damage.__name__} {number}")
        output = copy((models.quantized, models.quantized_alone)[number % 2], place)
        file = file_of(output, draw)
        if damage is swapped and output.is_dir():
            file = sorted(output.glob("*.safetensors"))[0]  # q, k and v have one shape
        lost = damage(file, draw)
        code, said = verify(output)
        assert code == 1, (number, damage.__name__)
        wrong = [x for x in said["problems"] if x["severity"] == "fail"]
        named = {x["tensor"] for x in wrong if file.name in x["file"] + x["message"]}
        assert named and lost <= named, (lost, wrong)
        return len(lost)

    lost = spread(case, range(TIMES), tmp_path)
    print(f"F11 {damage.__name__}: {len(lost)} times, all found, {sum(lost)} tensors named")
    assert len(lost) == TIMES and (sum(lost) > 0) == (damage in (swapped, zeroed))


def test_f11_a_stage_of_another_recipe_is_not_gone_on_with(models, tmp_path, expected):
    def case(number, place):
        command = COMMANDS[number % len(COMMANDS)]
        words, where = command.words(models, place)
        whole = expected(command)
        at = random.Random(number).randrange(whole.calls // 3, whole.calls - 4)
        partial, journal = (place / f".{where.name}.{x}" for x in ("partial", "journal"))
        if number % 3:  # a journal of this plan beside the stage of the other
            assert run(place, words, at, kill).code < 0
            kept = journal.read_bytes() if journal.exists() else b""
        other, _ = command.words(models, place, *command.otherwise)
        run(place, other, at, kill)
        if where.exists():  # it makes fewer calls, and had published
            assert content(where) == whole.other
            return False
        if number % 3 and kept:
            journal.write_bytes(kept)
        left = partial.exists()
        again = run(place, words)
        assert again.code == 0, again.err
        assert content(where) == whole.content, (number, at)
        assert names_in(place) == [where.name]
        return left

    left = spread(case, range(STAGES), tmp_path)
    print(f"F11 stale: {sum(left)} stages of another recipe, none gone on with")
    assert sum(left) > STAGES // 2
