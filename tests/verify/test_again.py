"""What lowbit wrote is made again in part: nothing else comes out, whatever the scheme and rule,
and what does not come out again is told."""

import json

import pytest
import torch

from lowbitcli import api
from lowbitcli.schemes import SCHEMES
from tests import checkpoints
from tests.checkpoints import LAYER, single, weight
from tests.verify.planted import NORM, change, message, told

AGAIN = "quantized again, some rows of each run"
EVERY = [(scheme.name, rule) for scheme in SCHEMES for rule in scheme.rules]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def model():
    """Return weights of every dtype; q, k and v are served as one, and the largest is in another
    file's run of rows than the rest of them."""
    made = {
        f"{LAYER}self_attn.{one}_proj.weight": weight(256, 256, 0.02 * (1 + n), seed=n)
        for n, one in enumerate("qkv")
    }
    for number, dtype in enumerate(DTYPES):
        made[f"{LAYER}mlp.{number}.down_proj.weight"] = weight(144, 256, seed=5 + number).to(dtype)
    made[NORM] = torch.ones(256, dtype=torch.bfloat16)
    return made


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return single(tmp_path_factory.mktemp("again") / "source", model())


def made_by(source, folder, scheme, rule, container="lowbit", **options):
    (folder / "r.yaml").write_text(f'rules: [{{match: "*", scheme: {scheme}, scale: {rule}}}]')
    request = api.Request(recipe=folder / "r.yaml", container=container, **options)
    return api.quantize(source, folder / "out", request, device="cpu").output


def note(found):
    return " ".join(check.note for check in found.checks)


@pytest.mark.parametrize(("scheme", "rule"), EVERY)
def test_all_that_is_made_comes_out_again(source, tmp_path, scheme, rule):
    out = made_by(source, tmp_path, scheme, rule)
    found = api.verify(out, against=source, device="cpu")
    assert told(found) == [] and f"6 {AGAIN}" in note(found)


@pytest.mark.parametrize(("scheme", "rule"), EVERY)
def test_nothing_is_held_to_what_it_was_not_rounded_from(source, tmp_path, scheme, rule):
    """Itself, and what it was dequantized to: other scales than those that are stored come out."""
    out = made_by(source, tmp_path, scheme, rule)
    back = api.dequantize(out, tmp_path / "back", device="cpu").output
    for against in (out, back):
        found = api.verify(out, against=against, device="cpu")
        assert told(found) == [] and AGAIN not in note(found), against
    assert api.verify(back, against=out, device="cpu").passed


@pytest.mark.parametrize("rule", ["2d", "four_over_six"])
def test_codes_under_a_scale_of_zero_are_warned_of_where_the_rule_leaves_them(tmp_path, rule):
    w = weight(64, 64).float()
    w[:, 16:32] *= 1e-6
    source = single(tmp_path / "source", {f"{LAYER}mlp.down_proj.weight": w.bfloat16()})
    out = made_by(source, tmp_path, "nvfp4", rule)
    for against in (None, source):
        found = api.verify(out, against=against, device="cpu")
        assert {one.severity for one in found.problems} == {"warn"}
        assert "a step of zero, over codes that are not zero" in found.problems[0].message
    (out / "lowbit.json").unlink()
    assert not api.verify(out, device="cpu").passed


OTHERWISE = [
    ("fp8_tensor", "compressed-tensors"),
    ("nvfp4", "compressed-tensors"),
    ("nvfp4", "modelopt"),
]


@pytest.mark.parametrize(("scheme", "container"), OTHERWISE)
def test_a_global_scale_that_is_stored_otherwise_comes_out(source, tmp_path, scheme, container):
    out = made_by(source, tmp_path, scheme, "amax", container)
    found = api.verify(out, against=source, device="cpu")
    assert told(found) == [] and f"6 {AGAIN}" in note(found)


