"""The bench of peers: what it knows, and how their numbers become figures; no peer is needed."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoints import single

pytest.importorskip("transformers")
peers = pytest.importorskip("bench.accuracy_peers")
ROOT = Path(__file__).parents[1]


@pytest.fixture
def model(tmp_path):
    torch.manual_seed(0)
    names = ("attention.self.query", "attention.output.dense", "intermediate.dense", "output.dense")
    weights = {f"encoder.layer.0.{one}.weight": torch.randn(32, 64) for one in names}
    source = single(tmp_path / "m", weights | {"pooler.dense.weight": torch.randn(32, 32)})
    return peers.Model(source, lambda folder: {"loss": float(loss(source, folder))})


def loss(source, folder):
    one, other = (load_file(x / "model.safetensors") for x in (source, folder))
    return sum((one[name] - other[name]).square().sum() for name in one)


def test_each_peer_says_what_it_needs():
    listed = {path.stem for path in (ROOT / "bench" / "peers").glob("*.txt")}
    makefile = (ROOT / "Makefile").read_text()
    assert listed == set(peers.PEERS)
    assert f"PEERS ?= {' '.join(peers.PEERS)}\n" in makefile


def test_a_peer_is_given_what_lowbit_quantizes_and_nothing_else_moves(tmp_path, model):
    given = []

    def run(w, name):
        given.append(name)
        return w * 0.5

    found = peers.one_by_one(run, model, tmp_path)
    assert (len(given), found["matrices"]) == (4, 4)
    assert not any("pooler" in name for name in given)
    assert found["mse"] == pytest.approx(0.25)
    signal = sum(w.square().sum() for w in load_file(model.source / "model.safetensors").values())
    pooler = load_file(model.source / "model.safetensors")["pooler.dense.weight"].square().sum()
    assert found["loss"] == pytest.approx(float(signal - pooler) / 4, rel=1e-5)
    assert not (tmp_path / "copy").exists()


def test_what_a_peer_skips_lowbit_skips_too(tmp_path, model):
    recipe = peers._without_skipped("mse", tmp_path)
    plan = peers.api.plan_quantize(model.source, None, peers.api.Request(recipe=recipe))
    assert [one.name.removeprefix("encoder.layer.0.") for one in plan.quantized] == [
        "attention.self.query.weight",
        "intermediate.dense.weight",
    ]
