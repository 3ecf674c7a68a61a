"""Recipe files: one that is wrong for every error, whole message and hint compared."""

import random
import re
import time

import pytest

from lowbitcli.errors import RecipeError, UsageError
from lowbitcli.recipe import for_scheme, init, load
from lowbitcli.recipe.document import MAX_BYTES, MAX_EVENTS, parse
from lowbitcli.recipe.model import SUGAR
from lowbitcli.schemes import BY_NAME

ANCHORS = 'put text that starts with *, & or ! in quotes: "*.weight"'
SHORTEST = 'the shortest recipe is: rules: [{match: "*", scheme: nvfp4}]'
RULE = 'rules: [{match: "*", scheme: nvfp4}]\n'

# text of the file -> message after the file's name, hint
EMPTY = 'to take everything, write "*"'
OPEN = "a [ is not closed", "as in [0-9], with no * before the ]; the character itself is [[]"
BAD = {
    "unknown key": ("ruls: 1", "1:1: key 'ruls' is unknown", "did you mean rules?"),
    "our own key": (
        RULE + "name: x",
        "2:1: key 'name' is unknown",
        "known: description, container, consumer, rules, keep, defaults, fuse, layout, thresholds, "
        "kv_scale, fake, nonfinite, measured, ignore, exclude, quantize, extends",
    ),
    "unknown key of a rule": (
        "rules:\n  - match: a\n    scheme: nvfp4\n    scal: x\n",
        "4:5: key 'scal' is unknown",
        "did you mean scale?",
    ),
    "unknown scheme": (
        "rules: [{match: '*', scheme: nvpf4}]",
        "1:30: scheme 'nvpf4' is unknown",
        "did you mean nvfp4 or NVFP4A16?",
    ),
    "unknown scale rule": (
        "rules: [{match: '*', scheme: nvfp4, scale: amx}]",
        "1:44: scale rule of nvfp4 'amx' is unknown",
        "did you mean amax?",
    ),
    "constant of no scale": (
        "rules: [{match: '*', scheme: nvfp4, activation_scale: 1e-44}]",
        "1:55: rules.0.activation_scale: is 1e-30 or more",
        "",
    ),
    "constant for weights alone": (
        "rules: [{match: '*', scheme: nvfp4, activations: none, activation_scale: 1}]",
        "1:50: an activation_scale is for activations: static, not none",
        "",
    ),
    "constant of MXFP8": (
        "rules: [{match: '*', scheme: mxfp8, activation_scale: 1}]",
        "1:30: mxfp8 has no static activations",
        "they are for fp8_tensor and nvfp4",
    ),
    "cache of infinity": (
        RULE + "kv_scale: 1e999",
        "2:11: kv_scale: is 1e+30 or less",
        "",
    ),
    "unknown activations": (
        "rules: [{match: '*', scheme: nvfp4, activations: dynamc}]",
        "1:50: activations option 'dynamc' is unknown",
        "did you mean dynamic?",
    ),
    "unknown container": (
        RULE + "container: compressed_tensors",
        "2:12: container 'compressed_tensors' is unknown",
        "did you mean compressed-tensors?",
    ),
    "unknown kind": (
        RULE + "quantize: [heds]",
        "2:12: kept kind 'heds' is unknown",
        "did you mean heads?",
    ),
    "unknown kind in defaults": (
        RULE + "defaults: {embedding: keep}",
        "2:12: kept kind 'embedding' is unknown",
        "did you mean embeddings?",
    ),
    "quantize is no list": (
        RULE + "quantize: heads",
        "2:11: quantize is a list of kept kinds",
        "",
    ),
    "unknown base": ("extends: nvpf4", "1:10: no recipe is called 'nvpf4'", "did you mean nvfp4?"),
    "base is no name": ("extends: 3", "1:10: extends names a recipe or a file", ""),
    "no rules": ("keep: a", "1:1: a recipe needs rules, or extends", SHORTEST),
    "empty": ("", "1:1: a recipe is a mapping", SHORTEST),
    "a list": ("- a", "1:1: a recipe is a mapping", SHORTEST),
    "rules are no list": ("rules: 3", "1:8: rules: is a list", ""),
    "rule is no mapping": ("rules: [a]", "1:9: rules.0: is a mapping", ""),
    "rule without match": (
        "rules: [{scheme: nvfp4}]",
        "1:9: rules.0.match: is missing",
        "",
    ),
    "rule with empty match": (
        "rules: [{match: [], scheme: nvfp4}]",
        "1:17: rules.0.match: has at least one item",
        "",
    ),
    "rule without scheme": (
        "rules:\n  - match: a",
        "2:5: a rule needs a scheme, or keep: true",
        "",
    ),
    "rule with both": (
        "rules: [{match: a, scheme: nvfp4, keep: true}]",
        "1:9: a rule has a scheme or keep: true, not both",
        "",
    ),
    "kept with options": (
        "rules: [{match: a, scale: amax, keep: true}]",
        "1:9: a rule that keeps has no scale and no activations",
        "",
    ),
    "keep: yes": (
        "rules: [{match: a, scheme: nvfp4, keep: yes}]",
        "1:41: rules.0.keep: is true or false",
        "",
    ),
    "scheme is no text": ("rules: [{match: a, scheme: 4}]", "1:28: rules.0.scheme: is text", ""),
    "pattern is no text": (RULE + "keep: [a, 3]", "2:11: keep.1: a pattern is text", ""),
    "pattern is empty": (
        RULE + "keep: ['']",
        "2:8: a pattern is empty",
        EMPTY,
    ),
    "pattern is long": (
        RULE + "keep: " + "a" * 513,
        "2:7: a pattern has at most 512 characters",
        "",
    ),
    "bad glob": (
        RULE + "keep: '[z-a]'",
        "2:7: '[z-a]' is no pattern: bad character range z-a",
        "",
    ),
    "open glob": (
        RULE + "keep: [a, '*.[abc']",
        "2:11: '*.[abc' is no pattern: " + OPEN[0],
        OPEN[1],
    ),
    "open glob of a threshold": (
        RULE + "thresholds: [{match: '*.[a*]', fail_under_db: 9}]",
        "2:22: '*.[a*]' is no pattern: " + OPEN[0],
        OPEN[1],
    ),
    "open glob of a layout": (
        RULE + "layout: {'x[': in_out}",
        "2:10: 'x[' is no pattern: " + OPEN[0],
        OPEN[1],
    ),
    "bad regex": (
        RULE + "keep: 're:('",
        "2:7: 're:(' is no regular expression: missing ), unterminated subpattern at position 0",
        "",
    ),
    "two names for one key": (
        "ignore: a\nkeep: b",
        "2:1: 'ignore' and 'keep' mean the same: write one of them",
        "",
    ),
    "kept and quantized": (
        RULE + "quantize: [heads]\ndefaults: {heads: keep}",
        "3:19: defaults keeps heads, and quantize lists them",
        "leave one of them out",
    ),
    "quantize beside defaults that are none": (
        RULE + "quantize: [heads]\ndefaults: 3",
        "3:11: defaults: is a mapping",
        "",
    ),
    "threshold that is left empty": (
        RULE + "thresholds: [{match: a, fail_under_db: }]",
        "2:14: a threshold has a fail_under_db, a max_rel_error, or both",
        "",
    ),
    "layout that is left empty": (
        RULE + "layout: {a: }",
        "2:10: layout of 'a' is a word, such as in_out",
        "",
    ),
    "star without quotes": (
        "rules: [{match: *, scheme: nvfp4}]",
        "1:18: is not YAML: expected alphabetic or numeric character, but found ','",
        'put text that starts with *, & or ! in quotes: "*.weight"',
    ),
    "tab": (
        "rules:\n\t- a",
        "2:1: is not YAML: found character '\\t' that cannot start any token",
        "indent with spaces",
    ),
    "control character": (
        RULE + 'keep: "a\x07"',
        "2:9: is not YAML: the character U+0007 cannot be in it",
        'write it as an escape in double quotes, such as "\\x07"',
    ),
    "nonfinite": (RULE + "nonfinite: drop", "2:12: nonfinite: is 'error' or 'keep'", ""),
    "threshold": (
        RULE + "thresholds: [{match: a, sqnr_db: 18}]",
        "2:25: key 'sqnr_db' is unknown",
        "known: match, fail_under_db, max_rel_error",
    ),
    "threshold of nothing": (
        RULE + "thresholds: [{match: a}]",
        "2:14: a threshold has a fail_under_db, a max_rel_error, or both",
        "",
    ),
    "two scale rules": (
        "rules: [{match: a, scheme: mxfp4_even, scale: floor}]",
        "1:47: scheme 'mxfp4_even' says scale: even, and the rule scale: floor",
        "leave one of them out",
    ),
    "scale rule of no scheme": (
        "rules: [{match: a, scheme: mxfp4_evn}]",
        "1:28: scheme 'mxfp4_evn' is unknown",
        "did you mean mxfp4_even or mxfp8_even?",
    ),
    "fake with a cache": (
        RULE + "fake: true\nkv_scale: 1.0",
        "3:11: a recipe that is fake stores no kv_scale",
        "leave one of them out",
    ),
    "fake with activations": (
        "fake: true\nrules: [{match: a, scheme: fp8, activation_scale: 0.5}]",
        "2:51: a recipe that is fake stores no activation_scale",
        "leave one of them out",
    ),
    "threshold that is no number": (
        RULE + "thresholds: [{match: a, fail_under_db: 18dB}]",
        "2:40: thresholds.0.fail_under_db: is a number",
        "",
    ),
    "consumer": (
        RULE + "consumer: [vllm, sgalng]",
        "2:18: consumer 'sgalng' is unknown",
        "did you mean sglang?",
    ),
    "consumer that is a number": (
        RULE + "consumer: 3",
        "2:11: consumer: is a name, such as vllm or vllm@0.33, or a list of them",
        "",
    ),
    "consumer of no version": (
        RULE + "consumer: vllm@",
        "2:11: 'vllm@' names no version",
        "as in vllm@0.33.0",
    ),
    "layout": (
        RULE + "layout: {'*.down_proj': in_uot}",
        "2:25: layout 'in_uot' is unknown",
        "did you mean in_out?",
    ),
    "layout of rows alone": (
        RULE + "layout: {'*.down_proj': interleaved}",
        "2:25: layout 'interleaved' is unknown",
        "did you mean out_in interleaved or in_out interleaved?",
    ),
    "layout is no mapping": (
        RULE + "layout: ['*']",
        '2:9: layout: is a mapping of patterns to words, such as {"*.experts.down_proj": in_out}',
        "",
    ),
    "layout is a word": (
        RULE + "layout: in_out",
        '2:9: layout: is a mapping of patterns to words, such as {"*.experts.down_proj": in_out}',
        "",
    ),
    "layout is a number": (
        RULE + "layout: {'*': 3}",
        "2:15: layout of '*' is a word, such as in_out",
        "",
    ),
    "layout of no pattern": (RULE + "layout: {'': in_out}", "2:10: a pattern is empty", EMPTY),
    "match is a number": (
        "rules:\n  - match: 5\n    scheme: nvfp4",
        "2:12: rules.0.match: takes a pattern or a list of patterns, not a number",
        "",
    ),
    "match is a mapping": (
        "rules: [{match: {a: b}, scheme: nvfp4}]",
        "1:17: rules.0.match: takes a pattern or a list of patterns, not a mapping",
        "",
    ),
    "keep is a boolean": (
        RULE + "keep: true",
        "2:7: keep: takes a pattern or a list of patterns, not true or false",
        "",
    ),
    "template": (
        RULE + "fuse: [['{}.a', b]]",
        "2:17: 'b' is no template of a name",
        'write {} once, then a dot and the rest of the name: "{}.w1"',
    ),
    "template without dot": (
        RULE + "fuse: [['{}a', '{}.b']]",
        "2:9: '{}a' is no template of a name",
        'write {} once, then a dot and the rest of the name: "{}.w1"',
    ),
    "group of one": (
        RULE + "fuse: [['{}.a', '{}.a.weight']]",
        "2:8: a fuse group has at least two different members",
        "",
    ),
    "group is no list": (
        RULE + "fuse: ['{}.a']",
        '2:8: fuse.0: a fuse group is a list of names, such as ["{}.w1", "{}.w3"]',
        "",
    ),
    "duplicate key": ("keep: a\nkeep: b", "2:1: 'keep' is there twice", ""),
    "key is no word": ("1: a", "1:1: a key is a word", 'put it in quotes: "..."'),
    "anchor": ("keep: &x a", "1:7: a recipe has no anchors or aliases (& and *)", ANCHORS),
    "alias": ("keep: *x", "1:7: a recipe has no anchors or aliases (& and *)", ANCHORS),
    "unquoted star": (
        "keep: *.weight",
        "1:7: a recipe has no anchors or aliases (& and *)",
        ANCHORS,
    ),
    "tag": ("keep: !!python/name:os.system a", "1:7: a recipe has no tags (!)", ANCHORS),
    "directive": ("%YAML 1.1\n---\nkeep: a", "2:1: a recipe has no % directives", ""),
    "documents": ("keep: a\n---\nb: a", "2:1: a recipe is one document", "remove the second ---"),
    "deep": ("[" * 40, "1:33: is nested deeper than 32", ""),
    "many": ("- a\n" * MAX_EVENTS, "4998:3: has more than 5000 parts", ""),
    "no YAML": ("{a: [}", "1:6: is not YAML: expected the node content, but found '}'", ""),
    "bad escape": ('a: "\\U00110000"', "1:1: is not YAML", ""),
    "large": (
        "#" * (MAX_BYTES + 1),
        "1:1: a recipe has at most 128 KiB",
        "use patterns instead of listing names",
    ),
    "no UTF-8": (b"a: b\n  \xff", "2:3: is not UTF-8 text", ""),
}


