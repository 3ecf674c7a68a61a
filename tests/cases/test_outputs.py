"""The shorter cases: what a failure, a dry run, a second run, an odd name or a bad path leaves.

llm-compressor#1410 (a failed run that looks like a model), llama.cpp PR#19526 (a dry run that
writes), and writers whose two runs differ, that alter a bias, or that return 0 for a missing input.
"""

import json
import math
import os
import subprocess
import sys

import pytest
import torch

from lowbitcli.api import Request, dequantize, plan_quantize, quantize
from lowbitcli.errors import CheckpointError, NonFiniteError, OutputError, RecipeError, UsageError
from tests import checkpoints
from tests.checkpoints import sharded, single, weight

SCHEMES = ("fp8", "fp8-dynamic", "fp8-block", "mxfp8", "mxfp4", "nvfp4", "int8")
NORM = torch.linspace(0.5, 2, 64).bfloat16()


def model(number=0):
    layer = f"model.layers.{number}."
    return {
        layer + "self_attn.q_proj.weight": weight(64, 64, seed=number),
        layer + "self_attn.q_proj.bias": torch.zeros(64, dtype=torch.bfloat16),
        layer + "mlp.down_proj.weight": weight(64, 128, seed=number),
        layer + "input_layernorm.weight": NORM,
    }


@pytest.fixture
def source(tmp_path):
    root = sharded(tmp_path / "source", *(model(number) for number in range(4)))
    (root / "tokenizer.json").write_text("{}")
    return root


def test_a_failure_leaves_no_look_alike(tmp_path, source):
    last = model(3)
    last["model.layers.3.mlp.down_proj.weight"][0, 0] = math.nan
    checkpoints.write(source / checkpoints.shard_name(4, 4), last, {"format": "pt"})
    before = checkpoints.everything_below(tmp_path)
    with pytest.raises(NonFiniteError):
        quantize(source, tmp_path / "deep" / "out", device="cpu")
    assert checkpoints.everything_below(tmp_path) == before


def test_a_failure_leaves_the_output_that_was_there(tmp_path, source):
    done = quantize(source, tmp_path / "out", device="cpu")
    before = checkpoints.hashes(tmp_path)
    bad = single(
        tmp_path / "source" / "bad", {"a.weight": torch.full((64, 64), math.nan).bfloat16()}
    )
    with pytest.raises(NonFiniteError):
        quantize(bad, done.output, device="cpu", force=True)
    with pytest.raises(OutputError):
        quantize(source, done.output, Request(scheme="fp8"), device="cpu")
    after = {k: v for k, v in checkpoints.hashes(tmp_path).items() if "source/bad" not in k}
    assert after == before


def test_an_old_output_is_replaced_when_forced(tmp_path, source):
    quantize(source, tmp_path / "out", Request(scheme="fp8"), device="cpu")
    done = quantize(source, tmp_path / "out", Request(scheme="nvfp4"), device="cpu", force=True)
    assert "nvfp4" in checkpoints.quantization_of(done.output)["format"]
    assert not any(name.startswith(".out") for name in os.listdir(tmp_path))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", ("directory", "file"))
