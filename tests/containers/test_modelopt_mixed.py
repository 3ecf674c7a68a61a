"""Several schemes in one checkpoint of ModelOpt's form: what vLLM 0.33 takes, and what it does
not."""

import pytest

from lowbitcli.api import Request, inspect, quantize
from tests import checkpoints
from tests.checkpoints import LAYER, header_of, single, weight

DOWN, OUT = LAYER + "mlp.down_proj", LAYER + "self_attn.o_proj"
TENSORS = {DOWN + ".weight": weight(256, 128), OUT + ".weight": weight(128, 128)}
ALGORITHMS = {
    "fp8_channel": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
    "fp8_block128": {"quant_algo": "fp8_pb_wo"},
    "mxfp8": {"quant_algo": "MXFP8", "group_size": 32},
    "nvfp4": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
}


@pytest.mark.parametrize("one", ALGORITHMS)
@pytest.mark.parametrize("other", ALGORITHMS)
def test_any_two_schemes_mix_in_modelopt(tmp_path, one, other):
    """vLLM 0.33 takes all four in the layers of MIXED_PRECISION."""
    if one == other:
        return
    recipe = tmp_path / "recipe.yaml"
    attention, rest = f'match: "*self_attn*", scheme: {one}', f'match: "*", scheme: {other}'
    activations = {"nvfp4": "none"}
    rules = [
        f"  - {{{text}, activations: {activations.get(scheme, 'dynamic')}}}\n"
        for text, scheme in ((attention, one), (rest, other))
    ]
    recipe.write_text("rules:\n" + "".join(rules))
    source = single(tmp_path / "source", TENSORS)
    request = Request(recipe=recipe, container="modelopt")
    done = quantize(source, tmp_path / "out", request, device="cpu")
    said = checkpoints.quantization_of(done.output)
    assert said["quant_algo"] == "MIXED_PRECISION"
    assert said["quantized_layers"] == {OUT: ALGORITHMS[one], DOWN: ALGORITHMS[other]}
    found = inspect(done.output)
    assert found.findings == ()
    schemes = {w.name: w.scheme.name for w in found.weights if w.scheme}
    assert schemes == {OUT + ".weight": one, DOWN + ".weight": other}
    header = header_of(done.output / "model.safetensors")
    if one == "fp8_channel":
        assert header[OUT + ".weight_scale"]["shape"] == [128]
    assert not [name for name in header if name.endswith("input_scale")]


@pytest.mark.parametrize(("scheme", "said"), [("fp8_channel", 1), ("mxfp8", 0)])
def test_experts_that_vllm_has_not_in_modelopt_s_form_are_said(tmp_path, scheme, said):
    name = LAYER + "mlp.experts.0.down_proj.weight"
    source = single(tmp_path / "source", {**TENSORS, name: weight(64, 64)})
    done = quantize(source, tmp_path / "out", Request(scheme=scheme, container="modelopt"))
    notes = [note for note in done.plan.notes if "no experts in fp8_channel" in note]
    assert len(notes) == said