def attempt(folder, content):
    """Load a recipe with this content; the file is called r.yaml in messages."""
    path = folder / "r.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    try:
        return load(str(path))
    except RecipeError as error:
        error.message = error.message.replace(f"{folder}/", "")
        raise


@pytest.mark.parametrize("case", BAD)
def test_bad_recipes(tmp_path, case):
    text, message, hint = BAD[case]
    with pytest.raises(RecipeError) as caught:
        attempt(tmp_path, text)
    assert (caught.value.message, caught.value.hint) == (f"r.yaml:{message}", hint)
    assert caught.value.exit_code == 3


def test_missing_files_and_names(tmp_path):
    path = str(tmp_path / "none.yaml")
    with pytest.raises(RecipeError) as caught:
        load(path)
    assert caught.value.message == f"{path}:1:1: cannot be read: No such file or directory"
    with pytest.raises(RecipeError) as caught:
        load("fp8_dynamic")
    assert caught.value.message == "no recipe is called 'fp8_dynamic'"
    assert caught.value.hint == "did you mean fp8-dynamic?"
    (tmp_path / "r.yaml").mkdir()
    for name in (tmp_path, tmp_path / "r.yaml"):
        with pytest.raises(RecipeError, match="is a directory, and no recipe") as caught:
            load(str(name))
        assert caught.value.hint == "a recipe is named first, then a checkpoint"
    for name in ("", "defaults", "\0", "a/\0", "x" * 5000):
        with pytest.raises(RecipeError):
            load(name)


