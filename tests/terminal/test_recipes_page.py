"""docs/recipes.md: every example is loaded, asked of the schema and planned for the family that it
is for, every command is run, and every table is held against the code."""

import json
import re
import shlex
from pathlib import Path

import pytest

from lowbitcli.api import Request, plan_quantize
from lowbitcli.containers import CONTAINERS
from lowbitcli.containers.reading import CONSUMERS
from lowbitcli.errors import RecipeError
from lowbitcli.plan.inspection import inspect
from lowbitcli.recipe import Recipe, Rule, load, schema, shelf
from lowbitcli.recipe.document import parse
from lowbitcli.schemes import SCHEMES
from tests import families
from tests.checkpoints import CONFIG, LAYER, single, weight

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "recipes.md").read_text()
BLOCKS = re.findall(r"^```(\S+)(?: ([^\n]*))?\n(.*?)^```$", PAGE, flags=re.M | re.S)
EXAMPLES = [(said or "", text) for kind, said, text in BLOCKS if kind == "yaml"]
GOOD = [(said, text) for said, text in EXAMPLES if len(said.split()) == 1]


def table(heading):
    """Return the rows of the first table behind a heading, cells without backquotes."""
    part = PAGE.partition(f"\n## {heading}\n")[2]
    rows = re.search(r"^\|.*?(?=^[^|]|\Z)", part, flags=re.M | re.S)
    assert rows is not None
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in rows[0].splitlines()[2:]
    ]


@pytest.mark.parametrize(("family", "text"), GOOD, ids=range(len(GOOD)))
def test_examples_plan(tmp_path, family, text):
    Path("recipe.yaml").write_text(text)
    source = families.make(tmp_path / "source", family)
    plan = plan_quantize(source, None, Request(recipe="recipe.yaml"))
    recipe = load("recipe.yaml")
    wanted = {rule.scheme for rule in recipe.rules if rule.scheme}
    done = {weight.target.name for weight in plan.quantized}
    assert done <= wanted and done, "every example quantizes something"
    if "extends" not in text:
        assert done == wanted, "every rule takes something"
    assert plan.container == "plain" if recipe.fake else plan.container != "plain"


def test_every_example_is_for_a_family_and_there_are_enough():
    assert len(GOOD) >= 20
    assert {said.split()[0] for said, _ in EXAMPLES} <= set(families.FAMILIES)
    assert len({said for said, _ in GOOD}) >= 10


def test_examples_are_valid():
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    validator = jsonschema.Draft202012Validator(schema())
    for said, text in EXAMPLES:
        assert validator.is_valid(parse(text, "r")) == ("wrong" not in said), text


def test_what_is_refused_is(tmp_path):
    ((said, text),) = [one for one in EXAMPLES if "refused" in one[0]]
    Path("recipe.yaml").write_text(text)
    source = families.make(tmp_path / "source", said.split()[0])
    with pytest.raises(RecipeError, match=r"SGLang 0.5.23 would not load this") as caught:
        plan_quantize(source, None, Request(recipe="recipe.yaml"))
    assert caught.value.hint == "it reads mxfp8 in --container native-mxfp8"


def test_what_is_wrong_is_answered_so(lowbit):
    ((_, text),) = [one for one in EXAMPLES if "wrong" in one[0]]
    Path("recipe.yaml").write_text(text)
    (answer,) = [text for kind, _, text in BLOCKS if kind == "text"]
    assert lowbit("recipe", "check", "recipe.yaml") == (3, "", answer)


def test_commands_run(lowbit):
    single(Path("model"), {f"{LAYER}mlp.down_proj.weight": weight(64, 64),
                           f"{LAYER}self_attn.k_proj.weight": weight(64, 64),
                           f"{LAYER}self_attn.v_proj.weight": weight(64, 64)}, CONFIG)  # fmt: skip
    amax = json.loads(next(text for kind, said, text in BLOCKS if said == "amax.json"))
    for one in "kv":
        amax[f"{LAYER}self_attn.{one}_proj"] = 3.0
    Path("amax.json").write_text(json.dumps(amax))
    lines = [line for kind, _, text in BLOCKS if kind == "sh" for line in text.splitlines()]
    assert len(lines) >= 9
    for line in lines:
        program, *words = shlex.split(line)
        assert program == "lowbit"
        code, out, err = lowbit(*words)
        assert code == 0, (line, err)
        assert out or "init" in line, line
    assert any(one.scheme is not None for one in inspect("out").weights)
    code, out, _ = lowbit("plan", "model", "--activation-scales", "amax.json")
    assert "static: scaled by numbers that are stored" in out


def test_the_shipped_recipes_are_those_of_the_table():
    listed = [name for row in table("What ships") for name in re.findall(r"`([\w.-]+)`", row[0])]
    assert sorted(listed) == sorted(shelf.recipes())


def test_scale_rules_are_those_of_the_schemes():
    found = {row[0].strip("`"): tuple(re.findall(r"`(\w+)`", row[1])) for row in
             table("How scales are found")}  # fmt: skip
    assert found == {scheme.name: scheme.rules for scheme in SCHEMES}


def test_keys_are_those_of_the_language():
    rows = {row[0].strip("`"): row[1] for row in table("All keys")}
    assert set(rows) == (set(Recipe.model_fields) - {"name"}) | {"extends"}
    for key in set(Rule.model_fields) - {"where", "said"}:
        assert f"`{key}" in rows["rules"], key
    assert {name for name in CONSUMERS if f"`{name}`" in rows["consumer"]} == set(CONSUMERS)
    written = {one.name for one in CONTAINERS if one.writes}
    assert set(re.findall(r"`([\w-]+)`", rows["container"])) == written | {"auto"}


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda one: one.name)
def test_a_scale_rule_of_another_scheme_is_refused_with_its_own(tmp_path, scheme):
    for rule in sorted({rule for one in SCHEMES for rule in one.rules}):
        text = f"rules: [{{match: '*', scheme: {scheme.name}, scale: {rule}}}]\n"
        (tmp_path / "r.yaml").write_text(text)
        if rule in scheme.rules:
            assert load(str(tmp_path / "r.yaml")).rules[0].scale == rule
            continue
        with pytest.raises(RecipeError) as caught:
            load(str(tmp_path / "r.yaml"))
        assert f"scale rule of {scheme.name} {rule!r} is unknown" in caught.value.message
        assert any(own in caught.value.hint for own in scheme.rules)


def test_links_lead_somewhere():
    for link in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (ROOT / "docs" / link).resolve().exists(), link
