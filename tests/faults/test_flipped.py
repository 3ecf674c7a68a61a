"""F10: one bit of an output is flipped, and `verify` says which file it is in, and which tensor.

A flipped bit in a journal is for the run that goes on with it to find.
"""

import io
import json
import random
import shutil
from contextlib import redirect_stderr, redirect_stdout

import pytest

from lowbitcli import program
from lowbitcli.cli import app
from tests import checkpoints
from tests.faults.commands import COMMANDS, content, names_in
from tests.faults.shim import LONG, kill, run
from tests.faults.spread import spread

FLIPS = 250 if LONG else 25  # of each kind
MANIFEST = "lowbit.json"
WORDS = {
    "index": ("the index",),
    "config": ("quantization_config", "its config"),
}  # that name a file too
PLACES = ("header", "data", "scale", "kept", "manifest", "index", "config", "header alone", "alone")


def verify(path):
    """Run `lowbit verify` in this process; return its exit code and its document."""
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(io.StringIO()):
        code = program.run(app, ["verify", str(path), "--device", "cpu", "--json"])
    return code, json.loads(out.getvalue())


def spans(path):
    """Return where each tensor of a file lies in it, and the length of the header."""
    raw = path.read_bytes()
    base = 8 + int.from_bytes(raw[:8], "little")
    found = {
        name: tuple(base + at for at in entry["data_offsets"])
        for name, entry in checkpoints.header_of(path).items()
        if name != "__metadata__"
    }
    return found, base


def target(where, models, draw):
    """Return a file, the bytes of it to choose from, and the tensor that they belong to."""
    if where in ("header alone", "alone"):
        file = models.quantized_alone
    elif where == "manifest":
        file = models.quantized / MANIFEST
    elif where == "index":
        file = models.quantized / checkpoints.INDEX
    elif where == "config":
        file = models.quantized / "config.json"
    else:
        file = draw.choice(sorted(models.quantized.glob("*.safetensors")))
    if file.suffix == ".json":
        return file, (0, file.stat().st_size), ""
    tensors, base = spans(file)
    if where.startswith("header"):
        return file, (0, base), ""
    kinds = {
        "data": lambda name: name.endswith("packed"),
        "scale": lambda name: "scale" in name,
        "kept": lambda name: name.endswith("weight"),
        "alone": lambda name: True,
    }
    while True:
        names = [name for name, (a, b) in tensors.items() if b > a and kinds[where](name)]
        if names:
            name = draw.choice(names)
            return file, tensors[name], name
        file = draw.choice(sorted(models.quantized.glob("*.safetensors")))
        tensors, base = spans(file)


def flip(path, at, bit):
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << bit)]))


def copy(source, place):
    where = place / source.name
    (shutil.copytree if source.is_dir() else shutil.copy)(source, where)
    return where


@pytest.mark.parametrize("where", PLACES)
def test_f10_verify_names_the_file_and_the_tensor(where, models, tmp_path):
    for path in (models.quantized, models.quantized_alone):
        assert verify(path)[0] == 0

    def case(number, place):
        draw = random.Random(f"{where} {number}")
        file, (start, stop), tensor = target(where, models, draw)
        root = models.quantized if file.parent == models.quantized else file
        output = copy(root, place)
        at, bit = draw.randrange(start, stop), draw.randrange(8)
        flip(output / file.name if output.is_dir() else output, at, bit)
        code, said = verify(output)
        assert code == 1 or where == "config", f"missed: bit {bit} of byte {at} of {file.name}"
        # People edit a config, so what differs there is a warning and no failure.
        wrong = [x for x in said["problems"] if x["severity"] == "fail" or where == "config"]
        names = (file.name, *WORDS.get(where, ()))
        named = [x for x in wrong if any(y in x["file"] + x["message"] for y in names)]
        if not output.is_dir():  # there is one file only
            named = wrong
        assert named, f"bit {bit} of byte {at} of {file.name}: {wrong}"
        if tensor:
            assert tensor in [x["tensor"] for x in named], (tensor, named)
        return said["container"] == ""

    refused = spread(case, range(FLIPS), tmp_path)
    print(f"F10 {where}: {len(refused)} bits, all found, {sum(refused)} made it unreadable")
    assert len(refused) == FLIPS


def test_f10_a_run_does_not_believe_its_journal(models, tmp_path, expected):
    flips = FLIPS

    def case(number, place):
        command = COMMANDS[number % len(COMMANDS)]
        words, where = command.words(models, place)
        whole = expected(command)
        done = run(place, words, whole.calls - 8 if where.suffix else whole.calls // 2, kill)
        assert done.code < 0
        journal = place / f".{where.name}.journal"
        draw = random.Random(number)
        before = len(journal.read_bytes().splitlines())
        flip(journal, draw.randrange(journal.stat().st_size), draw.randrange(8))
        again = run(place, words)
        assert again.code == 0, again.err
        assert content(where) == whole.content and names_in(place) == [where.name]
        resumed = json.loads(again.out)["resumed"]
        assert resumed < before - 1 or before == 1
        return before > 1

    lines = spread(case, range(flips), tmp_path)
    print(f"F10 journal: {len(lines)} bits, {sum(lines)} of them where there was work to believe")
    assert sum(lines) > FLIPS // 2
