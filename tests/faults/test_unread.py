"""F20: checkpoints that there is no permission to read. Nothing is known of them, and the command
line is not wrong: exit 5 from every command, and no output."""

import shutil

import pytest

from tests.faults.shim import run
from tests.faults.test_refused import unwritable, without_privileges

INDEX = "model.safetensors.index.json"
LOCKED = {
    "the directory": "",
    "a shard": "model-00002-of-00002.safetensors",
    "the index": INDEX,
    "the config": "config.json",
}
READING = ("verify", "inspect", "plan", "quantize", "dequantize")


def asked(place, name, source):
    """Return what a command ends with that reads `source` without privileges."""
    words = [name, source]
    if name in ("quantize", "dequantize"):
        words += ["-o", place / "written"]
    if name != "inspect" and name != "plan":
        words += ["--device", "cpu"]
    return run(place, words, prepare=without_privileges)


def refused(done, told):
    assert (done.code, done.out) == (5, ""), (done.code, done.err)
    assert f"{told}: " in done.err and "Permission denied" in done.err, done.err
    assert "hint: no permission to read it" in done.err, done.err


@pytest.mark.parametrize("what", LOCKED)
def test_a_directory_that_may_not_be_read(models, tmp_path, what):
    made = shutil.copytree(models.quantized, tmp_path / "made")
    with unwritable(made / LOCKED[what], 0o000):
        for name in READING:
            refused(asked(tmp_path, name, made), made / LOCKED[what])
        words = ["verify", models.quantized, "--against", made]
        against = run(tmp_path, words, prepare=without_privileges)
        refused(against, made / LOCKED[what])
    assert [one.name for one in tmp_path.iterdir()] == ["made"]


def test_a_file_that_may_not_be_read(models, tmp_path):
    (tmp_path / "in").mkdir()
    file = shutil.copy(models.quantized_alone, tmp_path / "in" / "alone.safetensors")
    for locked in (file, file.parent):
        with unwritable(locked, 0o000):
            for name in READING:
                refused(asked(tmp_path, name, file), file)


def test_a_tokenizer_that_may_not_be_read_is_no_end_of_a_verification(models, tmp_path):
    source = shutil.copytree(models.source, tmp_path / "source")
    (source / "tokenizer.json").write_text("{}")
    made = tmp_path / "made"
    assert run(tmp_path, ["quantize", source, "-o", made, "--device", "cpu"]).code == 0
    with unwritable(made / "tokenizer.json", 0o000):
        done = asked(tmp_path, "verify", made)
    assert done.code == 0 and "tokenizer.json: cannot be opened: Permission denied" in done.out
