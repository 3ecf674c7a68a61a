"""The bench of accuracy: what it is asked for, and one row of a model that no package has."""

import pytest
import torch

from tests.checkpoints import single

pytest.importorskip("transformers")
accuracy = pytest.importorskip("bench.accuracy")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "minilm,bert"], "--only: 'bert' is none of synthetic, minilm, rxnfp, smollm2"),
        (["--rows", "nvfp5"], "--rows: 'nvfp5' is none of fp8_tensor, "),
        (["--only", "trained"], "trained needs --trained and --corpus"),
    ],
)
def test_what_it_does_not_know_is_said(capsys, words, message):
    with pytest.raises(SystemExit) as raised:
        accuracy.asked(words)
    assert (raised.value.code, message in capsys.readouterr().err) == (2, True)


def test_the_quick_form_and_the_whole(capsys):
    quick = accuracy.asked(["--only", "minilm", "--rows", "nvfp4,nvfp4-mse"])
    assert (quick.only, quick.rows) == ("minilm", "nvfp4,nvfp4-mse")
    assert accuracy.asked([]).only == "synthetic,minilm,rxnfp,smollm2"


def test_a_row_goes_the_whole_way(tmp_path):
    weights = {"model.layers.0.mlp.up_proj.weight": torch.randn(32, 64).bfloat16()}
    source = single(tmp_path / "m", weights)
    found = {}
    for name in ("nvfp4", "nvfp4-mse"):
        model = accuracy.Model(source, lambda folder: {"files": len(list(folder.iterdir()))})
        found[name] = accuracy.row(name, model, tmp_path)
    assert found["nvfp4"]["files"] >= 1
    assert 0 < found["nvfp4-mse"]["mse"] < found["nvfp4"]["mse"] < 0.02
    assert 4.5 <= found["nvfp4"]["bits"] < 4.6
