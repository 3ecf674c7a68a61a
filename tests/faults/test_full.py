"""F8: a file system that is full at a part of what is needed, and a limit on the size of a file."""

import os
import resource
from types import SimpleNamespace

import pytest

from tests import checkpoints
from tests.checkpoints import LAYER, weight
from tests.faults.commands import COMMANDS, Models, content, names_in, undisturbed
from tests.faults.mounts import isolate, small_disk
from tests.faults.shim import run
from tests.faults.spread import spread

PARTS = (0.01, 0.1, 0.5, 0.99)
PAGE = 4096
EARLY = 14  # calls: the lock, the journal, the stage and their removal; a whole run makes 20


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Return models of a few hundred kilobytes, so that 1 % is more than a page."""
    root = tmp_path_factory.mktemp("large")
    tensors = {
        f"{LAYER}mlp.{x}_proj.weight": weight(512, 1024, seed=ord(x[0])) for x in ("up", "down")
    }
    source = checkpoints.single(root / "source", tensors)
    (source / "tokenizer.json").write_text("x" * 50_000)
    alone = checkpoints.write(root / "alone.safetensors", tensors)
    for path, made in ((source, "made"), (alone, "made.safetensors")):
        assert run(root, ["quantize", path, "-o", root / made, "--device", "cpu"]).code == 0
    return Models(source, alone, root / "made", root / "made.safetensors")


def taken(where):
    """Return the bytes of an output, which are fewer than a disk gives to its files."""
    files = [path for path in where.rglob("*") if path.is_file()] if where.is_dir() else [where]
    return sum(path.stat().st_size for path in files)


def no_room(free):
    """Return what lets a child believe that so many bytes are free."""

    def prepare():
        os.statvfs = lambda _: SimpleNamespace(f_bavail=free // PAGE, f_frsize=PAGE)

    return prepare


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_f8_the_disk_is_too_small(command, large, tmp_path):
    folder = tmp_path / "undisturbed"
    folder.mkdir()
    whole = undisturbed(command, large, folder).content
    again = tmp_path / "again"
    again.mkdir()
    words, where = command.words(large, again)
    assert run(again, words).code == 0
    need = taken(where)

    def case(part, place):
        words, where = command.words(large, place)
        size = int(need * part) // PAGE * PAGE
        with small_disk(place, size) if isolate() else small_disk(place / "no", size) as real:
            done = run(place, words, prepare=None if real else no_room(size))
            assert done.code == 5, (part, done.code, done.err)
            first = done.err.splitlines()[0]
            assert "need" in first and "free" in first and str(place) in first, first
            assert "hint: free some space or write elsewhere" in done.err
            assert names_in(place) == [], part
            assert done.calls < EARLY, f"{part}: found only at call {done.calls}: {first}"
        again = run(place, words)
        assert again.code == 0 and content(where) == whole, part
        return real

    real = spread(case, PARTS, tmp_path)
    print(f"F8 {command}: {len(real)} times, {sum(real)} of them on a file system of that size")
    assert len(real) == len(PARTS)


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_f8_a_file_may_not_be_that_large(command, large, tmp_path):
    folder = tmp_path / "undisturbed"
    folder.mkdir()
    whole = undisturbed(command, large, folder)
    _, where = command.words(large, folder)
    files = list(where.glob("*.safetensors")) if where.is_dir() else [where]
    largest = max(path.stat().st_size for path in files)

    def case(part, place):
        words, where = command.words(large, place)
        limit = int(largest / 2 * part)  # the other output is twice as large, or half

        def prepare():
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        done = run(place, words, prepare=prepare)
        assert done.code == 5, (part, done.code, done.err)
        assert "File too large" in done.err and "ulimit -f" in done.err
        assert names_in(place) == [], part
        assert done.calls < EARLY, f"{part}: found only at call {done.calls}"
        assert run(place, words).code == 0 and content(where) == whole.content, part
        return True

    print(f"F8 {command}: {sum(spread(case, PARTS[1:], tmp_path))} limits on the size of a file")
