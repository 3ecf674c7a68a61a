"""Wrong names, dtypes, shapes, manifests and indexes planted in outputs that were right.

The manifest is taken away unless a test is about it: its hashes would see every one of them.
"""

import json

import pytest
import torch

from lowbitcli import api
from lowbitcli.errors import CheckpointError
from lowbitcli.verify import compare
from tests import checkpoints
from tests.checkpoints import LAYER, weight
from tests.verify.planted import (
    CONTAINERS,
    DOWN,
    EMBED,
    NORM,
    change,
    message,
    poke,
    told,
)

Q, K = LAYER + "self_attn.q_proj.", LAYER + "self_attn.k_proj."


@pytest.mark.parametrize("piece", [compare.COPY_BYTES, 700])
def test_a_changed_byte_of_an_untouched_tensor(planted, monkeypatch, piece):
    monkeypatch.setattr(compare, "COPY_BYTES", piece)
    output = planted.copy("nvfp4", "lowbit")
    poke(output, EMBED, 1001, lambda byte: byte ^ 0x40)
    found = planted.verify(output)
    assert told(found) == [("fail", "changed", EMBED)]
    assert message(found, "changed") == (
        "not the source's bytes; the first that differs is byte 1001 of 12288"
    )
    assert found.untouched == 1


def test_a_missing_tensor(planted):
    output = planted.copy("nvfp4", "lowbit")
    change(output, lambda tensors: tensors.pop(NORM))
    assert told(planted.verify(output, source=False)) == []
    assert told(planted.verify(output)) == [("fail", "missing", NORM)]


@pytest.mark.parametrize("name", ["mtp.layers.0.mlp.up_proj.weight", "visual.blocks.0.qkv.weight"])
def test_a_tensor_of_what_predicts_further_tokens_or_sees(planted, tmp_path, name):
    """Writers lose these: a loader that knows only the language model never sees them."""
    tensors = {**checkpoints.read(planted.source), name: weight(64, 64)}
    source = checkpoints.single(tmp_path / "source", tensors)
    output = tmp_path / "out"
    api.quantize(source, output, api.Request(scheme="nvfp4"), device="cpu")
    (output / "lowbit.json").unlink()
    assert told(api.verify(output, against=source, device="cpu")) == []
    change(output, lambda tensors: tensors.pop(name))
    assert told(api.verify(output, against=source, device="cpu")) == [("fail", "missing", name)]


def test_an_extra_tensor(planted):
    output = planted.copy("nvfp4", "lowbit")
    change(output, lambda tensors: tensors.update(more=torch.ones(3)))
    assert told(planted.verify(output)) == [("fail", "extra", "more")]


def test_a_dtype_that_was_changed(planted):
    output = planted.copy("nvfp4", "lowbit")
    change(output, lambda tensors: tensors.update({NORM: tensors[NORM].float()}))
    found = planted.verify(output)
    assert told(found) == [("fail", "dtype", NORM)]
    assert message(found, "dtype") == "BF16 in the source, F32 in the output"


def test_a_shape_that_was_changed(planted):
    output = planted.copy("nvfp4", "lowbit")
    change(output, lambda tensors: tensors.update({NORM: tensors[NORM].reshape(8, 8)}))
    assert told(planted.verify(output)) == [("fail", "shape", NORM)]


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_missing_scale(planted, container):
    output = planted.copy("nvfp4", container)
    change(output, lambda tensors: tensors.pop(DOWN + "weight_global_scale"))
    found = planted.verify(output)
    assert {(severity, kind) for severity, kind, _ in told(found)} == {("fail", "missing")}
    assert DOWN + "weight_global_scale" in found.problems[0].message


@pytest.mark.parametrize("container", CONTAINERS)
def test_an_orphan_scale(planted, container):
    output = planted.copy("nvfp4", container)
    orphan = LAYER + "mlp.lost_proj.weight_scale"
    change(output, lambda tensors: tensors.update({orphan: tensors[DOWN + "weight_scale"]}))
    for source in (False, True):
        assert told(planted.verify(output, source=source)) == [("fail", "orphan", orphan)]


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_scale_of_another_dtype(planted, container):
    output = planted.copy("nvfp4", container)
    name = DOWN + "weight_scale"
    change(output, lambda tensors: tensors.update({name: tensors[name].float()}))
    found = planted.verify(output)
    assert told(found) == [("fail", "mismatch", name)]
    assert "F8_E4M3 is needed, F32 is stored" in message(found, "mismatch")


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("scheme", ["fp8_channel", "mxfp8"])
def test_an_fp8_scale_of_another_shape(planted, scheme, container):
    output = planted.copy(scheme, container)
    name = DOWN + "weight_scale"
    change(output, lambda tensors: tensors.update({name: tensors[name].reshape(-1)}))
    found = planted.verify(output)
    assert told(found) == [("fail", "mismatch", name)]
    assert "is needed" in message(found, "mismatch")


