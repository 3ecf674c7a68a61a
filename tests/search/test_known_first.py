"""What `recipe auto` knows before it measures: which schemes a container can hold, what is the
least, and how names that look like none or like patterns are said in a recipe."""

import pytest

from lowbitcli import api
from lowbitcli.errors import RecipeError, UsageError
from lowbitcli.search import bundle
from lowbitcli.search.candidates import candidates
from lowbitcli.search.units import paper
from tests.checkpoints import single, weight
from tests.search import models


def choose(source, output=None, **wanted):
    return api.choose(source, api.Wanted(**wanted), api.Allowed("cpu"), output)


@pytest.mark.parametrize(
    ("container", "schemes", "out"),
    [
        ("modelopt", ["nvfp4", "mxfp8", "keep"], {"fp8": "fp8_tensor in modelopt cannot have"}),
        ("native-mxfp8", ["mxfp8", "keep"], {"nvfp4": "has no nvfp4", "fp8": "has no fp8_tensor"}),
        ("deepseek", ["fp8_block128", "keep"], {}),
    ],
)
def test_what_a_container_cannot_hold_is_no_choice(tmp_path, lowbit, container, schemes, out):
    source = models.dense(tmp_path / "m", layers=1)
    found = choose(source, bits=16, container=container)
    assert [one.name for one in found.candidates] == list(found.uniform) == schemes
    assert list(found.left_out) == list(out)
    for name, why in out.items():
        assert why in found.left_out[name]
        assert f"# without  {name}: {found.left_out[name]}" in found.chosen.text
        with pytest.raises(RecipeError, match=why) as told:
            choose(source, bits=16, container=container, schemes=f"keep,{name}")
        assert "out of --schemes" in told.value.hint
    said = lowbit("recipe", "auto", source, "--container", container)
    assert said.code == 0
    assert [x.split(": ")[1] for x in said.out.splitlines() if "left out" in x] == list(out)


def test_a_list_of_which_a_container_holds_nothing_is_refused(tmp_path):
    source = models.dense(tmp_path / "m", layers=1)
    some = candidates("fp8,keep")
    with api.Checkpoint.open(source) as checkpoint:
        assert paper(checkpoint, some, "lowbit", need_all=False).left_out == {}
        with pytest.raises(RecipeError, match="cannot have activations 'dynamic'"):
            paper(checkpoint, some, "modelopt", need_all=False)


def test_a_module_without_a_name(tmp_path, lowbit):
    source = single(tmp_path / "m", {".weight": weight(64, 64), "a.weight": weight(64, 64)})
    path = tmp_path / "r.yaml"
    found = choose(source, path, bits=7, schemes="nvfp4,fp8")
    assert sorted(found.chosen.names) == ["fp8", "nvfp4"]
    assert [score.name for score in found.scores] == [".weight", "a"]
    plan = api.plan_quantize(source, None, api.Request(recipe=path))
    assert [w.name for w in plan.quantized] == [".weight", "a.weight"]
    assert lowbit("recipe", "check", path, source).code == 0


def test_a_budget_below_the_least_is_refused_before_a_weight_is_read(tmp_path, monkeypatch):
    source = models.dense(tmp_path / "m", layers=1)
    monkeypatch.setattr(bundle.Rows, "parts", None)
    for wanted in ({"bits": 4.2}, {"size": 1000}, {"bits": 4.2, "floor_db": 30}):
        with pytest.raises(UsageError, match=r"too few: the least is [\d.]+$"):
            choose(source, **wanted)


def test_names_that_look_like_patterns_and_layers_that_are_drafts(tmp_path):
    tensors = {f"model.layers.{n}.mlp.down_proj.weight": weight(64, 64, seed=n) for n in range(4)}
    tensors |= {"odd[0-9].weight": weight(64, 64, seed=9), "odd5.weight": weight(64, 64, seed=10)}
    tensors["a*b's.weight"] = weight(64, 64, seed=11)
    tensors["long." * 60 + "weight"] = weight(64, 64, seed=12)
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 3, "num_nextn_predict_layers": 1}
    source = single(tmp_path / "m", tensors, config)
    path = tmp_path / "r.yaml"
    found = choose(source, path, bits=6.0, schemes="nvfp4,fp8")
    plan = api.plan_quantize(source, None, api.Request(recipe=path))
    assert len(plan.quantized) == len(found.scores) == 6
    assert plan.bits_per_weight == pytest.approx(found.bits(found.chosen.solution.cost))


def test_weights_of_which_nothing_is_lost_are_exact(tmp_path, lowbit):
    zero = weight(64, 64) * 0
    source = single(tmp_path / "m", {"a.weight": zero, "b.weight": zero})
    said = lowbit("recipe", "auto", source, "--bits", "5", "-o", tmp_path / "r.yaml")
    assert said.code == 0
    assert "weights, exact over 2 matrices" in said.out
    text = (tmp_path / "r.yaml").read_text()
    assert "over 2 matrices: exact" in text and "inf" not in text