def test_weights_that_share_no_scale_have_their_own(source, tmp_path):
    (tmp_path / "r.yaml").write_text("fuse: []\nrules: [{match: '*', scheme: nvfp4}]")
    request = api.Request(recipe=tmp_path / "r.yaml", container="lowbit", allow_split_groups=True)
    out = api.quantize(source, tmp_path / "out", request, device="cpu").output
    assert api.verify(out, against=source, device="cpu").passed


@pytest.mark.parametrize("scheme", ["nvfp4", "fp8_tensor"])
def test_a_scale_of_the_whole_matrix_is_that_of_its_largest_element(source, tmp_path, scheme):
    """Twice the scale, and codes that stand for the same numbers: every other check holds."""
    out = made_by(source, tmp_path, scheme, "amax")
    name = f"{LAYER}mlp.1.down_proj."

    def edit(tensors):
        if scheme == "nvfp4":
            tensors[name + "weight_global_scale"].mul_(2)
            half = tensors[name + "weight_scale"].float() / 2
            tensors[name + "weight_scale"] = half.to(torch.float8_e4m3fn)
        else:
            tensors[name + "weight_scale"].mul_(2)
            codes = checkpoints.read(source)[name + "weight"].float()
            codes = codes / tensors[name + "weight_scale"]
            tensors[name + "weight"] = codes.to(torch.float8_e4m3fn)

    change(out, edit)
    found = api.verify(out, against=source, device="cpu")
    assert ("fail", "scale", name + "weight") in told(found)
    assert "its scale for the whole matrix is " in message(found, "scale")
    found = api.verify(out, against=source, device="cpu", sample="50%")
    assert not [one for one in found.problems if one.kind == "scale"], "others may be the largest"


def test_a_stack_has_a_scale_for_each_of_its_matrices(tmp_path):
    name = "model.layers.0.mlp.experts.gate_up_proj"
    stack = torch.stack([weight(64, 64, 0.1 * (n + 1), seed=n) for n in range(3)])
    source = single(tmp_path / "source", {name: stack})
    (tmp_path / "r.yaml").write_text(
        "layout: {'*.gate_up_proj': out_in halves}\nrules: [{match: '*', scheme: nvfp4}]"
    )
    request = api.Request(recipe=tmp_path / "r.yaml", container="lowbit")
    out = api.quantize(source, tmp_path / "out", request, device="cpu").output
    found = api.verify(out, against=source, device="cpu")
    assert told(found) == [] and f"1 {AGAIN}" in note(found)
    (scale,) = (one for one in checkpoints.read(out) if one.endswith("_global_scale"))
    change(out, lambda tensors: tensors[scale][1].mul_(1 + 2**-20))
    assert "its scale for the whole matrix" in message(
        api.verify(out, against=source, device="cpu"), "scale"
    )


@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp4"])
def test_what_a_search_found_is_searched_again(source, tmp_path, scheme):
    out = made_by(source, tmp_path, scheme, "amax")
    said = json.loads((out / "lowbit.json").read_text())
    said["made"]["rounded"] = {"mse": said["made"]["rounded"]["amax"]}
    (out / "lowbit.json").write_text(json.dumps(said))
    found = api.verify(out, against=source, device="cpu")
    assert told(found).count(("fail", "scale", f"{LAYER}mlp.0.down_proj.weight")) == 1
    assert all("quantized again by the rule mse" in one.message for one in found.problems[1:])


def test_searches_that_importance_weighed_are_left_out(source, tmp_path):
    columns = torch.arange(256).remainder(20).to(torch.int8)
    names = [name.removesuffix(".weight") for name in model() if name != NORM]
    metadata = {"lowbit.importance": "1", "tokens": "512", "seed": "0"}
    stats = checkpoints.write(tmp_path / "stats", dict.fromkeys(names, columns), metadata)
    out = made_by(source, tmp_path, "nvfp4", "mse", importance=stats)
    found = api.verify(out, against=source, device="cpu")
    assert told(found) == [] and AGAIN not in note(found)
