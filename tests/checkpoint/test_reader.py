"""Checkpoints: which files are one, what is refused, and that what is read is what was checked."""

import json
import os
import threading

import pytest

from lowbitcli.checkpoint import Checkpoint, directory, header, shard_index
from lowbitcli.errors import CheckpointError, UsageError
from lowbitcli.tensors import TensorSpec

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def save(path, tensors, metadata=None):
    """Write U8 tensors (name -> bytes)."""
    specs = [TensorSpec(name, "U8", (len(data),)) for name, data in tensors.items()]
    first, entries = header.lay_out(specs, metadata or {})
    blob = bytearray(first)
    for x in sorted(entries.values(), key=lambda x: x.start):
        blob += tensors[x.spec.name]
    path.write_bytes(blob)
    return entries


def save_index(root, weight_map):
    (root / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture
def sharded(tmp_path):
    save(tmp_path / ONE, {"a": b"aaaa", "b": b"bb"}, {"format": "pt"})
    save(tmp_path / TWO, {"c": b"cccc"})
    save_index(tmp_path, {"a": ONE, "b": ONE, "c": TWO})
    (tmp_path / "config.json").write_text('{"x": [0.0, Infinity]}')
    return tmp_path


def refused(path, says, **options):
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path, **options)
    assert says in caught.value.message
    assert caught.value.exit_code == 4
    return caught.value


def test_sharded_directory(sharded):
    for name in ("tokenizer.json", "lowbit.json", "hf_quant_config.json"):
        (sharded / name).write_text('{"k": 1}')
    (sharded / "pytorch_model.bin").write_bytes(b"x")
    (sharded / ".hidden").write_bytes(b"x")
    (sharded / "folder").mkdir()
    save(sharded / "other.safetensors", {"z": b"z"})
    with Checkpoint.open(sharded) as c:
        assert list(c.tensors) == ["a", "b", "c"] and c.files == (ONE, TWO)
        assert c.read("a") == b"aaaa" and c.read("c", 1, 3) == b"cc"
        assert c.metadata[ONE] == {"format": "pt"} and c.is_directory
        assert c.config == {"x": [0.0, float("inf")]}
        assert c.quant_config == c.manifest == {"k": 1}
        assert c.sidecars == ("config.json", "hf_quant_config.json", "tokenizer.json")
        assert any("other.safetensors" in note for note in c.notes)
        assert any("pytorch_model.bin" in note for note in c.notes)
        with pytest.raises(ValueError, match="no bytes"):
            c.read("a", 2, 5)


def test_single_file_is_alone_and_says_so(sharded):
    with Checkpoint.open(sharded / ONE) as c:
        assert list(c.tensors) == ["a", "b"] and not c.is_directory
        assert c.config is None and c.index is None and c.sidecars == ()
        assert "config.json" in c.notes[0] and str(sharded) in c.notes[0]


@pytest.mark.parametrize(
    ("files", "chosen"),
    [
        (["model", "consolidated"], ["model"]),
        (["diffusion_pytorch_model", "x"], ["diffusion_pytorch_model"]),
        (["flux1-dev"], ["flux1-dev"]),
        (["m-00001-of-00002", "m-00002-of-00002", "x"], ["m-00001-of-00002", "m-00002-of-00002"]),
    ],
)
def test_directory_without_index(files, chosen, tmp_path):
    for file in files:
        save(tmp_path / f"{file}.safetensors", {file: b"x"})
    assert Checkpoint.open(tmp_path).files == tuple(f"{x}.safetensors" for x in chosen)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ([], "no safetensors file"),
        (["pytorch_model.bin"], "only pytorch_model.bin"),
        (["x.safetensors", "y.safetensors"], "no telling which: x.safetensors, y.safetensors"),
        (["m-00001-of-00003.safetensors", "m-00003-of-00003.safetensors"], "expected 3 shards"),
        (["m-00001-of-00003.safetensors", "m-00002-of-00003.safetensors"], "expected 3 shards"),
        (["a-1-of-1.safetensors", "b-1-of-1.safetensors"], "several sets"),
        (["a.safetensors.index.json", "b.safetensors.index.json"], "several indexes"),
    ],
)
def test_directory_that_is_no_checkpoint(files, says, tmp_path):
    for file in files:
        (tmp_path / file).write_bytes(b"")
    refused(tmp_path, says)


def test_case_11_a_shard_that_is_missing(sharded):
    (sharded / TWO).unlink()
    error = refused(sharded, f"shard {TWO} is missing; it should hold 1 tensors")
    assert "incomplete download?" in error.hint


def test_case_12a_a_tensor_that_the_index_does_not_name_is_kept(sharded):
    save_index(sharded, {"a": ONE, "c": TWO})
    c = Checkpoint.open(sharded)
    assert "b" in c.tensors and "not in the index: b; kept" in c.notes[0]
    refused(sharded, "not in the index: b", strict=True)


