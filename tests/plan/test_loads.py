"""A recipe that names its consumer: what that would not load is refused when it is planned, and
what it loads otherwise than meant is said, in the words of `verify --for`."""

import pytest

from lowbitcli import api
from lowbitcli.api import Request, plan_quantize
from lowbitcli.containers.reading import CONSUMERS, READS, VERSIONS, No
from lowbitcli.errors import RecipeError, UsageError
from lowbitcli.plan.consumers import asked
from lowbitcli.verify import FAIL
from tests.checkpoints import CONFIG, LAYER, single, weight, write

ATTENTION = [f"{LAYER}self_attn.{one}_proj.weight" for one in "qkvo"]
MLP = [f"{LAYER}mlp.{one}_proj.weight" for one in ("gate", "up", "down")]
EXPERT = [f"{LAYER}mlp.experts.0.{one}_proj.weight" for one in ("gate", "up", "down")]
QWEN = {**CONFIG, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}


def source_of(folder, names=(*ATTENTION, *MLP), config=QWEN):
    tensors = {name: weight(128, 128) for name in names}
    return single(folder / "m", {**tensors, "lm_head.weight": weight(64, 128)}, config)


def planned(folder, consumer, text, source=None, **request):
    recipe = folder / "recipe.yaml"
    recipe.write_text(f"consumer: {consumer}\n{text}")
    source = source or source_of(folder)
    return plan_quantize(source, None, Request(recipe=recipe, allow_split_groups=True, **request))


def rule(scheme, container="auto", more=""):
    return f"container: {container}\nrules:\n  - {{match: '*', scheme: {scheme}{more}}}\n"


def refused(folder, consumer, text, **how):
    with pytest.raises(RecipeError) as caught:
        planned(folder, consumer, text, **how)
    column = 18 if consumer.startswith("[vllm, t") else 11  # that of the one which refuses
    where = f"{folder}/recipe.yaml:1:{column}: "
    assert caught.value.message.startswith(where)
    return caught.value.message.removeprefix(where), caught.value.hint


def test_what_a_consumer_loads_is_planned_without_a_word(tmp_path):
    alone = planned(tmp_path, "[]", rule("nvfp4"))
    named = planned(tmp_path, "[vllm, sglang]", rule("nvfp4"))
    assert named.notes == alone.notes
    assert named.digest == alone.digest  # who loads it changes nothing of what is written


def test_a_scheme_that_it_does_not_read(tmp_path):
    message, hint = refused(tmp_path, "sglang", rule("mxfp8"))
    assert message.startswith("SGLang 0.5.23 would not load this as it is meant:\n  ")
    assert "No compressed-tensors compatible scheme" in message
    assert hint == "it reads mxfp8 in --container native-mxfp8"
    plan = planned(tmp_path, "sglang", rule("mxfp8", "native-mxfp8"))
    assert plan.counts["mxfp8"][0] == 7


def test_the_first_of_several_that_does_not(tmp_path):
    message, _ = refused(tmp_path, "[vllm, transformers@5.24]", rule("nvfp4", "modelopt"))
    assert message.startswith("transformers 5.24.0 would not load")


def test_experts_that_are_read_wrong(tmp_path):
    source = source_of(tmp_path, EXPERT)
    message, hint = refused(tmp_path, "transformers", rule("nvfp4"), source=source)
    assert "it leaves out the global scale of experts" in message
    assert "fp8_channel" in hint
    assert planned(tmp_path, "vllm", rule("nvfp4"), source=source).counts["nvfp4"][0] == 3


def test_an_architecture_whose_scales_are_dropped(tmp_path):
    source = source_of(tmp_path, config=CONFIG)
    message, _ = refused(tmp_path, "sglang", rule("fp8_block128", "deepseek"), source=source)
    assert "renames weight_scale_inv and drops all 7" in message
    plan = planned(tmp_path, "sglang", rule("fp8_block128"), source=source)
    assert plan.container == "compressed-tensors"


def test_a_container_that_it_does_not_know(tmp_path):
    alone = tmp_path / "alone.safetensors"
    write(alone, {name: weight(128, 128) for name in ATTENTION})
    message, hint = refused(tmp_path, "vllm", rule("nvfp4"), source=alone)
    assert "it does not know lowbit's own container" in message
    assert hint == "it reads nvfp4 in --container compressed-tensors or modelopt"
    plan = planned(tmp_path, "comfyui", rule("nvfp4"), source=alone)
    assert plan.container == "comfyui"


