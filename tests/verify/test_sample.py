"""A sample is the same for a seed, leaves out no kind and no part of the depth, and is told."""

import pytest

from lowbitcli import api
from lowbitcli.errors import UsageError
from lowbitcli.verify import Sample
from tests.checkpoints import single, weight
from tests.verify.planted import poke, told

LAYERS = 12


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sample")
    tensors = {
        f"model.layers.{layer}.mlp.{name}.weight": weight(32, 32, seed=layer)
        for layer in range(LAYERS)
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    tensors["model.embed_tokens.weight"] = weight(64, 32)
    source = single(folder / "source", tensors)
    api.quantize(source, folder / "out", api.Request(scheme="nvfp4"), device="cpu")
    return source, folder / "out"


def looked(made, sample, **options):
    source, output = made
    return api.verify(output, against=source, device="cpu", sample=sample, **options)


def layers(found, kind):
    names = found.sample["tensors"]
    return sorted(int(name.split(".")[2]) for name in names if f".{kind}." in name)


def test_every_kind_is_looked_at_all_over_the_depth(made):
    found = looked(made, "25%")
    for kind in ("gate_proj", "up_proj", "down_proj"):
        first, second, third = layers(found, kind)
        assert (second - first, third - second) == (4, 4)
    assert "model.embed_tokens.weight" in found.sample["tensors"]
    assert (found.sample["share"], found.sample["seed"]) == (0.25, 0)
    assert sum(row.figures is not None for row in found.weights) == 9
    assert len(found.weights) == 36
    (check,) = [one for one in found.checks if one.what.startswith("a sample is looked at")]
    assert (check.count, check.note) == (10, "of 37, seed 0: 10 looked at")
    assert found.passed


def test_a_seed_chooses_and_repeats(made):
    chosen = {text: tuple(looked(made, text).sample["tensors"]) for text in ("5%", "5%:1", "5%:2")}
    assert len(set(chosen.values())) > 1
    assert tuple(looked(made, "5%").sample["tensors"]) == chosen["5%"]
    assert looked(made, None).sample is None
    assert len(looked(made, "100%").sample["tensors"]) == 37


def test_what_is_not_looked_at_is_not_found_and_structure_is_whole(made, tmp_path):
    source, output = made
    names = looked(made, "5%").sample["tensors"]
    other = next(
        f"model.layers.{n}.mlp.down_proj.weight"
        for n in range(LAYERS)
        if f"model.layers.{n}.mlp.down_proj.weight" not in names
    )
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in output.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    poke(copy, f"{other.removesuffix('.weight')}.weight_packed", 7, lambda byte: byte ^ 0x11)
    assert told(api.verify(copy, against=source, device="cpu", sample="5%")) == []
    assert not api.verify(copy, against=source, device="cpu").passed
    (copy / "config.json").write_text("{}")
    assert not api.verify(copy, device="cpu", sample="5%").passed


@pytest.mark.parametrize("text", ["0%", "101%", "5", "five%", "5%:x", "-1%", ""])
def test_what_is_no_share(text):
    with pytest.raises(UsageError, match="no share"):
        Sample.of(text)