@pytest.mark.parametrize(
    ("weight_map", "says"),
    [
        ({"a": ONE, "b": TWO, "c": TWO}, f"does not name it; it is in {ONE}"),
        ({"a": ONE, "b": ONE, "c": TWO, "d": TWO}, "no shard holds it"),
    ],
)
def test_case_12b_a_name_that_the_shard_does_not_hold(weight_map, says, sharded):
    save_index(sharded, weight_map)
    refused(sharded, says)


def test_case_12c_a_tensor_in_two_shards(sharded):
    save(sharded / TWO, {"c": b"cccc", "a": b"AAAA"})
    refused(sharded, f'"a" is in {ONE} and in {TWO}')


@pytest.mark.parametrize(
    "value",
    [
        "../evil.safetensors", "/etc/evil.safetensors", "x/y.safetensors", "..", "", "a.bin",
        "..\\evil.safetensors", ".hidden.safetensors", "a\0.safetensors", "a\x1b.safetensors",
        None, 1, ["x.safetensors"], {},
    ],
)  # fmt: skip
def test_case_12d_paths_in_the_index_are_refused(value, sharded):
    save(sharded.parent / "evil.safetensors", {"a": b"aaaa"})
    save_index(sharded, {"a": value, "b": ONE, "c": TWO})
    refused(sharded, 'tensor "a" is said to be in')


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "expected a JSON object"),
        ("{", "not JSON"),
        ("{}", "no weight_map"),
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": {"a": "x.safetensors"}, "metadata": 3}', "metadata is not"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "twice"),
        ('{"weight_map": ' + "[" * 100_000, "too deep"),
        ('{"weight_map": {"a": "x.safetensors"}, "x": ' + "[" * 90 + "]" * 90 + "}", "deeper"),
        ('{"weight_map": ' + "9" * 5000 + "}", "too long"),
    ],
)
def test_malformed_index(text, says, sharded):
    (sharded / INDEX).write_text(text)
    refused(sharded, says)


