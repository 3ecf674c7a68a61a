"""F13: what checkpoints say of themselves, made wrong, through every command that reads one: one
clear error and exit code 4, or an answer; no traceback, nothing left, nothing opened outside.

`FAULTS=all` (make faults) tries tens of thousands.
"""

import contextlib
import io
import json
import os
import random
import shutil
import sys
import time
from collections import Counter
from dataclasses import dataclass

import pytest

from lowbitcli import program
from lowbitcli.cli import app
from lowbitcli.tensors import safe
from tests import checkpoints
from tests.attacks import documents
from tests.attacks.documents import MUTATIONS
from tests.attacks.models import MODELS
from tests.faults.shim import LONG, warm
from tests.faults.spread import spread

COMMANDS = ("inspect", "plan", "quantize", "dequantize", "verify", "compare")
CASES = 20_000 if LONG else 240
BATCHES = 40
SEVERAL = ("plain", "lowbit", "lowbit file", "diffusers")  # documents, which few others have
SCHEMES = ("fp8", "mxfp8", "nvfp4")
SECONDS = 2.0  # of processor time, for one command
READS, COMPARES = {0, 4}, {0, 1, 4}
PLANS = {0, 2, 3, 4}  # what was asked for does not fit what is left
CODES = dict(zip(COMMANDS, (READS, PLANS, PLANS, READS, COMPARES, COMPARES), strict=True))


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str
    seconds: float
    opened: frozenset[str]


_opened: set[str] = set()
_watching = False


def _watch(event, arguments):
    if _watching and event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
        _opened.add(os.path.abspath(os.fsdecode(arguments[0])))


sys.addaudithook(_watch)


def lowbit(*words):
    """Run the program here; return what it said, and every file that Python opened meanwhile."""
    global _watching
    out, err, began = io.StringIO(), io.StringIO(), time.process_time()
    _opened.clear()
    _watching = True
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = program.run(app, [str(word) for word in words])
    finally:
        _watching = False
    seconds = time.process_time() - began
    return Said(code, out.getvalue(), err.getvalue(), seconds, frozenset(_opened))


def words(command, source, place, right=None, draw=random):
    """Return the words of a command that reads `source`, and writes to `place` if at all."""
    if command == "compare":
        return ["verify", source, "--against", right, "--device", "cpu"]
    given = [command, source]
    if command in ("plan", "quantize"):
        scheme, container = draw.choice(SCHEMES), draw.choice(("auto", "lowbit"))
        given += ["--scheme", scheme, "--container", container]
    if command == "dequantize":
        given += ["--dtype", "fp32"]
    if command in ("quantize", "dequantize"):
        given += ["-o", place / "out", "--device", "cpu"]
    return given


def problem(command, said, place, before):
    """Return what is wrong with how a command took something wrong; "" where nothing is."""
    if said.code not in CODES[command]:
        return f"exit code {said.code}"
    if "Traceback" in said.err:
        return "a traceback"
    lines = said.err.splitlines()
    errors = sum(line.startswith("error: ") for line in lines)
    if command == "inspect" and said.code == 4 and "\nwrong\n" in said.out:
        errors += 1  # it lists all that is wrong
    if errors != (said.code in (2, 3, 4)):
        return f"{errors} errors said, exit code {said.code}"
    if any(safe(line) != line for line in [*lines, *said.out.splitlines()]):
        return "a control character"
    if said.err and max(map(len, lines)) > 4000:
        return "a line that nobody reads"
    if said.seconds > SECONDS:
        return f"{said.seconds:.1f} seconds"
    if said.code == 4 and set(os.listdir(place)) != before:
        return f"left: {sorted(set(os.listdir(place)) - before)}"
    outside = [x for x in said.opened if x.startswith(f"{place}/outside")]
    return f"opened {outside}" if outside else ""


@pytest.fixture(scope="session")
def templates(tmp_path_factory):
    """Return name -> a checkpoint that is right, and what its weights dequantize to."""
    root = tmp_path_factory.mktemp("templates")
    made = {}
    for number, (name, make) in enumerate(MODELS.items()):
        place = root / str(number)
        place.mkdir()
        source = make(place)
        warm(source)
        assert lowbit("inspect", source).code == 0, name
        said = lowbit(*words("dequantize", source, place))
        assert said.code == 0, (name, said.err)
        made[name] = source, place / "out"
    return made


def numbers(output):
    files = sorted(output.rglob("*.safetensors")) if output.is_dir() else [output]
    return {
        f"{file.parent.name}/{name}" if file.parent != output else name: (
            str(tensor.dtype),
            checkpoints.raw(tensor),
        )
        for file in files
        for name, tensor in checkpoints.read(file).items()
    }


