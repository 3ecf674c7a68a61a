"""Patterns for names: few, and they take what is meant and nothing else."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbitcli.recipe import Matcher, Recipe
from lowbitcli.search.patterns import natural, patterns, skeleton_of

SCHEMES = {"a": "nvfp4", "b": "mxfp8", "c": "fp8_tensor"}


def assigned(found, names):
    """Return label -> names as a recipe with these patterns has it."""
    rules = [{"match": one, "scheme": SCHEMES[label]} for label, one in found.items() if one]
    matcher = Matcher(Recipe.model_validate({"rules": rules}))
    back = {scheme: label for label, scheme in SCHEMES.items()}
    return {
        name: back[d.rule.scheme] if (d := matcher.decide(name)).rule else None for name in names
    }


def layers(number, *kinds):
    return [f"model.layers.{n}.{kind}.weight" for n in range(number) for kind in kinds]


def test_a_kind_that_is_alike_everywhere_is_one_glob():
    names = layers(12, "mlp.up_proj", "mlp.down_proj")
    labels = {name: "a" if "up" in name else "b" for name in names}
    others = ["model.embed_tokens.weight", "model.layers.3.input_layernorm.weight"]
    found = patterns(labels, others)
    assert found == {"a": ["model.layers.*.mlp.up_proj"], "b": ["model.layers.*.mlp.down_proj"]}
    assert assigned(found, [*names, *others]) == {**labels, **dict.fromkeys(others)}


def test_layers_are_listed_and_kinds_of_the_same_layers_are_one_expression():
    names = layers(12, "self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj")
    labels = {name: "b" if ".1." in name or ".11." in name else "a" for name in names}
    found = patterns(labels)
    assert found["b"] == [
        r"re:model\.layers\.(1|11)\.(mlp\.down_proj|self_attn\.k_proj|self_attn\.q_proj)$"
    ]
    assert len(found["a"]) == 1
    assert assigned(found, names) == labels


def test_what_two_kinds_have_in_common_stands_in_front():
    labels = {name: "ab"["layers.1." in name] for name in layers(3, "mlp.a_proj", "mlp.b_proj")}
    assert patterns(labels)["b"] == [r"re:model\.layers\.1\.mlp\.(a_proj|b_proj)$"]


def test_experts_are_any_number_and_layers_are_listed():
    names = [
        f"model.layers.{n}.mlp.experts.{e}.{kind}.weight"
        for n in range(4)
        for e in range(20)
        for kind in ("gate_proj", "up_proj")
    ]
    labels = {name: "a" if "layers.2" in name else "b" for name in names}
    found = patterns(labels)
    assert found["a"] == [r"re:model\.layers\.2\.mlp\.experts\.[0-9]+\.(gate_proj|up_proj)$"]
    assert assigned(found, names) == labels


def test_a_glob_that_would_take_more_is_an_expression():
    labels = {"layers.0.proj.weight": "a", "layers.1.proj.weight": "a"}
    other = "layers.1.inner.proj.weight"
    found = patterns(labels, [other])
    assert found == {"a": [r"re:layers\.[0-9]+\.proj$"]}
    assert assigned(found, [*labels, other]) == {**labels, other: None}


def test_a_number_without_a_label_is_not_taken():
    labels = {f"layers.{n}.proj.weight": "a" for n in range(3)}
    found = patterns(labels, ["layers.3.proj.weight"])
    assert assigned(found, [*labels, "layers.3.proj.weight"])["layers.3.proj.weight"] is None


def test_blocks_in_stages_are_told_apart_by_both_numbers():
    labels = {
        f"stages.{s}.blocks.{b}.fc.weight": "b" if (s, b) in ((0, 1), (2, 0)) else "a"
        for s in range(3)
        for b in range(2)
    }
    found = patterns(labels)
    assert found["b"] == [r"re:stages\.(0\.blocks\.1|2\.blocks\.0)\.fc$"]
    assert assigned(found, labels) == labels


def test_very_many_layers_are_several_expressions():
    labels = {f"h.{n}.{'x' * 40}.proj.weight": "ab"[n * n % 7 > 2] for n in range(600)}
    found = patterns(labels)
    assert all(len(one) <= 515 for several in found.values() for one in several)
    assert assigned(found, labels) == labels


@pytest.mark.parametrize(
    "name",
    [
        *("proj", "a[b].weight", "a[b.weight", "a[z-a].weight", "a*b.weight", "re:x.weight"),
        *("re:(.weight", "a+(b).0.c.weight", "ü.1.weight"),
    ],
)
def test_names_with_signs_of_patterns_stand_for_themselves(name):
    found = patterns({name: "a"}, ["other.weight", "aab.weight", "ab.weight"])
    assert assigned(found, [name, "other.weight", "ab.weight"]) == {
        name: "a",
        "other.weight": None,
        "ab.weight": None,
    }


PART = st.sampled_from(["0", "1", "2", "10", "mlp", "up", "x-y", "b"])
NAME = st.lists(PART, min_size=1, max_size=4).map(lambda parts: ".".join(["m", *parts, "weight"]))


@given(st.dictionaries(NAME, st.sampled_from(["a", "b", "c", None]), min_size=1, max_size=14))
@settings(max_examples=80, deadline=None)
def test_every_name_gets_its_label_and_no_other(wanted):
    labels = {name: label for name, label in wanted.items() if label is not None}
    found = patterns(labels, [name for name, label in wanted.items() if label is None])
    assert set(found) == set(labels.values())
    assert assigned(found, wanted) == wanted


def test_natural_order_and_skeletons():
    assert sorted(["a.10.b", "a.9.b", "a.b"], key=natural) == ["a.9.b", "a.10.b", "a.b"]
    assert skeleton_of("m.0.q2.11.w.weight") == ("m.#.q2.#.w", ("0", "11"))