def test_extends(tmp_path):
    (tmp_path / "base.yaml").write_text(
        "extends: nvfp4\nkeep: ['*.o_proj']\nnonfinite: keep\ndefaults: {heads: quantize}\n"
    )
    (tmp_path / "own.yaml").write_text(
        "extends: base.yaml\ncontainer: lowbit\nignore: ['*.layers.0.*']\n"
        "rules: [{match: '*.down_proj', scheme: FP8_DYNAMIC, ignore: '*.1.*'}]\n"
    )
    recipe = load(str(tmp_path / "own.yaml"))
    assert [rule.scheme for rule in recipe.rules] == ["fp8_channel", "nvfp4"]
    assert recipe.rules[0].activations == "dynamic"
    assert [one.text for one in recipe.keep] == ["*.layers.0.*", "*.o_proj"]
    assert [one.shipped for one in recipe.rules[1].match] == [True]
    assert recipe.rules[0].exclude[0].where == f"{tmp_path}/own.yaml:4:61"
    assert (recipe.nonfinite, recipe.container, recipe.name) == ("keep", "lowbit", "own")
    assert "heads" not in [kind.name for kind in recipe.kinds]


def test_extends_in_a_circle(tmp_path):
    (tmp_path / "a.yaml").write_text("extends: b.yaml")
    (tmp_path / "b.yaml").write_text("extends: a.yaml")
    with pytest.raises(RecipeError, match=r"b\.yaml:1:10: 'a\.yaml' extends itself"):
        load(str(tmp_path / "a.yaml"))


