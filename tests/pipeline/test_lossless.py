"""Where a scheme can say what another says, requantizing changes no number, and what came out equal
is counted."""

import pytest
import torch

from lowbitcli.api import Request, dequantize, quantize, verify
from lowbitcli.pipeline import lossless
from tests import checkpoints
from tests.checkpoints import LAYER, single, weight

NAMES = ("mlp.down_proj", "self_attn.q_proj", "self_attn.k_proj")
DOWN, Q, K = (f"{LAYER}{name}.weight" for name in NAMES)


def mxfp4(root, scales, seed=0):
    """Write gpt-oss's scheme in compressed-tensors' names: any codes, with these E8M0 bytes."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, scale in scales.items():
        rows, blocks = scale.shape
        packed = torch.randint(0, 256, (rows, blocks * 16), generator=generator).to(torch.uint8)
        packed[0, :8] = 0  # a half of a block that is zero
        stem = name.removesuffix(".weight")
        tensors |= {f"{stem}.weight_packed": packed, f"{stem}.weight_scale": scale}
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    said = {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "config_groups": {"g": {"targets": ["Linear"], "weights": weights}},
    }
    config = {**checkpoints.CONFIG, "quantization_config": said}
    return single(root, {**tensors, "model.norm.weight": weight(1, 64)[0]}, config)


def bytes_of(rows, blocks, low, high, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, (rows, blocks), generator=generator).to(torch.uint8)


def values(path, folder):
    done = dequantize(path, folder, dtype="fp32", device="cpu")
    return checkpoints.read(done.output)


@pytest.mark.parametrize("container", ["compressed-tensors", "modelopt", "lowbit"])
@pytest.mark.parametrize("target", ["nvfp4", "mxfp8"])
def test_mxfp4_loses_nothing(tmp_path, container, target):
    scales = {
        DOWN: bytes_of(40, 6, 110, 128),
        Q: bytes_of(300, 4, 30, 47),
        K: bytes_of(8, 4, 35, 48),
    }
    source = mxfp4(tmp_path / "source", scales)
    request = Request(scheme=target, container=container)
    done = quantize(source, tmp_path / "q", request, device="cpu")
    blocks = (40 * 6 + 308 * 4) * (2 if target == "nvfp4" else 1)
    assert (done.equal, done.blocks) == (blocks, blocks)
    before, after = values(source, tmp_path / "a"), values(done.output, tmp_path / "b")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(error.largest == 0 for error in done.errors.values())
    assert verify(done.output, against=source, device="cpu").problems == ()


def test_codes_stay_and_scales_are_powers_of_two(tmp_path):
    source = mxfp4(tmp_path / "source", {DOWN: bytes_of(16, 4, 120, 124)})
    request = Request(scheme="nvfp4", container="lowbit")
    done = quantize(source, tmp_path / "q", request, device="cpu")
    before, after = checkpoints.read(source), checkpoints.read(done.output)
    assert torch.equal(after[DOWN][1:], before[DOWN + "_packed"][1:])
    assert float(after[DOWN + "_global_scale"]) == 2.0 ** (123 - 127 - 8)
    top = before[DOWN + "_scale"] == 123
    scale = after[DOWN + "_scale"].float().unflatten(1, (4, 2))
    assert bool((scale[top][1:] == 256).all())


@pytest.mark.parametrize("far", [17, 18, 40])
def test_what_is_out_of_reach_is_quantized_and_counted(tmp_path, far):
    scale = torch.full((32, 4), 127, dtype=torch.uint8)
    scale[5, 2] = 127 - far
    source = mxfp4(tmp_path / "source", {DOWN: scale})
    done = quantize(source, tmp_path / "q", Request(scheme="nvfp4"), device="cpu")
    before, after = values(source, tmp_path / "a")[DOWN], values(done.output, tmp_path / "b")[DOWN]
    same = (before == after).unflatten(1, (8, 16)).all(-1)
    assert (done.equal, done.blocks) == (int(same.sum()), 256)
    assert bool(same.all()) == (far == 17)
    rest = torch.ones_like(same)
    rest[5, 4:6] = False
    assert bool(same[rest].all())
    assert verify(done.output, against=source, device="cpu").problems == ()


def test_a_fused_group_has_one_power_of_two(tmp_path):
    scales = {Q: bytes_of(16, 4, 120, 124), K: bytes_of(16, 4, 110, 116)}
    source = mxfp4(tmp_path / "source", scales)
    done = quantize(source, tmp_path / "q", Request(scheme="nvfp4", container="lowbit"))
    stored = checkpoints.read(done.output)
    shared = {float(stored[name + "_global_scale"]) for name in (Q, K)}
    assert len(shared) == 1 and done.equal == done.blocks == 2 * 16 * 8


def test_another_rule_and_zeros_go_the_usual_way(tmp_path):
    source = mxfp4(tmp_path / "source", {DOWN: bytes_of(16, 4, 110, 124)})
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text('rules: [{match: "*", scheme: nvfp4, scale: mse}]\n')
    done = quantize(source, tmp_path / "q", Request(recipe=recipe), device="cpu")
    shared = checkpoints.read(done.output)[DOWN + "_global_scale"]
    assert float(shared.frexp().mantissa) != 0.5 and done.blocks == 128
    stored = checkpoints.read(source)
    stored[DOWN + "_packed"].zero_()
    zeros = single(tmp_path / "zeros", stored, checkpoints.config_of(source))
    done = quantize(zeros, tmp_path / "z", Request(scheme="nvfp4", container="lowbit"))
    assert float(checkpoints.read(done.output)[DOWN + "_global_scale"]) == 1.0
    assert done.equal == done.blocks == 128


@pytest.mark.parametrize(("rule", "equal"), [("ue8m0", True), ("amax", False)])
def test_fp8_to_mxfp8_is_exact_where_its_scales_are_powers_of_two(tmp_path, rule, equal):
    source = single(tmp_path / "source", {DOWN: weight(200, 288), Q: weight(64, 128, 1e-3)})
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f'rules: [{{match: "*", scheme: fp8_block128, scale: {rule}}}]\n')
    request = Request(recipe=recipe, container="deepseek")
    first = quantize(source, tmp_path / "one", request, device="cpu")
    assert (first.equal, first.blocks) == (0, 0)
    request = Request(scheme="mxfp8", container="native-mxfp8")
    done = quantize(first.output, tmp_path / "two", request, device="cpu")
    assert done.blocks == 200 * 9 + 64 * 4 and (done.equal == done.blocks) == equal
    before, after = values(first.output, tmp_path / "a"), values(done.output, tmp_path / "b")
    assert all(torch.equal(before[name], after[name]) for name in before) == equal


def test_under_another_global_scale_no_code_is_kept():
    source = {"data": torch.full((2, 16), 0x21, dtype=torch.uint8)}
    source["scale"] = torch.full((2, 1), 127, dtype=torch.uint8)
    parts = {"data": torch.zeros(2, 16, dtype=torch.uint8)}
    parts["scale"] = torch.ones(2, 2).to(torch.float8_e4m3fn)
    for shared, same in ((1.0, True), (0.25, True), (0.75, False), (3.0, False)):
        made = lossless.kept(source, {**parts, "global_scale": torch.tensor(shared)})
        assert torch.equal(made["data"], source["data"]) == same
        assert float(made["scale"].float()[0, 0]) * (shared if same else 1.0) == 1.0


def test_beside_a_partner_that_is_not_in_mxfp4_the_group_goes_the_usual_way(tmp_path):
    source = mxfp4(tmp_path / "mx", {Q: bytes_of(16, 4, 120, 124)})
    tensors = {**checkpoints.read(source), K: weight(16, 128)}
    config = checkpoints.config_of(source)
    config["quantization_config"]["ignore"] = [K.removesuffix(".weight")]
    mixed = single(tmp_path / "mixed", tensors, config)
    done = quantize(mixed, tmp_path / "q", Request(scheme="nvfp4", container="lowbit"))
    stored = checkpoints.read(done.output)
    shared = {float(stored[name + "_global_scale"]) for name in (Q, K)}
    assert len(shared) == 1 and done.blocks == 16 * 8
    assert verify(done.output, against=mixed, device="cpu").passed