def test_groups_that_are_split(tmp_path):
    text = f"rules:\n  - {{match: {ATTENTION[0]}, scheme: fp8_channel}}\n"
    text += "  - {match: '*', scheme: nvfp4}\n"
    message, _ = refused(tmp_path, "vllm", text)
    assert "served as one matrix, in different schemes" in message


def test_rows_of_merged_columns(tmp_path):
    tensors = {name: weight(96, 128) for name in MLP[:2]}
    source = single(tmp_path / "m", tensors, QWEN)
    message, _ = refused(tmp_path, "vllm", rule("fp8_block128"), source=source)
    assert "96 rows are no multiple of 128" in message


def test_heads_and_weights_alone(tmp_path):
    text = rule("fp8_block128", "deepseek") + "quantize: [heads]\n"
    assert "the head is quantized" in refused(tmp_path, "vllm", text)[0]
    message, _ = refused(tmp_path, "tensorrt-llm", rule("nvfp4"))
    assert "it takes NVFP4 with 4-bit activations alone" in message


def test_what_it_loads_otherwise_is_a_note(tmp_path):
    plan = planned(tmp_path, "tensorrt-llm", rule("mxfp4"))
    assert any("it reads it as weight-only W4A16_MXFP4" in note for note in plan.notes)


def test_another_version_is_told_apart(tmp_path):
    other = "vllm 0.12 is asked for, and what it loads is known of vLLM 0.33.0 only"
    assert other in planned(tmp_path, "vllm@v0.12", rule("nvfp4")).notes
    for known in ("vllm@0.33", "vllm@0.33.0", "vllm"):
        assert not any("is asked for" in x for x in planned(tmp_path, known, rule("nvfp4")).notes)


def test_verify_names_them_as_recipes_do():
    vllm, old, trt = asked(["vLLM,vllm@0.12", "tensorrt-llm@2edf354d, vllm"])
    assert [(one.name, one.version) for one in (vllm, old)] == [("vllm", ""), ("vllm", "0.12")]
    assert (vllm.doubt, trt.doubt) == ("", "")
    assert old.doubt == "vllm 0.12 is asked for, and what it loads is known of vLLM 0.33.0 only"
    with pytest.raises(UsageError, match="'sglang@' names no version") as told:
        asked(["vllm", "sglang@"])
    assert told.value.hint == "as in sglang@0.5.23"
    with pytest.raises(UsageError, match="no consumer 'vlm'") as told:
        asked(["vlm@1"])
    assert told.value.hint == "did you mean vllm?"
    assert asked(["vllm,vllm"]) == asked(["vllm"])
    for names in ("", ",vllm", "vllm,"):
        with pytest.raises(UsageError, match="without a name"):
            asked([names])


def test_fake_weights_are_loaded_by_all(tmp_path):
    plan = planned(tmp_path, f"[{', '.join(CONSUMERS[:4])}]", rule("mxfp8"), fake=True)
    assert plan.container == "plain"


@pytest.mark.parametrize("consumer", CONSUMERS)
def test_no_table_answers_otherwise_than_the_plan(tmp_path, consumer):
    """What is written and then refused by `verify --for` is refused by the plan, and only that."""
    source = source_of(tmp_path)
    pairs = [
        (container, scheme)
        for container in ("compressed-tensors", "modelopt")
        for scheme in ("fp8_channel", "mxfp8")
    ]
    for number, (container, scheme) in enumerate(pairs):
        output = tmp_path / f"out{number}"
        request = Request(scheme=scheme, container=container)
        api.quantize(source, output, request, device="cpu")
        found = api.verify(output, device="cpu", consumers=[consumer])
        wrong = [p for p in found.problems if p.kind == "consumer" and p.severity == FAIL]
        answer = READS[consumer].get(container, {}).get(scheme)
        text = rule(scheme, container)
        if wrong:
            message, _ = refused(tmp_path, consumer, text, source=source)
            assert message.startswith(VERSIONS[consumer])
        else:
            assert not isinstance(answer, No) or answer.where == "experts"
            assert planned(tmp_path, consumer, text, source=source).quantized