@pytest.mark.parametrize("text", ["", "[1]", '{"a": 1, "a": 2}', '{"a": ' * 2000, '{"\udcff": 1}'])
def test_malformed_config(text, sharded):
    (sharded / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    refused(sharded, "config.json")


def test_case_13_a_shard_cut_short_or_grown(sharded):
    whole = (sharded / TWO).read_bytes()
    (sharded / TWO).write_bytes(whole[:-2])
    error = refused(sharded, f"expected {len(whole)} bytes, found {len(whole) - 2}")
    assert TWO in error.message and "incomplete download?" in error.hint
    (sharded / TWO).write_bytes(whole + b"x")
    refused(sharded, f"expected {len(whole)} bytes, found {len(whole) + 1}")
    (sharded / TWO).write_bytes((1 << 40).to_bytes(8, "little") + whole[8:])
    refused(sharded, "the header would be 1099511627776 bytes")


@pytest.mark.parametrize("name", [TWO, "config.json", INDEX])
def test_a_link_out_of_the_directory_is_refused(name, sharded, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside") / name
    (sharded / name).rename(outside)
    (sharded / name).symlink_to(outside)
    refused(sharded, "leads out of the directory")


def test_a_link_put_in_place_after_the_check_is_not_followed(sharded, monkeypatch):
    inside = directory.inside

    def raced(root, name):
        real = inside(root, name)
        if name == TWO:
            os.rename(real, sharded / "moved")
            os.symlink(sharded / "moved", real)
        return real

    monkeypatch.setattr(directory, "inside", raced)
    refused(sharded, "cannot be opened")


def test_a_link_inside_the_directory_is_followed(sharded):
    (sharded / TWO).rename(sharded / "real")
    (sharded / TWO).symlink_to("real")
    assert Checkpoint.open(sharded).read("c") == b"cccc"


def test_a_hub_cache_is_read(sharded, tmp_path_factory):
    cache = tmp_path_factory.mktemp("models--x")
    snapshot = cache / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for i, name in enumerate(os.listdir(sharded)):
        (sharded / name).rename(cache / "blobs" / str(i))
        (snapshot / name).symlink_to(f"../../blobs/{i}")
    c = Checkpoint.open(snapshot)
    assert c.read("c") == b"cccc" and c.sidecars == ("config.json",)


def test_pickles_pipes_addresses_and_nothing(tmp_path):
    for name in ("x.bin", "x.pt", "x.ckpt", "x.pth"):
        (tmp_path / name).write_bytes(b"\x80\x04.")
        assert "never loaded" in refused(tmp_path / name, "not a safetensors file").hint
    refused(tmp_path / "absent", "No such file")
    refused("a\0b", "not a path")
    os.mkfifo(tmp_path / "pipe.safetensors")
    refused(tmp_path / "pipe.safetensors", "not a regular file")
    refused("/dev/null", "not a regular file")
    with pytest.raises(UsageError) as caught:
        Checkpoint.open("hf://org/model")
    assert "hf download org/model" in caught.value.hint


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("change", ["touch", "cut", "replace"])
def test_a_change_while_reading_is_noticed(change, opened, sharded):
    with Checkpoint.open(sharded) as c:
        if opened:
            c.read("c")
        if change == "touch":
            os.utime(sharded / TWO, ns=(1, 1))
        elif change == "cut":
            os.truncate(sharded / TWO, 40)
        else:
            save(sharded / "new", {"c": b"CCCC"})
            os.replace(sharded / "new", sharded / TWO)
            if opened:  # the file that was opened is still the one that was checked
                assert c.read("c") == b"cccc"
                return
        with pytest.raises(CheckpointError, match="changed while being read"):
            c.read("c")


def test_many_threads_read_at_once(tmp_path):
    tensors = {f"t{i}": bytes([i]) * 5000 for i in range(50)}
    save(tmp_path / "model.safetensors", tensors)
    wrong = []
    with Checkpoint.open(tmp_path) as c:

        def read_all():
            wrong.extend(name for name, data in tensors.items() if c.read(name) != data)

        threads = [threading.Thread(target=read_all) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_index_of_what_was_written(tmp_path):
    files = {
        TWO: save(tmp_path / TWO, {"c": b"cccc"}),
        ONE: save(tmp_path / ONE, {"b": b"bb", "a": b"aaaa"}),
    }
    raw = shard_index.index(files, {"metadata": {"total_size": 1, "k": "v"}, "weight_map": {}})
    found = json.loads(raw)
    assert found["metadata"] == {"total_size": 10, "k": "v"}
    assert list(found["weight_map"].items()) == [("a", ONE), ("b", ONE), ("c", TWO)]
    (tmp_path / INDEX).write_bytes(raw)
    assert list(Checkpoint.open(tmp_path, strict=True).tensors) == ["a", "b", "c"]
    with pytest.raises(ValueError, match="and in"):
        shard_index.index({ONE: files[ONE], TWO: files[ONE]})


def test_files_in_folders_belong_to_the_checkpoint(tmp_path):
    save(tmp_path / "model.safetensors", {"a": b"aaaa"})
    for name in ("1_Pooling/config.json", "2_Dense/model.safetensors", "onnx/model.onnx"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"{}")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_bytes(b"")
    (tmp_path / "3_Out").symlink_to("/etc")
    (tmp_path / "1_Pooling" / "passwd").symlink_to("/etc/passwd")
    with Checkpoint.open(tmp_path) as c:
        assert c.sidecars == ("1_Pooling/config.json", "2_Dense/model.safetensors")
        assert sorted(c.notes) == [
            "not copied: 1_Pooling/passwd leads out of the directory or cannot be read",
            "not copied: 3_Out leads out of the directory or cannot be read",
            "not copied: onnx/model.onnx",
        ]


def test_folders_that_are_links_are_told_of(tmp_path, tmp_path_factory):
    root = tmp_path / "model"
    root.mkdir()
    save(root / "model.safetensors", {"a": b"aaaa"})
    outside = tmp_path_factory.mktemp("side")
    (outside / "config.json").write_text("{}")
    (root / "sub").mkdir()
    (root / "sub" / "config.json").write_text("{}")
    (root / "1_Pooling").symlink_to(outside)
    (root / "2_sub").symlink_to("sub")
    (root / "sub" / "loop").symlink_to("..")
    with Checkpoint.open(root) as c:
        assert c.sidecars == ("sub/config.json",)
        assert sorted(c.notes) == [
            "not copied: 1_Pooling leads out of the directory or cannot be read",
            "not copied: 2_sub is a link to a folder",
            "not copied: sub/loop is a link to a folder",
        ]


@pytest.mark.parametrize(
    "name", ["lowbit.json", "x.safetensors.index.json", "model-00001-of-00002.safetensors"]
)
def test_another_checkpoint_in_a_folder_is_left_out(tmp_path, name):
    root = tmp_path / "model"
    root.mkdir()
    save(root / "model.safetensors", {"a": b"aaaa"})
    for folder in ("old/deep/er", "new"):
        (root / folder).mkdir(parents=True)
        (root / folder / "config.json").write_text("{}")
    (root / "old" / "deep" / name).write_text("{}")
    with Checkpoint.open(root) as c:
        assert c.sidecars == ("new/config.json",)
        assert c.notes == ("not copied: old/deep holds another checkpoint",)
