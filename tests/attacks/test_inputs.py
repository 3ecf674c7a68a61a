"""F13: what is read beside a checkpoint, made wrong: importance files and scales of activations, by
`plan` and `quantize`: an error or a plan, and nothing left of a run that was refused.
"""

import json
import os
import random
import shutil
from collections import Counter

import torch

from tests import checkpoints
from tests.attacks import documents
from tests.attacks.models import plain
from tests.attacks.test_documents import lowbit, problem
from tests.checkpoints import LAYER
from tests.faults.shim import LONG, warm
from tests.faults.spread import spread

CASES, BATCHES = (4_000 if LONG else 80), 8
MODULES = [f"{LAYER}self_attn.{name}_proj" for name in "qkv"]
NUMBERS = (
    "NaN",
    "Infinity",
    "-1",
    "0",
    "1e-46",
    "1e39",
    "1e999",
    '"1"',
    "[1]",
    "null",
    "true",
    "{}",
)


def importance(path):
    exponents = {name: torch.zeros(64, dtype=torch.int8) for name in MODULES}
    checkpoints.write(path, exponents, {"lowbit.importance": "1", "tokens": "9"})


def scales(path):
    checkpoints.write(path, {f"{name}.input_amax": torch.ones(1) for name in MODULES})


def scales_json(path):
    path.write_text(json.dumps({f"{name}.input_amax": 2.0 for name in MODULES}))


FILES = (
    ("--importance", "stats.safetensors", importance, "nvfp4-best"),
    ("--activation-scales", "scales.safetensors", scales, "fp8"),
    ("--activation-scales", "scales.json", scales_json, "fp8"),
)


def spoil(path, draw):
    """Make a file wrong; return what was done."""
    kind = draw.randrange(5)
    if kind == 0:
        data = bytearray(path.read_bytes())
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        path.write_bytes(data[: draw.choice((len(data), draw.randrange(len(data))))])
        return "bytes"
    if kind == 1:
        path.unlink()
        said = draw.choice(("gone", "a folder", "a pipe", "a link"))
        if said == "a folder":
            path.mkdir()
        elif said == "a pipe":
            os.mkfifo(path)
        elif said == "a link":
            path.symlink_to(path.name)
        return said
    if path.suffix == ".json":
        if kind == 2:
            path.write_bytes(documents.TEXTS[said := draw.choice(sorted(documents.TEXTS))])
            return said
        if kind == 3:
            path.write_text(path.read_text().replace("2.0", said := draw.choice(NUMBERS), 1))
            return said
        document = json.loads(path.read_text())
        said = documents.changed(document, draw)
        documents.write_json(path, document)
        return said
    change = documents.in_metadata if kind == 2 else documents.in_tensors
    return change(path, draw)


def test_f13_files_beside_a_checkpoint_made_wrong(tmp_path):
    source = plain(tmp_path)
    warm(source)

    def case(number, place):
        draw, counts = random.Random(f"inputs {number}"), Counter()
        for _ in range(CASES // BATCHES):
            option, name, make, recipe = draw.choice(FILES)
            make(place / name)
            said = spoil(place / name, draw)
            before = set(os.listdir(place))
            words = ["--recipe", recipe, option, place / name, "-o", place / "out"]
            command = draw.choice(("plan", "quantize"))
            words += ["--device", "cpu"] if command == "quantize" else []
            told = lowbit(command, source, *words)
            wrong = problem(command, told, place, before)
            assert not wrong, f"{name}, {said}\n{command}: {wrong}\n{told.err[-2500:]}"
            counts[told.code] += 1
            for path in list(place.iterdir()):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        return counts

    counts = sum(spread(case, range(BATCHES), tmp_path), Counter())
    print(f"F13: {sum(counts.values())} importance files and scales made wrong, {dict(counts)}")
    assert sum(counts.values()) == CASES and counts[4] > CASES // 4