def test_a_dry_run_writes_nothing_and_its_sizes_are_those_of_the_run(
    tmp_path, source, lowbit, scheme, kind
):
    path, output = source, tmp_path / "out"
    if kind == "file":
        path = checkpoints.write(tmp_path / "flux1-dev.safetensors", model())
        output = tmp_path / "out.safetensors"
    arguments = ("quantize", path, "-o", output, "--scheme", scheme, "--device", "cpu", "--json")
    before = checkpoints.hashes(tmp_path)
    said = lowbit(*arguments, "--dry-run")
    assert said.code == 0
    assert checkpoints.hashes(tmp_path) == before
    planned = json.loads(said.out)
    said = lowbit(*arguments)
    assert said.code == 0
    if kind == "file":
        sizes = {path.name: output.stat().st_size}
    else:
        sizes = {file.name: file.stat().st_size for file in output.glob("*.safetensors")}
    assert {file["name"]: file["bytes"] for file in planned["files"]} == sizes
    assert planned["bytes_out"] == sum(sizes.values())
    assert json.loads(said.out)["bytes_out"] == planned["bytes_out"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_two_runs_are_equal_and_what_is_kept_is_untouched(tmp_path, source, scheme):
    runs = [
        quantize(source, tmp_path / name, Request(scheme=scheme), device="cpu").output
        for name in ("a", "b")
    ]
    assert checkpoints.hashes(runs[0]) == checkpoints.hashes(runs[1])
    written, tensors = checkpoints.read(runs[0]), checkpoints.read(source)
    for number in range(4):
        for name in ("self_attn.q_proj.bias", "input_layernorm.weight"):
            full = f"model.layers.{number}.{name}"
            assert checkpoints.same(written[full], tensors[full])
    assert (runs[0] / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_file_of_any_name_alone_and_as_the_only_one_of_a_directory(tmp_path, scheme):
    root = tmp_path / "flux"
    root.mkdir()
    file = checkpoints.write(root / "flux1-dev.safetensors", model(), {"a": "b"})
    alone = quantize(file, request=Request(scheme=scheme), device="cpu")
    assert alone.output.parent == root
    assert alone.output.name.startswith("flux1-dev-")
    assert alone.output.suffix == ".safetensors"
    back = dequantize(alone.output, tmp_path / "back.safetensors", device="cpu")
    assert checkpoints.read(back.output).keys() == model().keys()
    alone.output.unlink()
    within = quantize(root, tmp_path / "out", Request(scheme=scheme), device="cpu")
    assert [file.name for file in within.output.glob("*.safetensors")] == ["flux1-dev.safetensors"]
    assert not (within.output / checkpoints.INDEX).exists()
    back = dequantize(within.output, tmp_path / "back", device="cpu")
    assert checkpoints.read(back.output).keys() == model().keys()


def link(path, target):
    path.symlink_to(target, target_is_directory=target.is_dir())
    return path


@pytest.mark.parametrize("force", (False, True))
@pytest.mark.parametrize("run", (quantize, dequantize))
def test_an_output_that_is_the_source_is_refused(tmp_path, source, run, force):
    file = checkpoints.write(tmp_path / "flux1-dev.safetensors", model())
    same = [
        (source, source),
        (source, link(tmp_path / "link", source)),
        (tmp_path / "link", source),
        (source, source / ".." / "source"),
        (source, source / "model-00001-of-00004.safetensors"),
        (source, source / "out"),
        (source, source / "deep" / "er" / "out"),
        (tmp_path / "link", source / "out"),
        (source, tmp_path / "link" / "out"),
        (file, file),
        (file, link(tmp_path / "link.safetensors", file)),
        (tmp_path / "link.safetensors", file),
    ]
    before = checkpoints.hashes(tmp_path)
    for one, other in same:
        with pytest.raises(UsageError) as caught:
            run(one, other, device="cpu", force=force)
        assert caught.value.exit_code == 2
    assert checkpoints.hashes(tmp_path) == before


def test_bad_paths_and_patterns_have_their_exit_codes(tmp_path, source, lowbit):
    regex = tmp_path / "regex.yaml"
    regex.write_text('rules:\n  - match: "re:(["\n    scheme: nvfp4\n')
    (tmp_path / "empty").mkdir()
    nothing = tmp_path / "nothing.safetensors"
    nothing.write_bytes(b"")
    wrong = [
        (4, ("quantize", tmp_path / "missing")),
        (4, ("quantize", tmp_path / "empty")),
        (4, ("quantize", nothing)),
        (4, ("quantize", source / "config.json")),
        (4, ("dequantize", tmp_path / "missing")),
        (3, ("quantize", source, "--recipe", regex)),
        (3, ("quantize", source, "--recipe", tmp_path / "missing.yaml")),
        (2, ("quantize", source, "--scheme", "nvfp5")),
        (2, ("quantize", source, "--container", "gguf")),
        (2, ("quantize", source, "--scheme", "fp8", "--recipe", regex)),
        (2, ("quantize", source, "--device", "tpu")),
        (2, ("quantize", source, "-o", source)),
        (2, ("quantize", source, "--no-such-option")),
        (2, ("quantize", "https://example.com/x.safetensors")),
        (5, ("quantize", source, "-o", tmp_path / "empty" / "config.json" / "x")),
    ]
    (tmp_path / "empty" / "config.json").write_text("{}")
    before = checkpoints.everything_below(tmp_path)
    for code, arguments in wrong:
        said = lowbit(*arguments)
        assert (said.code, arguments) == (code, arguments)
        assert said.err.startswith("error: ") or code == 2, arguments
        assert "Traceback" not in said.err
    assert checkpoints.everything_below(tmp_path) == before


def test_the_errors_of_the_library_are_those_of_the_program(tmp_path, source):
    with pytest.raises(CheckpointError):
        quantize(tmp_path / "missing", device="cpu")
    with pytest.raises(RecipeError):
        plan_quantize(source, None, Request(recipe="no-such-recipe"))
    with pytest.raises(UsageError):
        quantize(source, request=Request(nonfinite="ignore"), device="cpu")
    with pytest.raises(UsageError):
        dequantize(source, dtype="fp8", device="cpu")


def test_the_real_program_once(tmp_path, source):
    """A new process, as users start it: its exit code, its output, and its message."""
    command = [sys.executable, "-c", "from lowbitcli.cli import main; main()"]
    done = subprocess.run(
        [*command, "quantize", str(tmp_path / "missing")], capture_output=True, text=True
    )
    assert done.returncode == 4
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    done = subprocess.run(
        [*command, "quantize", str(source), "-o", str(tmp_path / "out"), "--device", "cpu"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    note, *partners = done.stderr.splitlines()
    assert note.startswith("note: these are served fused") and len(partners) == 4
    assert all("k_proj" in line and "v_proj" in line for line in partners)
    assert str(tmp_path / "out") in done.stdout
    assert (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("container", ["auto", "comfyui"])
def test_a_directory_does_not_become_one_file(tmp_path, source, container):
    out = tmp_path / "x.safetensors"
    with pytest.raises(UsageError, match="the output of a directory is a directory") as caught:
        quantize(source, out, Request(container=container), device="cpu")
    assert "a single safetensors file as the source" in caught.value.hint
    with pytest.raises(UsageError, match="the output of a directory is a directory"):
        dequantize(source, out, device="cpu")
    assert not out.exists()
    file = next(source.glob("*.safetensors"))
    assert quantize(file, out, Request(container="comfyui"), device="cpu").output.is_file()
