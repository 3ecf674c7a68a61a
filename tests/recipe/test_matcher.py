"""Which rule takes a name, dead patterns, patterns that could take long, and fused groups."""

import fnmatch
import random
import time

import pytest

from lowbitcli.errors import RecipeError
from lowbitcli.recipe import Matcher, Pattern, Recipe, load
from lowbitcli.recipe.matcher import _Alternatives

P = "model.layers.0."


def recipe_of(tmp_path, text):
    path = tmp_path / "r.yaml"
    path.write_text(text)
    return load(str(path))


def decided(recipe, name):
    decision = Matcher(recipe).decide(name)
    return decision.rule.scheme if decision.rule else decision.reason


def test_the_first_rule_that_matches_wins(tmp_path):
    recipe = recipe_of(
        tmp_path,
        "rules:\n"
        "- {match: '*.layers.0.*', scheme: mxfp8, exclude: ['re:.*down_proj$', '*.up_proj']}\n"
        "- {match: ['re:.*self_attn', a.b], keep: true}\n"
        "- {match: '*_proj', scheme: fp8, exclude: c.x_proj}\n"
        "keep: ['*.layers.0.self_attn.o_*']\n",
    )
    matcher = Matcher(recipe)
    assert decided(recipe, P + "mlp.gate_proj.weight") == "mxfp8"
    assert decided(recipe, P + "mlp.down_proj.weight") == "fp8_tensor"
    assert decided(recipe, P + "mlp.up_proj.weight") == "fp8_tensor"
    assert decided(recipe, "model.layers.1.self_attn.q_proj.weight") == (
        "recipe keep 're:.*self_attn'"
    )
    assert decided(recipe, P + "self_attn.o_proj.weight") == (
        "recipe keep '*.layers.0.self_attn.o_*'"
    )
    assert decided(recipe, "model.layers.1.mlp.other.weight") == "no rule matches"
    assert decided(recipe, "c.x_proj.weight") == "no rule matches"
    assert matcher.decide(P + "mlp.down_proj.weight").where == f"{tmp_path}/r.yaml:4:11"
    assert matcher.decide("a.b.weight").exact
    assert not matcher.decide("model.layers.1.mlp.x_proj").exact


def test_an_exact_name_takes_a_tensor_of_a_kept_kind(tmp_path):
    text = "rules:\n- {match: lm_head, scheme: mxfp8}\n- {match: '*', scheme: nvfp4}\n"
    recipe = recipe_of(tmp_path, text)
    decision = Matcher(recipe).decide("lm_head.weight")
    assert (decision.rule.scheme, decision.exact) == ("mxfp8", True)
    assert decided(recipe_of(tmp_path, text.replace("lm_head", "lm_hea?")), "lm_head.weight") == (
        "head"
    )
    assert decided(recipe_of(tmp_path, "keep: lm_head\n" + text), "lm_head.weight") == (
        "recipe keep 'lm_head'"
    )


def test_a_kind_turned_off_is_quantized(tmp_path):
    recipe = recipe_of(tmp_path, "extends: nvfp4\nquantize: [heads]\n")
    assert decided(recipe, "lm_head.weight") == "nvfp4"
    assert decided(recipe, "model.embed_tokens.weight") == "embedding"


def test_names_that_are_too_long_are_kept():
    assert decided(load("nvfp4"), "a" * 256) == "nvfp4"
    assert decided(load("nvfp4"), "a" * 257) == "name longer than 256 characters"


def test_globs_are_those_of_fnmatch_on_names_and_modules():
    source = random.Random(7)
    hits = 0
    for _ in range(4000):
        glob = "".join(source.choices(["a", "b", ".", "*", "?", "[ab]", "[!a]", "**"], k=5))
        name = "".join(source.choices("ab.\n", weights=[5, 5, 3, 1], k=source.randint(0, 7)))
        name += source.choice(("", ".weight"))
        got = _Alternatives([(Pattern.model_validate(glob), True)]).first(name) is not None
        wanted = any(fnmatch.fnmatchcase(n, glob) for n in (name, name.removesuffix(".weight")))
        assert got == wanted, (glob, name)
        hits += wanted
    assert hits > 200


