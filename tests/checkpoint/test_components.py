"""A directory with a model_index.json is its components, each a checkpoint of its own."""

import pytest
import torch

from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.errors import CheckpointError
from tests import checkpoints


def save(folder, text):
    folder.mkdir(exist_ok=True)
    tensor = torch.tensor(list(text.encode()), dtype=torch.uint8)
    checkpoints.write(folder / "x.safetensors", {"a": tensor})


def refused(path, said):
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path)
    assert said in caught.value.message


def test_a_pipeline_is_its_components(tmp_path):
    (tmp_path / "model_index.json").write_text("{}")
    refused(tmp_path, "no folder of it holds a safetensors file")
    for name, text in (("unet", "aaaa"), ("vae", "bbbb"), (".hidden", "cccc"), (".", "dddd")):
        save(tmp_path / name, text)
    (tmp_path / "link").symlink_to("vae")
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler" / "s.json").write_text("{}")
    with Checkpoint.open(tmp_path) as c:
        assert list(c.tensors) == ["unet/a", "vae/a"] and list(c.components) == ["unet", "vae"]
        assert (c.read("unet/a"), c.read("vae/a", 1, 3)) == (b"aaaa", b"bb")
        assert set(c.sidecars) == {"model_index.json", "scheduler/s.json"}
        assert any("x.safetensors" in note for note in c.notes)
        assert any("link" in note for note in c.notes)


def test_what_leads_out_of_a_pipeline_is_not_taken(tmp_path):
    root = tmp_path / "pipe"
    root.mkdir()
    (root / "model_index.json").write_text("{}")
    save(root / "unet", "aaaa")
    save(tmp_path / "outside", "bbbb")
    (root / "secret").symlink_to(tmp_path / "outside" / "x.safetensors")
    (root / "vae").symlink_to(tmp_path / "outside")
    with Checkpoint.open(root) as c:
        assert list(c.components) == ["unet"] and c.sidecars == ("model_index.json",)
        assert sum("leads out" in note for note in c.notes) == 2
    (root / "text_encoder").mkdir()
    (root / "text_encoder" / "model.safetensors").symlink_to(tmp_path / "outside" / "x.safetensors")
    refused(root, "leads out of the directory")


def test_a_pipeline_within_a_pipeline_is_refused(tmp_path):
    for root in (tmp_path, tmp_path / "unet"):
        root.mkdir(exist_ok=True)
        (root / "model_index.json").write_text("{}")
    save(tmp_path / "unet", "aaaa")
    save(tmp_path / "unet" / "inner", "bbbb")
    refused(tmp_path, "a pipeline within a pipeline")
