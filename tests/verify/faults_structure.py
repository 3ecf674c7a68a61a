"""Faults of names, dtypes, shapes, manifests, indexes and bytes."""

import torch

from tests import checkpoints
from tests.checkpoints import LAYER, weight
from tests.verify.bench import LOST, Bench, Fault, json_of
from tests.verify.planted import DOWN, NORM, change, poke

Q = LAYER + "self_attn.q_proj."
INDEX = checkpoints.INDEX


def cut(bench: Bench):
    output = bench.out("nvfp4")
    file = output / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return output


def poked(name: str, at: int, byte, scheme: str = "nvfp4", container: str = "lowbit"):
    """Return how to change a byte of a tensor."""

    def plant(bench: Bench):
        output = bench.out(scheme, container)
        poke(output, name, at, byte if callable(byte) else lambda _: byte)
        return output

    return plant


def edited(edit, scheme: str = "nvfp4", container: str = "lowbit"):
    """Return how to change the tensors of an output."""
    return lambda bench: bench.out(scheme, container, edit)


def sharded(edit):
    """Return how to change the index of an output of two shards."""

    def plant(bench: Bench):
        folder = bench.folder()
        shards = {Q + "weight": weight(64, 64)}, {NORM: torch.ones(64), "more": torch.ones(2)}
        checkpoints.sharded(folder, *shards)
        json_of(folder / INDEX, edit)
        return folder

    return plant


def proven(edit):
    """Return how to change an output that has a manifest."""

    def plant(bench: Bench):
        output = bench.proven()
        edit(output)
        return output

    return plant


def manifest(edit):
    return proven(lambda output: json_of(output / "lowbit.json", edit))


def renamed_shard(output):
    (output / "model.safetensors").rename(output / "other.safetensors")


def with_a_tensor(output):
    change(output, lambda tensors: tensors.update(more=torch.ones(2)))


def other_metadata(output):
    file = output / "model.safetensors"
    told = {**checkpoints.metadata_of(file), "more": "said"}
    checkpoints.write(file, checkpoints.read(file), told)


def another_config(output):
    json_of(output / "config.json", lambda said: said.update(more=1))


def bare(bench: Bench):
    file = bench.folder() / "bare.safetensors"
    return checkpoints.write(file, {"a.weight": torch.zeros(8, 8, dtype=torch.uint8)})


CT = "compressed-tensors"
STRUCTURE = [
    Fault("unreadable.unreadable:unreadable", "a file cut short", "expected", cut),
    Fault(
        "structure.declared:unknown",
        "bytes that nothing describes",
        "a matrix stored as U8, and nothing says what its codes mean",
        bare,
    ),
    Fault(
        "structure.any_quantized:nothing",
        "no quantized weight at all",
        "no weight is quantized: there is no scale and no code to check",
        lambda bench: bench.source,
        severity="warn",
    ),
    Fault(
        "structure._of_index:index",
        "a tensor that the index does not name",
        "in a shard but not in the index",
        sharded(lambda said: said["weight_map"].pop(NORM)),
    ),
    Fault(
        "structure._of_index:index#2",
        "an index without a total size",
        "the index has no total_size; it would be 8456",
        sharded(lambda said: said.pop("metadata")),
        severity="warn",
    ),
    Fault(
        "structure._of_index:index#3",
        "an index with another total size",
        "the index says total_size 1, the tensors have 8456 bytes",
        sharded(lambda said: said["metadata"].update(total_size=1)),
    ),
    Fault(
        "structure.manifest_of:manifest",
        "a manifest that is none",
        "not a manifest",
        proven(lambda output: (output / "lowbit.json").write_text('{"format": 1}')),
    ),
    Fault(
        "manifest.check",
        "a manifest that was edited",
        "it is not as it was written: its own digest differs",
        manifest(lambda said: said.update(version="0.0.1")),
    ),
    Fault(
        "manifest.check#2",
        "a file that was renamed",
        "only in the manifest",
        proven(renamed_shard),
    ),
    Fault(
        "manifest.check#2",
        "a file that the manifest does not name",
        "only in the checkpoint",
        proven(renamed_shard),
    ),
    Fault(
        "manifest.check#3",
        "a hash in the manifest that was changed",
        "the manifest's hashes do not give its digest",
        manifest(lambda x: x["files"]["model.safetensors"]["tensors"].update({NORM: "0" * 32})),
    ),
    Fault(
        "manifest.check#4",
        "a header that says more",
        "the header is not the one that was written",
        proven(other_metadata),
    ),
    Fault(
        "manifest.check#5",
        "a tensor of the manifest that is gone",
        "only in the manifest",
        proven(lambda output: change(output, lambda tensors: tensors.pop(NORM))),
    ),
    Fault(
        "manifest.check#6",
        "a tensor that the manifest does not name",
        "not in the manifest",
        proven(with_a_tensor),
    ),
    Fault(
        "manifest.check_tensor",
        "a flipped bit, no source",
        "expected xxh3",
        proven(lambda output: poke(output, DOWN + "weight", 100, lambda byte: byte ^ 1)),
    ),
    Fault(
        "around.check",
        "a config that is gone",
        "config.json: written beside the weights, and not there",
        proven(lambda output: (output / "config.json").unlink()),
        severity="warn",
    ),
    Fault(
        "around.check#2",
        "a file beside the weights that leads out of the directory",
        "leads out of",
        manifest(lambda said: said.update(beside={"../../x.safetensors.index.json": "0" * 64})),
    ),
    Fault(
        "around.check#3",
        "a config that was edited",
        "config.json: not the file that was written",
        proven(another_config),
        severity="warn",
    ),
    Fault(
        "structure.hashes:unreadable",
        "a file that is lost while it is hashed",
        LOST,
        proven(lambda _: None),
        fails="check_tensor",
    ),
    Fault(
        "structure.coverage:missing",
        "a tensor that was lost",
        "in the source, not in the output",
        edited(lambda tensors: tensors.pop(NORM)),
        against=True,
    ),
    Fault(
        "structure.coverage:shape",
        "a tensor in another shape",
        "[64] in the source, [8, 8] in the output",
        edited(lambda tensors: tensors.update({NORM: tensors[NORM].reshape(8, 8)})),
        against=True,
    ),
    Fault(
        "structure.coverage:dtype",
        "a tensor in another dtype",
        "BF16 in the source, F32 in the output",
        edited(lambda tensors: tensors.update({NORM: tensors[NORM].float()})),
        against=True,
    ),
    Fault(
        "structure.coverage:extra",
        "a tensor too many",
        "in the output, not in the source",
        edited(lambda tensors: tensors.update(more=torch.ones(3))),
        against=True,
    ),
]