def test_case_10_dead_patterns(tmp_path):
    recipe = recipe_of(
        tmp_path, "extends: nvfp4\nexclude: ['lm_haed', 're:.*\\.gatee$', 'lm_head', 're:.*down']\n"
    )
    names = [P + "mlp.down_proj.weight", P + "mlp.gate.weight", "lm_head.weight"]
    with pytest.raises(RecipeError) as caught:
        Matcher(recipe).dead(names)
    where = f"{tmp_path}/r.yaml"
    assert caught.value.message == (
        f"{where}:2:11: 'lm_haed' matches no tensor\n"
        f"{where}:2:22: 're:.*\\\\.gatee$' matches no tensor"
    )
    assert caught.value.hint == (
        "near 'lm_haed': lm_head.weight\nnear 're:.*\\\\.gatee$': model.layers.0.mlp.gate.weight"
    )


def test_a_dead_pattern_in_the_middle_of_names(tmp_path):
    recipe = recipe_of(tmp_path, "extends: nvfp4\nexclude: ['*.self_atn.*', '*.mlq.*']\n")
    names = [P + "self_attn.q_proj.weight", P + "mlp.up_proj.weight"]
    with pytest.raises(RecipeError) as caught:
        Matcher(recipe).dead(names)
    assert caught.value.hint == (f"near '*.self_atn.*': {names[0]}\nnear '*.mlq.*': {names[1]}")


def test_dead_patterns_of_exclusions_but_not_of_shadowed_rules(tmp_path):
    text = "rules:\n- {match: '*', scheme: nvfp4, exclude: [x]}\n- {match: '*.a', scheme: mxfp8}\n"
    recipe = recipe_of(tmp_path, text)
    with pytest.raises(RecipeError, match=r"'x' matches no tensor$"):
        Matcher(recipe).dead(["b.a.weight"])
    Matcher(recipe).dead(["b.a.weight", "x.weight"])


@pytest.mark.parametrize(
    "text",
    [
        "(a+)+$", "(a|aa)+$", "(a*)*b", "(.*)*", "(a?){25}b", ".*.*.*.*x", "a*a*a*a*b",
        "(a|b|ab)*c", "a?" * 30 + "b", "(?:x|xx)(?:x|xx)" * 14, "(x+x+)+y", "a{1,20000}" * 4 + "b",
        "(?=(a+)+b)", "(?i)a", "(?i:a)", "(a)\\1", "(?P<n>a)", "a++b", "(?<=a+)b", "a{99999999999}",
        "[[a]", "(" * 17 + "a" + ")" * 17,
    ],
)  # fmt: skip
def test_patterns_that_could_take_long_are_refused(text):
    with pytest.raises(RecipeError, match="re:"):
        Pattern.model_validate("re:" + text)


@pytest.mark.parametrize(
    "text",
    [
        r".*mlp\.gate$", r".*experts\.\d+\.(gate|up|down)_proj$", "visual.*",
        r"model\.layers\.(0|1|31)\.",
        r"^(?!.*lm_head).*_proj\.weight$", r".*\.layers\.[0-9]{1,2}\..*proj", "(ab)+c", "lm_head",
    ],
)  # fmt: skip
def test_patterns_of_everyday_use_are_taken(text):
    assert Pattern.model_validate("re:" + text).is_regex


@pytest.mark.parametrize(
    "text", ["re:.*a.*a.*b", "re:" + "a?" * 23 + "b", "re:a*a*a*(b|c)", "*a" * 255 + "b"]
)
def test_the_worst_patterns_that_are_taken_end(text):
    search = _Alternatives([(Pattern.model_validate(text), True)])
    began = time.process_time()
    assert search.first("a" * 256) is None
    print(f"{text[:20]}: {time.process_time() - began:.3f} s")


def names_of(layers, experts):
    return [
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
        for layer in range(layers)
        for expert in range(experts)
        for part in ("gate", "up", "down")
    ]