def test_a_long_chain(tmp_path):
    for number in range(9):
        (tmp_path / f"{number}.yaml").write_text(f"extends: {number + 1}.yaml")
    with pytest.raises(RecipeError, match="recipes extend each other more than 8 times"):
        load(str(tmp_path / "0.yaml"))


def test_the_digest_is_of_the_meaning(tmp_path):
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text(
        "container: lowbit\nrules:\n- match: '*'\n  scheme: NVFP4A16\n"
        "quantize: [heads]\ndefaults: {}\n"
    )
    two.write_text(
        "# a comment\ndescription: x\ndefaults: {heads: quantize, norms: keep}\n"
        "rules: [{scheme: nvfp4, match: ['*'], scale: amax, activations: none}]\ncontainer: lowbit"
    )
    assert load(str(one)).digest == load(str(two)).digest
    for change in ("nonfinite: keep", "keep: a", "fuse: [['{}.a', '{}.b']]"):
        one.write_text(f"container: lowbit\n{RULE}quantize: [heads]\n{change}\n")
        assert load(str(one)).digest != load(str(two)).digest


def test_a_scheme_is_written_with_its_scale_rule_too(tmp_path):
    assert not SUGAR.keys() & BY_NAME.keys()
    for word, (scheme, scale) in SUGAR.items():
        said = []
        for text in (f"scheme: {word}", f"scheme: {scheme}, scale: {scale}"):
            (tmp_path / "r.yaml").write_text(f"rules: [{{match: a, {text}}}]")
            said.append(load(str(tmp_path / "r.yaml")))
        assert said[0] == said[1], word
        assert for_scheme(word).rules[0].scale == for_scheme(scheme, scale).rules[0].scale == scale
    with pytest.raises(RecipeError, match="'nvfp4_mse' says scale: mse, and the rule scale: amax"):
        for_scheme("nvfp4_mse", "amax")