def attack(name, templates, place, draw):
    """Make a checkpoint wrong and let a command read it; return how that ended."""
    template, right = templates[name]
    source = place / template.name
    if template.is_dir():
        shutil.copytree(template, source)
    else:
        shutil.copy(template, source)
    kinds = sorted(MUTATIONS)
    said = None
    while said is None:
        kind = draw.choice(kinds)
        said = MUTATIONS[kind](source, draw)
    before = set(os.listdir(place))
    command = draw.choice(COMMANDS)
    told = lowbit(*words(command, source, place, right, draw))
    wrong = problem(command, told, place, before)
    if not wrong and command == "dequantize" and told.code == 0:
        wrong = other_numbers(place / "out", numbers(right), kind, said)
    assert not wrong, f"{name}, {said}\n{command}: {wrong}\n{told.err[-3000:]}\n{told.out[-300:]}"
    return kind, command, told.code


def other_numbers(output, right, kind, said):
    """Return the weights that decode to something else than before, though nobody was told."""
    if kind == "tensors" and " is " in said:
        return ""  # other numbers, or in another order, and nothing in a file could tell
    found = numbers(output)
    # What is stored as it was is listed as copied, and is no weight that was decoded wrongly.
    decoded = {x: y for x, y in found.items() if y[0] == "torch.float32"}
    changed = [x for x in decoded if x in right and decoded[x] != right[x]]
    return f"other numbers: {changed[:3]}" if changed else ""


def test_f13_documents_made_wrong(templates, tmp_path):
    def case(number, place):
        draw = random.Random(f"documents {number}")
        counts = Counter()
        for _ in range(CASES // BATCHES):
            names = sorted(templates) if draw.random() < 0.6 else SEVERAL
            counts[attack(draw.choice(names), templates, place, draw)] += 1
            for path in list(place.iterdir()):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        return counts

    counts = sum(spread(case, range(BATCHES), tmp_path), Counter())
    kinds, commands, codes = (
        Counter(
            {
                key: sum(n for k, n in counts.items() if k[i] == key)
                for key in {k[i] for k in counts}
            }
        )
        for i in range(3)
    )
    print(f"F13: {sum(counts.values())} documents made wrong, {dict(codes)}, {dict(kinds)}")
    assert sum(counts.values()) == CASES
    assert kinds.keys() == MUTATIONS.keys() and commands.keys() == set(COMMANDS)
    assert codes[4] > CASES // 4


def edited(path, edit):
    """Change a JSON file, or the header of a safetensors file."""
    if path.suffix == ".json":
        document = json.loads(path.read_text())
        edit(document)
        path.write_text(json.dumps(document))
    else:
        header, data = checkpoints.header_of(path), documents.data_of(path)
        edit(header)
        documents.rewrite(path, header, data)


def no_utf8_in_a_mark(source):
    header, data = checkpoints.header_of(source), bytearray(documents.data_of(source))
    name = next(x for x in header if x.endswith(".comfy_quant"))
    data[header[name]["data_offsets"][0] + 5] = 0x8A
    documents.rewrite(source, header, bytes(data))


def a_name_that_is_an_object(source):
    edited(source / "lowbit.json", lambda x: x["made"].update(kept={"a": [{}]}))


def half_a_pair(source):
    edited(source / "config.json", lambda x: x.update(model_type="\ud800"))


def a_folder(source):
    (source / "config.json").unlink()
    (source / "config.json").mkdir()


def a_long_name(source):
    def edit(config):
        config["quantization_config"]["config_groups"]["group_0"]["targets"] = ["x" * 70_000]

    edited(source / "config.json", edit)


def one_number_in_a_list(source):
    name = next(x for x in checkpoints.header_of(source) if x.endswith(".weight_scale_2"))
    edited(source, lambda x: x[name].update(shape=[1]))


def nothing(source):
    pass


# checkpoint, what was made wrong, command, its exit code, what it says
FOUND = (
    ("comfyui/nvfp4", no_utf8_in_a_mark, "dequantize", 4, ""),
    ("lowbit", a_name_that_is_an_object, "verify", 1, ""),
    ("torchao/mx", half_a_pair, "quantize", 4, "not Unicode"),
    ("deepseek-v4", a_folder, "dequantize", 4, "config.json: not a regular file"),
    ("compressed-tensors/pack-int4", a_long_name, "dequantize", 4, "characters more"),
    ("comfyui/nvfp4", one_number_in_a_list, "dequantize", 0, ""),
    ("compressed-tensors/pack-int4-channel", nothing, "compare", 0, ""),
    ("compressed-tensors/int8-g64", nothing, "compare", 0, ""),
)


@pytest.mark.parametrize("case", FOUND, ids=lambda case: f"{case[1].__name__}, {case[0]}")
def test_f13_what_was_found_before(case, templates, tmp_path):
    name, spoil, command, code, says = case
    template, right = templates[name]
    place = tmp_path / "place"
    place.mkdir()
    source = place / template.name
    (shutil.copytree if template.is_dir() else shutil.copy)(template, source)
    spoil(source)
    before = set(os.listdir(place))
    said = lowbit(*words(command, source, place, right))
    assert said.code == code, said.err
    assert says in said.err
    assert problem(command, said, place, before) == ""
    if command == "dequantize" and code == 0:
        assert other_numbers(place / "out", numbers(right), "", "") == ""
