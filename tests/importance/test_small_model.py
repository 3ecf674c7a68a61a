"""The small models that accuracy is measured on have in transformers the logits that they had when
they were trained."""

import dataclasses

import pytest
import torch

from bench.small_model import Model, Shape
from bench.train_moe import save

transformers = pytest.importorskip("transformers")

MOE = Shape(layers=2, hidden=64, inner=32, heads=4, shared=2, head=16, vocabulary=96, length=32)


@pytest.mark.parametrize("shape", [MOE, dataclasses.replace(MOE, experts=0)], ids=["moe", "dense"])
def test_transformers_has_the_same_logits(shape, tmp_path):
    torch.manual_seed(0)
    model = Model(shape)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_((4 * p).bfloat16())  # as saved; large enough for experts to differ
    save(model, tmp_path, None)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.randint(shape.vocabulary, (2, shape.length))
    with torch.no_grad():
        ours, uneven = model(ids)
        assert ours.std() > 0.5
        torch.testing.assert_close(ours, theirs(ids).logits, rtol=0, atol=1e-4)
    assert bool(uneven >= 0.5) == bool(shape.experts)
