"""Many globs at once take what each of them takes alone, as a regular expression; whatever they and
the names are, in bounded time."""

import random
import re
import time

import pytest

from lowbitcli.errors import RecipeError
from lowbitcli.recipe import Matcher, Pattern, Recipe, globs, load, pattern_set
from lowbitcli.recipe.globs import Globs, TooSlowError
from lowbitcli.recipe.pattern_set import PatternSet
from lowbitcli.regex import MAX_NAME

PIECES = (
    *("a", "b", ".", "a.b", ".weight", "1", "12", "\n", "é", "[", "]", "!", "-", "^", "\\"),
    *("*", "*", "*", "**", "?", "[ab]", "[!a]", "[0-9]", "[a*]", "[]a]", "[^a]", "[a-", "[\\]"),
)
LETTERS = "aabb..112é\n[]!-^\\"


def drawn(draw):
    return "".join(draw.choice(PIECES) for _ in range(draw.randint(1, 7)))


def named(draw):
    tail = draw.choice(("", "", ".weight", ".weight.weight"))
    return "".join(draw.choice(LETTERS) for _ in range(draw.randint(0, 12))) + tail


def alone(pattern, name):
    compiled = re.compile(pattern.source([0]), re.DOTALL)
    names = (name, name.removesuffix(".weight")) if pattern.is_regex else (name,)
    return any(compiled.match(x) is not None for x in names)


@pytest.mark.parametrize("seed", range(3))
def test_together_they_take_what_each_takes(seed):
    draw = random.Random(seed)
    patterns = []
    while len(patterns) < 150:
        try:
            patterns.append(Pattern.model_validate(drawn(draw)))
        except RecipeError:  # such as [b-a]
            continue
    patterns += [Pattern.model_validate(x) for x in ("re:a.*b$", "re:.*1", "re:(?=a).*é")]
    draw.shuffle(patterns)
    every, hits = PatternSet(patterns), 0
    names = [named(draw) for _ in range(400)]
    for name in names:
        taking = [number for number, one in enumerate(patterns) if alone(one, name)]
        start = draw.randrange(len(patterns))
        stop = draw.choice((None, draw.randrange(len(patterns) + 1)))
        first = next((n for n in taking if start <= n and (stop is None or n < stop)), None)
        assert every.first(name, start, stop) == first, (name, start, stop)
        hits += len(taking)
    found = {n for n, one in enumerate(patterns) if any(alone(one, name) for name in names)}
    assert every.taking(names) == found
    assert hits > 1000


def test_what_is_kept_of_earlier_names_may_be_forgotten(monkeypatch):
    one = Globs(["*a*b", "a?c.*", "*.w"])
    names = ["ab", "abc.x", "xaxb", "q.w", "q.w.weight", "é" * 40]
    first = [one.taking(name) for name in names]
    monkeypatch.setattr(globs, "_MOST_HELD", 0)
    assert [one.taking(name) for name in names] == first == [(0,), (1,), (0,), (2,), (2,), ()]


def test_the_rule_that_comes_first_wins_also_where_both_name_it():
    rules = [{"match": "a", "scheme": "mxfp8"}, {"match": "a.weight", "scheme": "nvfp4"}]
    found = Matcher(Recipe.model_validate({"rules": rules})).decide("a.weight")
    assert found.rule is not None and found.rule.scheme == "mxfp8" and found.exact


def test_excluded_from_one_rule_it_goes_to_the_next():
    rules = [
        {"match": ["*.x", "a.*"], "exclude": ["a.b*", "q", "re:.*z.x"], "scheme": "mxfp8"},
        {"match": "*", "exclude": "a.bc", "scheme": "nvfp4"},
        {"match": "a.bc", "scheme": "mxfp4"},
    ]
    matcher = Matcher(Recipe.model_validate({"rules": rules}))
    wanted = {"a.c": "mxfp8", "a.bb": "nvfp4", "a.bc.weight": "mxfp4", "q": "nvfp4", "z.x": "nvfp4"}
    for name, scheme in wanted.items():
        rule = matcher.decide(name).rule
        assert rule is not None and rule.scheme == scheme, name


# Patterns by hundreds over the names of a large model, made long.
LONG = [f"{'a' * 200}.{i % 61}.{i // 61}.w{i % 7}.weight" for i in range(18_000)]
SLOW = {
    "stars": lambda i: "*" + "a*" * 90 + f"x{i}",
    "classes": lambda i: "*" + "[a1]*" * 60 + f"x{i}",
    "any": lambda i: "?*" * 120 + f"x{i}",
    "expressions": lambda i: f"re:.*a.*a.*x{i}",
}


@pytest.mark.parametrize("kind", SLOW)
def test_hundreds_with_many_stars_over_a_large_model(kind, tmp_path):
    path = tmp_path / "r.yaml"
    lines = [f'  - {{match: "{SLOW[kind](i)}", scheme: nvfp4}}' for i in range(300)]
    path.write_text("\n".join(["rules:", *lines]))
    matcher = Matcher(load(str(path)))
    began = time.process_time()
    try:
        matcher.dead(LONG)
    except RecipeError as error:
        said = error.message
    else:
        raise AssertionError("they match nothing")
    took = time.process_time() - began
    print(f"F14 {kind}: 300 patterns over 18,000 names, {took:.2f} s")
    assert took < 2
    # Globs are fast, and what they have not found is what is wrong; expressions are not.
    words = "could take too long" if kind == "expressions" else "matches no tensor"
    assert re.match(re.escape(str(path)) + r":\d+:\d+: ", said) and words in said, said[:200]


def test_globs_that_would_take_too_long_together_are_refused(monkeypatch):
    monkeypatch.setattr(globs, "MAX_WORK", 10_000)
    one = Globs([f"*a*b*{i}" * 3 for i in range(300)])
    with pytest.raises(TooSlowError):
        for number in range(1000):
            one.taking(f"a{number}b{number * 7}a{number}b{number * 3}")
    rules = [{"match": f"*a*b*{i}" * 3, "scheme": "nvfp4"} for i in range(300)]
    matcher = Matcher(Recipe.model_validate({"rules": rules}))
    with pytest.raises(RecipeError, match="with 299 others and these names, could take too long"):
        for number in range(1000):
            matcher.decide(f"a{number}b{number * 7}a{number}b{number * 3}")


def test_expressions_that_take_their_time_are_refused_and_usual_ones_are_not(monkeypatch):
    monkeypatch.setattr(pattern_set, "PATIENCE", 0.02)
    texts = ("re:.*y", "re:.*a.*a.*x", "re:z")
    slow = PatternSet([Pattern.model_validate(text) for text in texts])
    with pytest.raises(RecipeError, match=r"'re:\.\*a\.\*a\.\*x', with 2 others"):
        for _ in range(200):
            slow.first("a" * MAX_NAME)
    usual = PatternSet([Pattern.model_validate(r"re:.*mlp\.(gate|up|down)_proj$")])
    for number in range(5_000):
        usual.first(f"model.layers.{number % 61}.mlp.experts.{number}.q_proj.weight")
