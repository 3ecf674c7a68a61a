"""What recipes that search scales do without importance is said in the plan."""

import pytest

from lowbitcli.api import Request, plan_quantize
from tests.checkpoints import LAYER, single, weight


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("nvfp4-best", 1),
        ("mxfp4-best", 1),
        ("mixed-4.5bit", 1),
        ("nvfp4-qkv-fp8", 1),
        ("nvfp4", 0),
        ("mxfp8", 0),
    ],
)
def test_a_search_of_weights_alone(tmp_path, recipe, said):
    source = single(tmp_path / "m", {f"{LAYER}mlp.down_proj.weight": weight(64, 128)})
    for request in (Request(recipe=recipe), Request(recipe=recipe, fake=True)):
        notes = plan_quantize(source, None, request).notes
        told = [note for note in notes if "--importance FILE" in note]
        assert len(told) == said
        assert all(one.startswith("the scales of 1 weights are searched for") for one in told)