def test_packed_weights_without_metadata(planted, tmp_path):
    """Case 18."""
    output = tmp_path / "bare.safetensors"
    tensors = checkpoints.read(planted.made("nvfp4", "lowbit"))
    checkpoints.write(output, tensors, {"format": "pt"})
    found = api.verify(output, device="cpu")
    assert not found.passed
    problems = {one.tensor: one for one in found.failures}
    assert problems[DOWN + "weight"].kind == "unknown"
    assert problems[DOWN + "weight"].message == (
        "a matrix stored as U8, and nothing says what its codes mean"
    )
    assert problems[DOWN + "weight_scale"].kind == "unknown"


def test_packed_weights_and_nothing_else(tmp_path):
    """Case 18 without even a scale."""
    output = tmp_path / "bare.safetensors"
    checkpoints.write(output, {"a.weight": torch.zeros(8, 8, dtype=torch.uint8)})
    assert ("fail", "unknown", "a.weight") in told(api.verify(output, device="cpu"))


def test_the_manifest_sees_a_byte_and_names_tensor_and_file(planted):
    output = planted.copy("nvfp4", "compressed-tensors", proof=True)
    poke(output, DOWN + "weight_packed", 100, lambda byte: byte ^ 0x01)
    found = planted.verify(output, source=False)
    assert told(found) == [("fail", "manifest", DOWN + "weight_packed")]
    assert found.problems[0].file == "model.safetensors"
    assert "expected xxh3" in found.problems[0].message


def test_a_hash_of_the_manifest_that_was_changed(planted):
    output = planted.copy("nvfp4", "lowbit", proof=True)
    manifest = json.loads((output / "lowbit.json").read_text())
    manifest["files"]["model.safetensors"]["tensors"][NORM] = "0" * 32
    (output / "lowbit.json").write_text(json.dumps(manifest))
    found = planted.verify(output)
    assert told(found) == [("fail", "manifest", "")] * 2 + [("fail", "manifest", NORM)]
    own, digest, _ = found.problems
    assert (own.file, own.message) == (
        "lowbit.json",
        "it is not as it was written: its own digest differs",
    )
    assert digest.message == "the manifest's hashes do not give its digest"


def test_a_manifest_that_is_none(planted):
    output = planted.copy("nvfp4", "lowbit")
    (output / "lowbit.json").write_text('{"format": 1}')
    found = planted.verify(output)
    assert told(found) == [("fail", "manifest", "")]


def test_a_single_file_that_was_changed(planted, tmp_path):
    output = tmp_path / "out.safetensors"
    request = api.Request(scheme="nvfp4", container="lowbit")
    api.quantize(planted.source / "model.safetensors", output, request, device="cpu")
    data = bytearray(output.read_bytes())
    data[-1] ^= 1
    output.write_bytes(data)
    found = api.verify(output, device="cpu")
    assert [(kind, bool(name)) for _, kind, name in told(found)] == [("manifest", True)]


@pytest.mark.parametrize(
    ("total", "severity"), [(1, "fail"), (True, "fail"), ("1", "fail"), (None, "warn")]
)
def test_an_index_with_another_total_size(planted, tmp_path, total, severity):
    source = checkpoints.sharded(
        tmp_path / "source", {Q + "weight": weight(64, 64)}, {NORM: torch.ones(64)}
    )
    output = tmp_path / "out"
    api.quantize(source, output, device="cpu")
    index = json.loads((output / checkpoints.INDEX).read_text())
    index["metadata"] = {} if total is None else {"total_size": total}
    (output / checkpoints.INDEX).write_text(json.dumps(index))
    (output / "lowbit.json").unlink()  # whose digest of the index sees every change
    found = api.verify(output, against=source, device="cpu")
    assert told(found) == [(severity, "index", "")]
    assert "total_size" in message(found, "index")


