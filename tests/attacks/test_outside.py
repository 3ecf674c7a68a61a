"""F13: indexes and links that lead out of the checkpoint: exit code 4 naming the entry, or a note;
and nothing outside is opened, which the kernel's list of calls shows where strace is installed."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import checkpoints
from tests.attacks.models import diffusers, plain
from tests.attacks.test_documents import lowbit

FIRST = "model.layers.0.self_attn.k_proj.weight"
SECRET = b"the secret of somebody else"
MISSING = ("gone.safetensors", "x" * 5000 + ".safetensors")  # which could be there
# What the index says of a tensor; {outside} is a folder beside the checkpoint, which holds a shard
# that is right.
ENTRIES = (
    "../outside/evil.safetensors",
    "{outside}/evil.safetensors",
    "./model-00001-of-00002.safetensors",
    "sub/../../outside/evil.safetensors",
    "..",
    "",
    "model.bin",
    ".hidden.safetensors",
    "a/b.safetensors",
    "..\\outside\\evil.safetensors",
    "evil.safetensors\0.safetensors",
    "\x1b[2J.safetensors",
    "\u202esrotcnesefas.safetensors",
    "file:///etc/passwd",
    "hf://a/b.safetensors",
    "~/evil.safetensors",
    "$HOME/evil.safetensors",
    *MISSING,
    None,
    7,
    ["model-00001-of-00002.safetensors"],
    {"file": "model-00001-of-00002.safetensors"},
)
# Files that are links to outside -> the exit code of `quantize`: 0 where they are left out.
LINKS = {
    "model-00001-of-00002.safetensors": 4,
    "config.json": 4,
    "model.safetensors.index.json": 4,
    "hf_quant_config.json": 4,
    "lowbit.json": 4,
    "tokenizer.json": 0,
    "sub": 0,
}


@pytest.fixture
def outside(tmp_path):
    folder = tmp_path / "outside"
    folder.mkdir()
    checkpoints.write(folder / "evil.safetensors", {FIRST: checkpoints.weight(32, 64)})
    for name in LINKS:
        if name.endswith(".json"):
            (folder / name).write_bytes(json.dumps({"a": SECRET.decode()}).encode())
    return folder


def attacks(tmp_path, outside):
    """Yield checkpoints that lead out, what must be said of each, and the exit code."""
    for number, entry in enumerate(ENTRIES):
        source = plain(tmp_path / f"index{number}")
        path = source / checkpoints.INDEX
        index = json.loads(path.read_text())
        said = entry.replace("{outside}", str(outside)) if isinstance(entry, str) else entry
        index["weight_map"][FIRST] = said
        path.write_text(json.dumps(index))
        yield source, entry[:20] if entry in MISSING else FIRST, 4
    for number, (name, code) in enumerate(LINKS.items()):
        source = plain(tmp_path / f"link{number}")
        (source / name).unlink(missing_ok=True)
        target = "evil.safetensors" if name.startswith("model-") else name if "." in name else "."
        (source / name).symlink_to(outside / target)
        yield source, name, code
    source = diffusers(tmp_path / "pipeline")
    shutil.rmtree(source / "transformer")
    (source / "transformer").symlink_to(outside)
    yield source, "transformer", 0


@pytest.fixture
def made(tmp_path, outside):
    for folder in [f"index{n}" for n in range(len(ENTRIES))]:
        (tmp_path / folder).mkdir()
    for folder in [*(f"link{n}" for n in range(len(LINKS))), "pipeline"]:
        (tmp_path / folder).mkdir()
    return list(attacks(tmp_path, outside))


def read_everything(sources, output):
    """Run the commands that read a checkpoint on each; also called in a process of its own."""
    ends = []
    for number, source in enumerate(sources):
        for command in ("inspect", "verify"):
            lowbit(command, source)
        target = Path(output) / str(number)
        ends.append(lowbit("quantize", source, "--scheme", "fp8", "-o", target, "--device", "cpu"))
    return ends


def test_f13_nothing_outside_is_read_and_the_entry_is_named(made, outside, tmp_path):
    (tmp_path / "out").mkdir()
    ends = read_everything([source for source, _, _ in made], tmp_path / "out")
    refused = 0
    for (source, says, code), said in zip(made, ends, strict=True):
        if source.parent.name == "pipeline":
            assert said.code in (2, 4), (source, said.err)  # no component is left to quantize
        else:
            assert said.code == code, (source, said.err)
            assert says in said.err, (source, said.err)
        assert "Traceback" not in said.err
        refused += said.code != 0
    for path in (tmp_path / "out").rglob("*"):
        assert path.is_dir() or SECRET not in path.read_bytes(), path
    print(f"F13: {len(made)} indexes and links that lead out, {refused} refused")
    assert refused >= 28


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_f13_the_kernel_was_asked_for_nothing_outside(made, outside, tmp_path):
    (tmp_path / "out").mkdir()
    log = tmp_path / "log"
    sources = [str(source) for source, _, _ in made]
    code = (
        "import sys, json; from tests.attacks.test_outside import read_everything; "
        "ends = read_everything(json.loads(sys.argv[1]), sys.argv[2]); print(len(ends))"
    )
    line = ["strace", "-f", "-y", "-o", log, "-e", "trace=open,openat,openat2"]
    line += [sys.executable, "-c", code, json.dumps(sources), tmp_path / "out"]
    given = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [str(x) for x in line],
        env=given,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    if "ptrace" in done.stderr and done.returncode:
        pytest.skip("no process may be traced here")
    assert done.returncode == 0 and done.stdout.strip() == str(len(sources)), done.stderr
    # With -y a file that was opened is named by where it really is: `= 3</real/path>`.
    opened = re.findall(r"= [0-9]+<([^>]*)>", log.read_text(errors="replace"))
    assert sum(str(tmp_path) in path for path in opened) > 100
    found = [path for path in opened if Path(path).is_relative_to(os.path.realpath(outside))]
    print(f"F13: {len(opened)} files opened, {len(found)} of them outside")
    assert found == []
