"""What a run did to each weight is in its manifest, and verify holds each to just that."""

import json

import pytest
import torch

from lowbitcli import api
from lowbitcli.checkpoint import Checkpoint, manifest
from tests import checkpoints
from tests.checkpoints import single, weight
from tests.verify.planted import DOWN, EMBED, NORM, change, told

HEAD = "lm_head.weight"
NUMBERS = "quantized weights against the source, element by element"


def note(found, what=NUMBERS):
    (one,) = [check for check in found.checks if check.what == what]
    return one.note


def recipe(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return path


def made_of(output):
    with Checkpoint.open(output) as found:
        proof = manifest.of(found)
    assert proof is not None and proof.made is not None
    return proof.made


AGAIN = "quantized again, some rows of each run"


@pytest.fixture
def many(tmp_path):
    """Weights of which, in a sixth, the global scale has no reciprocal of a reciprocal."""
    tensors = {
        f"model.layers.{n}.self_attn.o_proj.weight": weight(32, 64, 0.1 + n / 7, seed=n)
        for n in range(24)
    }
    return single(tmp_path / "source", tensors)


def test_a_manifest_says_what_was_rounded_and_why_the_rest_was_kept(tmp_path):
    tensors = {DOWN + "weight": weight(64, 64), HEAD: weight(64, 64), NORM: weight(1, 64)[0]}
    text = 'rules: [{match: "*", scheme: nvfp4, scale: mse}]\nkeep: ["*down_proj*"]\n'
    text += "quantize: [heads]\n"
    source = single(tmp_path / "source", tensors)
    for path in (source, source / "model.safetensors"):
        request = api.Request(recipe=recipe(tmp_path, text), container="lowbit")
        made = made_of(api.quantize(path, None, request).output)
        assert dict(made.rounded) == {HEAD: "mse"}
        assert set(made.kept) == {DOWN + "weight", NORM}
        assert made.kept[NORM] == "norm"


def test_what_was_made_of_a_weight_is_part_of_the_plan_s_name(tmp_path):
    source = single(tmp_path / "source", {DOWN + "weight": weight(64, 64), HEAD: weight(64, 64)})
    one = api.plan_quantize(source, None, api.Request(scheme="nvfp4"))
    text = 'rules: [{match: "*", scheme: nvfp4}]\nkeep: ["lm_head.*"]\nquantize: [heads]\n'
    other = api.plan_quantize(source, None, api.Request(recipe=recipe(tmp_path, text)))
    assert one.digest != other.digest


def test_a_recode_whose_global_scale_moved_passes(many, tmp_path):
    one = api.quantize(many, tmp_path / "one", api.Request(container="lowbit"))
    two = api.quantize(one.output, tmp_path / "two", api.Request(container="compressed-tensors"))
    assert two.moved > 0
    assert made_of(one.output).rounded.keys() == checkpoints.read(many).keys()
    assert made_of(two.output).rounded == {}
    found = api.verify(one.output, against=many, device="cpu")
    assert told(found) == [] and note(found) == f"24 exactly; 24 {AGAIN}"
    for against in (many, one.output):
        found = api.verify(two.output, against=against, device="cpu")
        assert told(found) == [] and note(found) == "24 to 2^-21"


def test_codes_that_another_writer_made_are_held_to_the_widened_interval(planted, tmp_path):
    made = planted.copy("mxfp8", "lowbit")

    def other_way(tensors):  # a tie of E4M3, rounded away from the even code
        w = checkpoints.read(planted.source)[DOWN + "weight"].float()
        scale = torch.exp2(tensors[DOWN + "weight_scale"].float() - 127)
        q = (w.reshape(64, 2, 32) / scale[..., None]).reshape(64, 64)
        codes = tensors[DOWN + "weight"].view(torch.uint8)
        up = (codes.to(torch.int16) + 1).to(torch.uint8).view(torch.float8_e4m3fn).float()
        tie = (q.abs() == (up.abs() + tensors[DOWN + "weight"].float().abs()) / 2) & (q != 0)
        assert tie.any()
        codes += tie.to(torch.uint8)

    change(made, other_way)
    recoded = api.quantize(made, tmp_path / "out", api.Request(scheme="mxfp8", container="lowbit"))
    assert told(api.verify(recoded.output, against=planted.source, device="cpu")) == []


def test_a_changed_code_of_a_recode_is_still_found(planted, tmp_path):
    made = planted.made("nvfp4", "lowbit")
    out = api.quantize(made, tmp_path / "out", api.Request(container="compressed-tensors")).output
    (out / "lowbit.json").unlink()
    change(out, lambda tensors: tensors[DOWN + "weight_packed"].bitwise_xor_(1))
    found = api.verify(out, against=planted.source, device="cpu")
    assert ("fail", "bound", DOWN + "weight") in told(found)


@pytest.fixture
def in_bf16(tmp_path):
    """FP8 as a writer that computes in bf16 leaves it, its scales in bf16 too."""
    w = weight(64, 64)
    scale = (w.abs().amax(1, keepdim=True) / 448).to(torch.bfloat16)
    codes = (w / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    source = single(tmp_path / "source", {DOWN + "weight": w})
    made = api.quantize(source, tmp_path / "made", api.Request(scheme="FP8_DYNAMIC")).output
    tensors = {DOWN + "weight": codes, DOWN + "weight_scale": scale}
    return source, single(tmp_path / "theirs", tensors, checkpoints.config_of(made))


def test_a_writer_in_bf16_is_known_by_its_scales(in_bf16, tmp_path):
    source, theirs = in_bf16
    found = api.verify(theirs, against=source, device="cpu")
    assert told(found) == [] and note(found) == "1 to 2^-7"
    request = api.Request(scheme="fp8_channel", container="lowbit")
    recoded = api.quantize(theirs, tmp_path / "recoded", request)
    found = api.verify(recoded.output, against=source, device="cpu")
    assert told(found) == [] and note(found) == "1 to 2^-7"


def test_scales_in_fp32_are_no_such_sign(in_bf16):
    source, theirs = in_bf16

    def finer(tensors):
        tensors[DOWN + "weight_scale"] = tensors[DOWN + "weight_scale"].float() * (1 + 2.0**-20)

    change(theirs, finer)
    found = api.verify(theirs, against=source, device="cpu")
    assert told(found) == [("fail", "bound", DOWN + "weight")]
    assert note(found) == "1 to 2^-21"


@pytest.mark.parametrize("stored", [3.0, 3.0 * (1 + 2.0**-20)])
def test_a_global_scale_that_is_a_bf16_number_is_one(tmp_path, stored):
    source = single(tmp_path / "source", {DOWN + "weight": weight(64, 64)})
    made = api.quantize(source, tmp_path / "made", api.Request(scheme="nvfp4")).output
    (made / "lowbit.json").unlink()
    change(made, lambda tensors: tensors[DOWN + "weight_global_scale"].fill_(stored))
    found = api.verify(made, against=source, device="cpu")
    assert note(found) == ("1 to 2^-7" if stored == 3.0 else "1 to 2^-21")


def test_a_fake_output_of_a_recipe_of_other_kinds_passes(tmp_path):
    tensors = {DOWN + "weight": weight(64, 64), HEAD: weight(64, 64), EMBED: weight(96, 64)}
    source = single(tmp_path / "source", tensors)
    text = 'rules: [{match: "*", scheme: fp8_channel}]\nquantize: [heads]\nkeep: ["*down_proj*"]\n'
    request = api.Request(recipe=recipe(tmp_path, text), fake=True)
    out = api.quantize(source, tmp_path / "out", request).output
    found = api.verify(out, against=source, device="cpu")
    assert found.failures == () and found.untouched == 2
    assert [(row.name, row.how) for row in found.weights] == [(HEAD, "fake")]
    reasons = {one.name: one.reason for one in found.kept}
    assert reasons[EMBED] == "embedding" and "down_proj" in reasons[DOWN + "weight"]
    assert reasons[HEAD] == ""

    def touch(tensors):
        tensors[DOWN + "weight"][0, 0] += 1

    document = json.loads((out / "lowbit.json").read_text())
    change(out, touch)
    (out / "lowbit.json").write_text(json.dumps(document))
    found = api.verify(out, against=source, device="cpu")
    assert ("fail", "changed", DOWN + "weight") in told(found), (
        "kept by the recipe: its bytes count"
    )


@pytest.mark.parametrize("container", ["modelopt", "compressed-tensors"])
def test_modelopt_divides_in_the_weight_s_dtype(tmp_path, container):
    """Its scale is an fp32 scalar, and bf16 divided by a scalar is bf16: a second rounding."""
    w = weight(64, 64, seed=3)
    scale = w.float().abs().max() / 448
    codes = (w / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    source = single(tmp_path / "source", {DOWN + "weight": w})
    made = api.quantize(source, tmp_path / "made", api.Request(scheme="fp8")).output
    said, inputs = checkpoints.config_of(made), {}
    if container == "modelopt":
        said["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "FP8"}
        inputs = {DOWN + "input_scale": torch.tensor(1.0)}
    shape = (1,) if container == "compressed-tensors" else ()
    tensors = {DOWN + "weight": codes, DOWN + "weight_scale": scale.reshape(shape), **inputs}
    theirs = single(tmp_path / "theirs", tensors, said)
    found = api.verify(theirs, against=source, device="cpu")
    assert found.container == container
    assert found.passed == (container == "modelopt")
    assert note(found) == ("1 to 2^-7" if container == "modelopt" else "1 to 2^-21")


def test_a_kept_matrix_in_8_bits_is_what_the_manifest_says_it_is(tmp_path):
    """A source may hold raw FP8: what was copied from it is no fault of the output, which has a
    manifest; without one nothing says what its codes mean."""
    raw = weight(32, 32).to(torch.float8_e4m3fn)
    source = single(tmp_path / "source", {"a.weight": weight(32, 32), "b.weight": raw})
    api.quantize(source, tmp_path / "out", api.Request(scheme="fp8"), device="cpu")
    assert api.verify(tmp_path / "out", device="cpu").passed
    (tmp_path / "out" / "lowbit.json").unlink()
    found = api.verify(tmp_path / "out", device="cpu")
    assert [(one.kind, one.tensor) for one in found.problems] == [("unknown", "b.weight")]


@pytest.mark.parametrize(("scheme", "least"), [("int8_channel", -128), ("int4_g128", -8)])
def test_what_the_least_code_stands_for_is_not_clipped(tmp_path, scheme, least):
    """Codes of another writer, who uses it: the largest code's elements beyond it are clipped."""
    values = torch.arange(128).repeat(2, 1).remainder(2 * -least).add(least).float()
    values[0, 1], values[1, 5] = least - 0.75, -least + 0.25
    name = "model.layers.0.mlp.down_proj."
    source = single(tmp_path / "source", {name + "weight": values})
    out = api.quantize(
        source, tmp_path / "out", api.Request(scheme=scheme, container="lowbit"), device="cpu"
    ).output
    (out / "lowbit.json").unlink()

    def edit(tensors):
        codes = values.round().clamp(least, -least - 1).to(torch.int8)
        scale = tensors[name + "weight_scale"]
        tensors[name + "weight_scale"] = torch.ones_like(scale)
        tensors[name + "weight"] = codes if scheme == "int8_channel" else packed_int4(codes)

    change(out, edit)
    found = api.verify(out, against=source, device="cpu")
    (figures,) = (row.figures for row in found.weights)
    assert found.passed and figures is not None and figures.clipped == 2


def packed_int4(codes):
    nibbles = codes.to(torch.int16).remainder(16).to(torch.uint8)
    return nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
