"""Scales of activations that are wrong, planted in an output that is right."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from lowbitcli import api
from lowbitcli.verify import FAIL, WARN
from tests.checkpoints import LAYER, single, weight

Q, K, V = (f"{LAYER}self_attn.{one}_proj" for one in "qkv")
KEYS = f"{LAYER}self_attn.k_scale"
WHAT = "scales of activations are there, finite and above zero"


@pytest.fixture(scope="module", params=["compressed-tensors", "modelopt"])
def output(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    source = single(folder / "m", {f"{name}.weight": weight(64, 64) for name in (Q, K, V)})
    amax = {**dict.fromkeys((Q, K, V), 3.0), KEYS.replace("scale", "amax"): 1.0}
    amax[KEYS.replace("k_scale", "v_amax")] = 2.0
    (folder / "a.json").write_text(json.dumps(amax))
    asked = api.Request("nvfp4", None, request.param, activation_scales=folder / "a.json")
    api.quantize(source, folder / "out", asked, device="cpu")
    (folder / "out" / "lowbit.json").unlink()
    return folder / "out"


def changed(output, folder, edit):
    """Return what verify finds in a copy of which the tensors were edited."""
    folder.mkdir()
    for path in output.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return api.verify(folder, device="cpu")


def scale_of(tensors, module):
    return next(name for name in tensors if name.startswith(f"{module}.input_"))


def test_right_ones_are_counted(output, tmp_path):
    found = changed(output, tmp_path / "x", lambda _: None)
    (check,) = [one for one in found.checks if one.what == WHAT]
    assert (check.ok, check.count, found.problems) == (True, 5, ())


@pytest.mark.parametrize("number", [math.nan, math.inf, 0.0, -1.0])
@pytest.mark.parametrize("which", ["input", "cache"])
def test_no_scale(output, tmp_path, which, number):
    names = []

    def edit(tensors):
        name = next((x for x in tensors if x.endswith("k_scale")), "")
        names.append(name if which == "cache" else scale_of(tensors, V))
        tensors[names[0]].fill_(number)

    (problem,) = changed(output, tmp_path / "x", edit).problems
    assert (problem.kind, problem.tensor, problem.severity) == ("scale", names[0], FAIL)
    assert problem.message == f"{number:g}, and a scale is above zero"


def test_a_missing_one(output, tmp_path):
    names = []

    def edit(tensors):
        names.append(scale_of(tensors, V))
        del tensors[names[0]]

    (problem,) = changed(output, tmp_path / "x", edit).problems
    assert (problem.kind, problem.tensor) == ("missing", names[0])
    assert problem.message.endswith(", and it is not there")


def test_different_ones_of_a_group(output, tmp_path):
    def edit(tensors):
        tensors[scale_of(tensors, K)].mul_(2)

    found = changed(output, tmp_path / "x", edit)
    (problem,) = found.problems
    assert (problem.kind, problem.severity, found.exit_code) == ("shared", WARN, 0)
    assert "their inputs have different scales" in problem.message


def test_one_that_is_no_number(output, tmp_path):
    def edit(tensors):
        name = scale_of(tensors, Q)
        tensors[name] = tensors[name].to(torch.int32)

    (problem,) = changed(output, tmp_path / "x", edit).problems
    assert (problem.kind, problem.message) == ("scale", "it is stored as I32")