def test_one_pass_over_many_names(tmp_path):
    recipe = recipe_of(
        tmp_path,
        "extends: nvfp4\nkeep: ['*.layers.0.*', 're:.*\\.9\\.(gate|up)']\n"
        "rules: [{match: '*.down_proj', scheme: mxfp8, exclude: '*.experts.1.*'}]\n",
    )
    names = names_of(64, 521)
    matcher = Matcher(recipe)
    began = time.perf_counter()
    for name in names:
        matcher.decide(name)
    middle = time.perf_counter()
    groups = recipe.groups(names)
    print(f"{len(names)} names: matched {middle - began:.2f} s, grouped", end=" ")
    print(f"{time.perf_counter() - middle:.2f} s")
    assert len(names) > 100_000
    assert len(groups) == 2 * 64 * 521
    assert len(set(groups.values())) == 64 * 521
    # what a character leads to is found out once: names share most of their beginnings
    assert len(matcher._set._globs._sets) < 200
    # a component is looked up once: as many as there are different ones
    parts = {part for name in names for part in name.split(".")}
    assert len(matcher._kinds._of_component) <= len(parts)


def test_case_9_groups():
    recipe = load("nvfp4")
    names = [P + f"self_attn.{one}_proj.weight" for one in "vkqo"]
    names += [P + "mlp.up_proj.weight", P + "mlp.up_proj.bias", "q_proj.weight"]
    names += [P + "mlp.experts.0.w1.weight", P + "mlp.experts.0.w3.weight"]
    names += [P + "mlp.experts.1.w3.weight", P + "mlp.experts.1.w2.weight"]
    attention = P + "self_attn.{q_proj,k_proj,v_proj}"
    assert recipe.groups(names) == {
        names[0]: attention,
        names[1]: attention,
        names[2]: attention,
        P + "mlp.up_proj.weight": P + "mlp.{gate_proj,up_proj}",
        P + "mlp.experts.0.w1.weight": P + "mlp.experts.0.{w1,w3}",
        P + "mlp.experts.0.w3.weight": P + "mlp.experts.0.{w1,w3}",
        P + "mlp.experts.1.w3.weight": P + "mlp.experts.1.{w1,w3}",
    }


def test_groups_of_the_recipe_and_groups_that_meet():
    recipe = Recipe.model_validate(
        {
            "rules": [{"match": "*", "scheme": "nvfp4"}],
            "fuse": [["{}.a.x.weight", "{}.b.x"], ["t.{}.o_proj", "t.{}.q_proj"]],
        }
    )
    names = ["m.a.x.weight", "m.b.x.weight", "n.a.x.weight", "t.0.q_proj", "t.0.k_proj"]
    groups = recipe.groups([*names, "t.0.o_proj", "u.0.o_proj"])
    assert groups["m.a.x.weight"] == groups["m.b.x.weight"] == "m.{a.x,b.x}"
    assert groups["n.a.x.weight"] == "n.{a.x,b.x}"
    assert groups["t.0.q_proj"] == groups["t.0.k_proj"] == groups["t.0.o_proj"]
    assert "u.0.o_proj" not in groups


@pytest.mark.parametrize("text", [r"a\.b$", r"a\.b\Z", r"a\.b(?!\.weight)", r"a\.b(?!.)"])
def test_regexes_are_tried_on_the_module_too(text):
    search = _Alternatives([(Pattern.model_validate("re:" + text), True)])
    assert search.first("a.b.weight")
    assert search.first("a.b.bias") is (True if text.endswith(".weight)") else None)


@pytest.mark.parametrize("keep", ("*.mlp.*", "*.layers.[0-9].*", "*.layers.12.*", "re:.*[.]7[.]"))
def test_names_that_differ_in_digits_are_decided_alike_only_where_no_pattern_tells(keep):
    recipe = Recipe.model_validate({"rules": [{"match": "*", "scheme": "nvfp4"}], "keep": [keep]})
    matcher = Matcher(recipe)
    names = [f"model.layers.{n}.{part}.weight" for n in range(14) for part in ("mlp.up", "q_proj")]
    alone = [Matcher(recipe)._decided(name) for name in names]
    assert [matcher.decide(name) for name in names] == alone
    assert len({decision.rule is None for decision in alone}) == 2
