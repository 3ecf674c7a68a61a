"""Manifests: any byte that differs from what was written is found, and named."""

import hashlib
import json
import random

import pytest
import xxhash

from lowbitcli.checkpoint import Checkpoint, header, manifest
from lowbitcli.errors import CheckpointError
from lowbitcli.tensors import TensorSpec

DATA = {"a": b"aaaa", "b\u00e9": b"bb", "": b"cccc"}
SPECS = [TensorSpec(name, "U8", (len(data),)) for name, data in DATA.items()]
HASHES = {name: xxhash.xxh3_128_hexdigest(data) for name, data in DATA.items()}
SAYS = {"recipe": {"rules": [1]}, "version": "1.2", "plan_digest": "ab" * 32}


def assembled(first, entries):
    blob = bytearray(first) + bytes(sum(len(data) for data in DATA.values()))
    for name, x in entries.items():
        blob[x.start : x.stop] = DATA[name]
    return bytes(blob)


@pytest.fixture
def sealed(tmp_path):
    reserved = manifest.reserve(len(SPECS), {"format": "pt"}, **SAYS)
    first, entries = header.lay_out(SPECS, reserved)
    path = tmp_path / "x.safetensors"
    path.write_bytes(assembled(manifest.seal(first, HASHES), entries))
    return path


@pytest.fixture
def directory(tmp_path):
    first, entries = header.lay_out(SPECS, {"format": "pt"})
    name = "model.safetensors"
    (tmp_path / name).write_bytes(assembled(first, entries))
    built = manifest.build({name: HASHES}, headers={name: manifest.header_digest(first)}, **SAYS)
    (tmp_path / "lowbit.json").write_bytes(built)
    return tmp_path


def differences(path):
    with Checkpoint.open(path) as c:
        proof = manifest.of(c)
        assert proof is not None
        found = list(manifest.check(c, proof))
        for name in c.tensors:
            if name in proof.files.get(c.tensors[name].file, manifest.FileProof("", {})).tensors:
                found.append(manifest.check_tensor(c, proof, name))
        return [difference for difference in found if difference]


def test_digest_is_the_documented_tree():
    plain = b"".join(
        len(n.encode()).to_bytes(8, "little") + n.encode() + bytes.fromhex(HASHES[n])
        for n in ["", "a", "b\u00e9"]
    )
    assert manifest.digest_of(HASHES) == hashlib.sha256(plain).hexdigest()


def test_hash_is_the_same_in_pieces():
    pieces = manifest.TensorHash()
    for piece in (b"aa", bytearray(b"a"), memoryview(b"a")):
        pieces.update(piece)
    assert pieces.hexdigest() == HASHES["a"]


def test_nothing_differs_in_what_was_written(sealed, directory):
    for path in (sealed, directory / "model.safetensors", directory):
        if path.name == "model.safetensors":
            assert manifest.of(Checkpoint.open(path)) is None
            continue
        assert differences(path) == []
        found = manifest.of(Checkpoint.open(path))
        assert found is not None
        assert (found.recipe, found.version, found.plan_digest) == tuple(SAYS.values())


def test_building_is_deterministic():
    files = {"y": HASHES, "x": dict(reversed(HASHES.items()))}
    again = {"x": HASHES, "y": HASHES}
    assert manifest.build(files, **SAYS) == manifest.build(again, **SAYS)
    assert json.loads(manifest.build(files, **SAYS))["files"]["x"]["tensors"] == HASHES


def test_every_flipped_bit_of_a_sealed_file_is_found(sealed):
    whole = sealed.read_bytes()
    rng = random.Random(3)
    for at in [*rng.sample(range(len(whole)), 250), len(whole) - 1]:
        blob = bytearray(whole)
        blob[at] ^= 1 << rng.randrange(8)
        sealed.write_bytes(blob)
        try:
            found = differences(sealed)
        except (CheckpointError, AssertionError):
            continue  # unreadable, or no manifest any more
        assert found, (at, whole[at], blob[at])


def test_a_changed_tensor_is_named(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b"cccc", b"cccd"))
    (found,) = differences(directory)
    assert (found.file, found.tensor) == ("model.safetensors", "")
    assert HASHES[""] in found.message


def test_tensors_and_files_added_or_gone_are_named(directory):
    document = json.loads((directory / "lowbit.json").read_text())
    proof = document["files"]["model.safetensors"]
    proof["tensors"]["new"] = proof["tensors"].pop("a")
    document["files"]["gone.safetensors"] = proof
    (directory / "lowbit.json").write_text(json.dumps(document))
    found = {(x.file, x.tensor): x.message for x in differences(directory)}
    assert found[("gone.safetensors", "")] == "only in the manifest"
    assert found[("model.safetensors", "new")] == "only in the manifest"
    assert found[("model.safetensors", "a")] == "not in the manifest"
    assert "do not give its digest" in found[("model.safetensors", "")]


def test_changed_metadata_is_found(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"pt"', b'"tf"'))
    assert [x.message for x in differences(directory)] == [
        "the header is not the one that was written"
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2}, {"files": []}, {"recipe": 1}, {"version": 1}, {"files": {"x": 1}},
        {"files": {"x": {"digest": "0" * 64}}}, {"files": {"x": {"digest": "0", "tensors": {}}}},
        {"files": {"x": {"digest": "0" * 64, "tensors": {"a": 1}}}},
        {"files": {"x": {"digest": "0" * 64, "tensors": {}, "header": "z"}}},
    ],
)  # fmt: skip
def test_malformed_manifests_are_refused(change, directory):
    document = json.loads((directory / "lowbit.json").read_text()) | change
    with pytest.raises(CheckpointError):
        manifest.read(document, "x")


def test_sealing_needs_the_room_that_was_reserved():
    first, _ = header.lay_out(SPECS, manifest.reserve(2, {}, **SAYS))
    with pytest.raises(ValueError, match=r"no room for lowbit\.xxh3"):
        manifest.seal(first, HASHES)
    first, _ = header.lay_out(SPECS, {})
    with pytest.raises(ValueError, match="no room"):
        manifest.seal(first, HASHES)
