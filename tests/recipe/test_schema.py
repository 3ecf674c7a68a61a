"""The JSON schema of recipes, asked by a validator of its own: what `load` takes is valid, and what
it refuses is not, wherever a schema can tell."""

import pytest

from lowbitcli.errors import RecipeError
from lowbitcli.recipe import Recipe, init, load, schema, shelf
from lowbitcli.recipe.document import parse
from tests.recipe.test_load import BAD

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")

RULE = 'rules: [{match: "*", scheme: nvfp4}]\n'


@pytest.fixture(scope="module")
def validator():
    jsonschema.Draft202012Validator.check_schema(schema())
    return jsonschema.Draft202012Validator(schema())


@pytest.mark.parametrize("name", shelf.recipes())
def test_shipped_recipes_are_valid(validator, name):
    text = shelf.recipes()[name].read_text()
    validator.validate(parse(text, name))


GOOD = {
    "the starter": init(["a"]),
    "extends alone": "extends: nvfp4\nquantize: [heads]\n",
    "every key": """
description: all of it
extends: nvfp4
container: modelopt
consumer: [vllm@0.33, sglang]
rules:
  - match: ["*.mlp.*", "re:.*_proj$"]
    scheme: nvfp4
    scale: four_over_six
    activations: static
    activation_scale: 1
    exclude: "*.0.*"
  - {match: a, keep: true, ignore: [b]}
  - {match: c, scheme: fp8, activation_scale: 0.5}
  - {match: d, scheme: FP8_BLOCK, scale: ue8m0, keep: false}
keep: ["*.o_proj"]
defaults: {modulations: keep, heads: quantize}
quantize: [embeddings]
fuse: [["{}.w1", "{}.w3", "a.{}.b"]]
layout: [{"*.down_proj": in_out}, {"*.gate_up_proj": in_out interleaved}]
thresholds: [{match: "*", fail_under_db: 18}, {match: [a], max_rel_error: 0.1}]
kv_scale: 1.0
fake: false
nonfinite: keep
""",
    "schemes with their scale rules": "rules: [{match: a, scheme: mxfp4_even}, "
    "{match: b, scheme: nvfp4_mse, scale: mse, activations: static, activation_scale: 1}]\n",
    "keys without values": RULE + "keep:\nignore: [a]\nconsumer:\nlayout:\nextends:\n",
    "no consumer": RULE + "consumer: []\n",
    "fake, with a container and a layout": RULE
    + "fake: true\ncontainer: comfyui\nlayout: {'*.down_proj': in_out}\n",
}


@pytest.mark.parametrize("case", GOOD)
def test_what_is_loaded_is_valid(validator, tmp_path, case):
    (tmp_path / "r.yaml").write_text(GOOD[case])
    load(str(tmp_path / "r.yaml"))
    validator.validate(parse(GOOD[case], "r"))


# Wrong in ways that a schema cannot tell.
UNTOLD = {
    "unknown base": "what recipes there are",
    **dict.fromkeys((name for name in BAD if "glob" in name), "patterns"),
    "bad regex": "patterns",
    "kept and quantized": "that two keys say of the same kind",
    "threshold that is left empty": "that null is nothing",
    "group of one": "names that are the same without .weight",
}
MORE = {
    "scale of another scheme": "rules: [{match: a, scheme: fp8, scale: mse}]",
    "static INT8": "rules: [{match: a, scheme: int8, activations: static}]",
    "constant for dynamic": "rules: [{match: a, scheme: fp8, activations: dynamic, "
    "activation_scale: 1}]",
    "constant of MXFP8": "rules: [{match: a, scheme: mxfp8, activation_scale: 1}]",
    "constant of zero": "rules: [{match: a, scheme: fp8, activation_scale: 0}]",
    "constant that is kept": "rules: [{match: a, keep: true, activation_scale: 1}]",
    "kept by two names": RULE + "keep: [a]\nexclude: [b]\n",
    "neither rules nor extends": "rules:\nextends:\n",
    "negative cache": RULE + "kv_scale: -1",
    "infinite cache": RULE + "kv_scale: 1e999",
    "cache of text": RULE + "kv_scale: one",
}


@pytest.mark.parametrize("case", [*BAD, *MORE])
def test_what_is_refused_is_not_valid(validator, tmp_path, case):
    text = BAD[case][0] if case in BAD else MORE[case]
    (tmp_path / "r.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(RecipeError):
        load(str(tmp_path / "r.yaml"))
    try:
        document = parse(text if isinstance(text, str) else text.decode(errors="replace"), "r")
    except RecipeError:
        return  # no document that a validator could be shown
    assert validator.is_valid(document) == (case in UNTOLD)


def test_an_editor_is_told_what_each_key_is():
    found = schema()
    keys = set(Recipe.model_fields) - {"name"} | {"extends", "quantize", "ignore", "exclude"}
    assert set(found["properties"]) == keys
    assert all(one["description"] for one in found["properties"].values())
    assert all(one["description"] for one in found["$defs"]["Rule"]["properties"].values())