def test_scalars_are_those_of_yaml_1_2():
    document = parse("[no, yes, NO, true, null, ~, 1, -2.5, 1e3, 0x1, 1_0, '1', 1.2.3]", "f")
    values = ["no", "yes", "NO", True, None, None, 1, -2.5, 1000.0, "0x1", "1_0", "1", "1.2.3"]
    assert document == values


def test_a_scheme_that_would_be_none(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("rules:\n- {match: '*', scheme: keep}\n")
    with pytest.raises(RecipeError, match="scheme 'keep' is unknown") as caught:
        load(str(path))
    assert "`keep: true` in place of `scheme`" in (caught.value.hint or "")


def test_schemes_on_the_command_line():
    with pytest.raises(UsageError, match="no scheme is called 'nvfp5'"):
        for_scheme("nvfp5")
    with pytest.raises(RecipeError, match="scale rule of nvfp4 'mxe' is unknown"):
        for_scheme("nvfp4", scale="mxe")
    with pytest.raises(RecipeError, match="container 'x' is unknown"):
        for_scheme("nvfp4", container="x")


def test_the_starter_recipe_loads(tmp_path):
    (tmp_path / "r.yaml").write_text(init(["a", "b"]))
    recipe = load(str(tmp_path / "r.yaml"))
    assert [rule.scheme for rule in recipe.rules] == ["nvfp4"]
    assert "# Written for a checkpoint of 2 tensors." in init(["a", "b"])


SEED = """\
description: seed
extends: nvfp4
container: auto
rules:
  - match: ["*.mlp.*", "re:.*layers\\\\.[0-9]+\\\\.(q|k)_proj$"]
    scheme: mxfp8
    exclude: '*.0.*'
  - {match: lm_head, keep: true}
keep: ["*.head.*"]
defaults: {embeddings: quantize}
fuse: [["{}.wq", "{}.wk"]]
nonfinite: keep
"""
BITS = ["*", "&a ", "!!x ", "[", "]", "{", "}", ":", "- ", "\n", "\t", "'", '"', "\\", "%", "|",
        "re:", "(a+)+", ".*", "{}", "\0", "\ufeff", "\u2028", "null", "---\n", "? ", "#", "1e999",
        "nan", "\x85", "\U0001f600"]  # fmt: skip


def test_mutated_recipes_load_or_say_where(tmp_path):
    source = random.Random(16)
    loaded = refused = 0
    slowest = 0.0
    for _ in range(400):
        text = SEED
        for _ in range(source.randint(1, 4)):
            at, cut = source.randrange(len(text)), source.choice((0, 0, 1, 5, 30))
            text = text[:at] + source.choice(BITS) * source.choice((1, 1, 3)) + text[at + cut :]
        began = time.perf_counter()
        try:
            attempt(tmp_path, text)
            loaded += 1
        except RecipeError as error:
            refused += 1
            place = error.message.split(": ")[0].split(":")
            assert place[0] in ("r.yaml", "nvfp4.yaml"), error.message
            assert all(part.isdigit() for part in place[1:3]), error.message
        slowest = max(slowest, time.perf_counter() - began)
    print(f"{loaded} loaded, {refused} refused, slowest {slowest:.3f} s")
    assert loaded > 10
    assert refused > 100


M = MAX_BYTES - 10
BOMBS = {
    "brackets": "[" * M,
    "braces": "{" * M,
    "questions": "? " * (M // 2),
    "dashes": "- " * (M // 2),
    "lists": "- - - -\n" * (M // 8),
    "words": "a: " + "x " * (M // 2),
    "dots": ".. " * (M // 3),
    "folded": "a: >\n" + "  x\n" * (M // 4),
    "newlines": "\n" * M,
    "tag": "!<" + "%41" * (M // 3) + "> a",
    "laughs": "a: &a [x,x]\n" + "".join(f"b{i}: &b{i} [*a,*a]\n" for i in range(4000)),
    "keys": "".join(f"k{i}: 1\n" for i in range(M // 12)),
    "globs": "keep: [" + "'*[a]*', " * 4900 + "]",
    "regexes": "keep:\n" + "- 're:[a-z](b|c)'\n" * 4900,
    "long regexes": "keep:\n" + f"- 're:{'[a-z]b' * 84}'\n" * (M // 515),
    "parentheses": "keep: 're:" + "(" * 250 + "a" + ")" * 250 + "'",
    "number": RULE + "keep: " + "9" * (M - 30),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs_are_refused_in_a_second(tmp_path, bomb):
    began = time.process_time()
    with pytest.raises(RecipeError) as caught:
        attempt(tmp_path, BOMBS[bomb])
    assert re.match(r"r\.yaml:\d+:\d+: ", caught.value.message)
    took = time.process_time() - began
    print(f"{took:.2f} s")
    assert took < 2  # measured below 1; the rest is for a busy machine