def test_a_tensor_that_the_index_does_not_name(tmp_path):
    source = checkpoints.sharded(
        tmp_path / "source",
        {Q + "weight": weight(64, 64)},
        {NORM: torch.ones(64), "more": torch.ones(2)},
    )
    output = tmp_path / "out"
    api.quantize(source, output, device="cpu")
    index = json.loads((output / checkpoints.INDEX).read_text())
    del index["weight_map"][NORM]
    (output / checkpoints.INDEX).write_text(json.dumps(index))
    (output / "lowbit.json").unlink()  # whose digest of the index sees every change
    found = api.verify(output, against=source, device="cpu")
    assert told(found) == [("fail", "index", NORM)]


@pytest.mark.parametrize(
    ("name", "severity"), [(checkpoints.INDEX, "fail"), ("config.json", "warn")]
)
@pytest.mark.parametrize("gone", (False, True))
def test_a_file_beside_the_weights_that_is_not_as_it_was_written(tmp_path, name, severity, gone):
    source = checkpoints.sharded(
        tmp_path / "source", {Q + "weight": weight(64, 64)}, {NORM: torch.ones(64)}
    )
    output = tmp_path / "out"
    api.quantize(source, output, device="cpu")
    text = (output / name).read_text()
    (output / name).unlink() if gone else (output / name).write_text(text.rstrip() + "  ")
    found = api.verify(output, device="cpu")
    beside = [x for x in found.problems if x.file == name]
    assert [(x.severity, x.kind) for x in beside] == [(severity, "manifest")]
    assert beside[0].message.startswith(f"{name}: ")


def test_the_manifest_of_a_stranger_opens_nothing_outside(planted, tmp_path):
    output = planted.copy("nvfp4", "lowbit", proof=True)
    secret = tmp_path / "secret.safetensors.index.json"
    secret.write_text("{}")
    manifest = json.loads((output / "lowbit.json").read_text())
    for name in (str(secret), f"../{tmp_path.name}/{secret.name}", "../../etc/passwd"):
        manifest["beside"] = {name: "0" * 64}
        (output / "lowbit.json").write_text(json.dumps(manifest))
        (problem,) = [x for x in planted.verify(output).problems if x.file == name]
        assert "leads out of" in problem.message or "not there" in problem.message


def test_an_output_cut_short_is_told_and_not_raised(planted):
    output = planted.copy("nvfp4", "lowbit")
    file = output / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    found = planted.verify(output)
    assert told(found) == [("fail", "unreadable", "")]
    assert found.exit_code == 1
    assert "expected" in found.problems[0].message


def test_an_output_with_an_unknown_quantization_is_told(planted):
    output = planted.copy("nvfp4", "compressed-tensors")
    config = json.loads((output / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "gptq"
    (output / "config.json").write_text(json.dumps(config))
    found = planted.verify(output, source=False)
    assert told(found) == [("fail", "unreadable", "")]
    assert "gptq" in found.problems[0].message


def test_an_output_that_is_not_there_is_raised(planted, tmp_path):
    with pytest.raises(CheckpointError):
        planted.verify(tmp_path / "nothing")


def test_a_source_that_is_wrong_is_raised(planted, tmp_path):
    with pytest.raises(CheckpointError):
        api.verify(planted.made("nvfp4", "lowbit"), against=tmp_path / "nothing", device="cpu")
    source = planted.copy("nvfp4", "lowbit")
    change(source, lambda tensors: tensors.pop(DOWN + "weight_scale"))
    with pytest.raises(CheckpointError, match="disagrees with itself"):
        api.verify(planted.made("nvfp4", "lowbit"), against=source, device="cpu")


def test_nothing_quantized_is_a_warning(planted):
    found = api.verify(planted.source, device="cpu")
    assert told(found) == [("warn", "nothing", "")]
    assert found.passed


def test_progress_goes_up_to_all_of_it(planted):
    seen = []
    planted.verify(planted.made("mxfp8", "lowbit"), progress=lambda *where: seen.append(where))
    done = [done for done, _, _ in seen]
    assert done == sorted(done)
    assert seen[-1][:2] == (seen[-1][1], seen[-1][1])
    assert {name for _, _, name in seen} >= {DOWN + "weight", NORM, ""}
