"""What is put right, in a new checkpoint: each fault planted, fixed, told, and gone; the old one is
never touched, and what is damaged gets no new proof."""

import json

import pytest
import torch

from lowbitcli import api
from lowbitcli.errors import CheckpointError, OutputError, UsageError
from lowbitcli.verify import FAIL
from tests import checkpoints
from tests.checkpoints import LAYER, hashes, same, sharded, single, weight
from tests.verify.asked import config, made
from tests.verify.planted import DOWN, GATE, UP, change, model, poke

Q, K, V = (f"{LAYER}self_attn.{name}_proj." for name in "qkv")
ALL = ["vllm,sglang,transformers"]


def fixed(output, new, against=None, **options):
    before = hashes(output)
    found = api.verify(output, device="cpu", fix=new, against=against, consumers=ALL, **options)
    assert hashes(output) == before
    assert json.dumps(found.to_dict(), allow_nan=False)
    return found


def failed(output, consumer="vllm"):
    found = api.verify(output, device="cpu", consumers=[consumer])
    return [one.message for one in found.failures]


def spoil_globals(name, times):
    """Return an edit that makes a global scale another, and scales of blocks such that values stay
    those that they were."""

    def edit(tensors):
        divides = name + "weight_global_scale" in tensors
        shared = name + ("weight_global_scale" if divides else "weight_scale_2")
        tensors[shared] = tensors[shared] * (times if divides else 1 / times)
        scale = tensors[name + "weight_scale"]
        tensors[name + "weight_scale"] = (scale.float() * times).to(torch.float8_e4m3fn)

    return edit


def values(output):
    """Return what every weight stands for."""
    target = output.parent / f"{output.name}-values"
    api.dequantize(output, target, dtype="fp32", device="cpu", force=True)
    return checkpoints.read(target)


def smaller(seed: int) -> torch.Tensor:
    """Return a weight whose largest element alone is large: other scales can be doubled."""
    w = weight(64, 64, 0.02, seed=seed).float()
    return (w / w.abs().max() * 0.01).to(torch.bfloat16)


@pytest.fixture(params=["compressed-tensors", "modelopt"])
def differing(tmp_path, request):
    """Return an output whose up has scales of blocks of at most a sixteenth of its gate's."""
    tensors = model() | {GATE + "weight": weight(64, 64, 0.02), UP + "weight": smaller(3)}
    return made(tmp_path, "nvfp4", request.param, tensors)


@pytest.mark.parametrize("times", [2.0, 4.0])
def test_a_global_scale_moves_by_a_power_of_two_and_nothing_is_lost(differing, tmp_path, times):
    right = values(differing)
    change(differing, spoil_globals(UP, times))
    wrong = values(differing)
    assert all(same(right[name], wrong[name]) for name in right)
    assert any("global scales differ" in one for one in failed(differing))
    found = fixed(differing, tmp_path / "new")
    assert f"{UP[:-1]} exactly" in found.fixed[0] and "one global scale for" in found.fixed[0]
    assert found.failures == () or all("modelopt" in one.message for one in found.failures)
    assert failed(tmp_path / "new") == []
    put_right = values(tmp_path / "new")
    assert all(same(right[name], put_right[name]) for name in right)


def test_a_global_scale_of_any_ratio_is_moved_with_a_loss_that_is_told(differing, tmp_path):
    change(differing, spoil_globals(UP, 3.0))
    before = values(differing)
    found = fixed(differing, tmp_path / "new")
    after = values(tmp_path / "new")
    name = UP + "weight"
    lost = float((after[name] - before[name]).norm() / before[name].norm())
    assert 0 < lost < 0.05
    assert f"{UP[:-1]} to {lost:.3g}" in found.fixed[0]
    assert all(same(before[x], after[x]) for x in before if x != name)
    assert failed(tmp_path / "new") == []


def test_what_was_rounded_again_is_held_to_half_a_step_of_its_scales(tmp_path):
    tensors = {GATE + "weight": weight(64, 64, 0.02), UP + "weight": weight(64, 64, 0.03)}
    source = single(tmp_path / "whole", tensors)
    alone = {name: made(tmp_path / name, "nvfp4", "compressed-tensors", {name: tensors[name]})
             for name in tensors}  # fmt: skip
    output, other = alone.values()
    change(output, lambda one: one.update(checkpoints.read(other)))
    assert [x.kind for x in api.verify(output, against=source, device="cpu").failures] == ["shared"]
    found = fixed(output, tmp_path / "new", against=source)
    assert found.failures == ()
    (check,) = [one for one in found.checks if one.what.startswith("quantized weights against")]
    assert check.note == "1 to 2^-21, 1 to 2^-4"
    recipe = json.loads((tmp_path / "new" / "lowbit.json").read_text())["recipe"]
    assert len(recipe["rescaled"]) == 1


def test_global_scales_too_far_apart_are_left_and_said_to_be(differing, tmp_path):
    is_divisor = "compressed" in checkpoints.quantization_of(differing)["quant_method"]
    shared = UP + ("weight_global_scale" if is_divisor else "weight_scale_2")
    factor = 1e4 if is_divisor else 1e-4
    change(differing, lambda tensors: tensors[shared].mul_(factor))
    found = fixed(differing, tmp_path / "new")
    assert [one for one in found.fixed if one.startswith("not fixed: global scales of")]
    assert not (tmp_path / "new").exists()


def test_the_codes_that_lowbit_wrote_are_still_held_to_their_very_bits(planted, tmp_path):
    output = planted.copy("nvfp4", "compressed-tensors")
    change(output, lambda tensors: tensors[Q + "weight_scale"].view(torch.uint8).sub_(8))
    change(output, lambda tensors: tensors[Q + "weight_global_scale"].mul_(0.5))
    against = planted.source
    found = fixed(output, tmp_path / "new", against=against)
    assert found.fixed[0].startswith("one global scale for")
    assert [one.kind for one in found.failures] == []


FIELDS = [
    (
        "nvfp4",
        lambda said: said.pop("quantization_status"),
        "quantization_status: compressed added",
    ),
    ("nvfp4", lambda said: said.pop("format"), "format: nvfp4-pack-quantized added"),
    (
        "mxfp8",
        lambda said: said["config_groups"]["group_0"]["weights"].pop("scale_dtype"),
        "config_groups.group_0.weights.scale_dtype: torch.uint8 added",
    ),
    (
        "fp8_channel",
        lambda said: said["config_groups"]["group_0"].pop("format"),
        "config_groups.group_0.format: float-quantized added",
    ),
    ("nvfp4", lambda said: said["ignore"].remove("lm_head"), "that are not quantized: lm_head"),
]


@pytest.mark.parametrize(("scheme", "edit", "words"), FIELDS)
def test_a_field_that_is_missing(planted, tmp_path, scheme, edit, words):
    output = planted.copy(scheme, "compressed-tensors")
    right = (output / "config.json").read_text()
    config(output, edit)
    found = fixed(output, tmp_path / "new")
    assert [one for one in found.fixed if words in one and one.startswith("config.json: ")]
    assert failed(tmp_path / "new", "transformers") == []
    said, wanted = checkpoints.config_of(tmp_path / "new"), json.loads(right)
    said["quantization_config"]["ignore"].sort()
    wanted["quantization_config"]["ignore"].sort()
    assert said == wanted


def test_modules_that_nothing_ignores(planted, tmp_path):
    output = planted.copy("nvfp4", "compressed-tensors")
    extra = f"{LAYER}mlp.extra_proj"
    change(output, lambda tensors: tensors.update({f"{extra}.weight": weight(64, 64)}))
    found = fixed(output, tmp_path / "new")
    assert f"1 modules added that are not quantized: {extra}" in found.fixed[0]
    assert extra in checkpoints.quantization_of(tmp_path / "new")["ignore"]
    assert found.failures == ()


def test_the_other_containers(tmp_path):
    tensors = {Q + "weight": weight(128, 128), DOWN + "weight": weight(128, 128)}
    output = made(tmp_path / "a", "fp8_block128", "deepseek", tensors)
    config(output, lambda said: said.pop("activation_scheme"))
    extra = f"{LAYER}mlp.extra_proj"
    change(output, lambda one: one.update({f"{extra}.weight": weight(64, 64)}))
    assert len(fixed(output, tmp_path / "new-a").fixed) == 2
    assert failed(tmp_path / "new-a") == []
    output = made(tmp_path / "b", "nvfp4", "modelopt", model())
    (output / "hf_quant_config.json").unlink()
    found = fixed(output, tmp_path / "new-b")
    assert found.fixed == ("hf_quant_config.json: made of what config.json says",)
    source = tmp_path / "b" / "source"
    again = tmp_path / "again"
    api.quantize(source, again, api.Request(scheme="nvfp4", container="modelopt"), device="cpu")
    name = "hf_quant_config.json"
    assert (tmp_path / "new-b" / name).read_text() == (again / name).read_text()


@pytest.mark.parametrize("container", ["compressed-tensors", "modelopt"])
def test_scales_of_rows_in_another_shape(tmp_path, container):
    output = made(tmp_path, "fp8_channel", container, model())
    right = values(output)
    name = DOWN + "weight_scale"
    shape = (64,) if container == "compressed-tensors" else (64, 1)
    change(output, lambda tensors: tensors.update({name: tensors[name].reshape(shape)}))
    assert failed(output)
    assert "1 scales get the shape that is asserted" in fixed(output, tmp_path / "new").fixed[0]
    assert failed(tmp_path / "new") == []
    put_right = values(tmp_path / "new")
    assert all(same(right[x], put_right[x]) for x in right)


def test_exponents_that_are_called_f8_e8m0(planted, tmp_path):
    output = planted.copy("mxfp8", "compressed-tensors")

    def relabel(tensors):
        for name in tensors:
            if name.endswith("weight_scale"):
                tensors[name] = tensors[name].view(torch.float8_e8m0fnu)

    change(output, relabel)
    found = fixed(output, tmp_path / "new", against=planted.source)
    assert found.fixed == ("7 scales of F8_E8M0 are called U8: the same bytes",)
    assert failed(tmp_path / "new") == []


def test_shards_a_manifest_and_files_beside_the_weights(tmp_path):
    source = sharded(
        tmp_path / "source", {Q + "weight": weight(64, 64)}, {K + "weight": weight(64, 64)}
    )
    (source / "tokenizer.json").write_text("{}")
    api.quantize(source, tmp_path / "out", device="cpu")
    config(tmp_path / "out", lambda said: said.pop("quantization_status"))
    found = fixed(tmp_path / "out", tmp_path / "new", against=source)
    assert found.failures == ()
    (check,) = [one for one in found.checks if one.what.startswith("stored bytes agree")]
    assert check.ok and check.count == 6
    names = {path.name for path in (tmp_path / "new").iterdir()}
    assert names == {path.name for path in (tmp_path / "out").iterdir()}
    recipe = json.loads((tmp_path / "new" / "lowbit.json").read_text())["recipe"]
    assert recipe["fixed"] == ["config.json: quantization_status: compressed added"]


def test_a_single_file_keeps_its_own_proof(planted, tmp_path):
    output = tmp_path / "a.safetensors"
    request = api.Request(scheme="mxfp8", container="comfyui")
    api.quantize(planted.source / "model.safetensors", output, request, device="cpu")
    metadata = {x: y for x, y in checkpoints.metadata_of(output).items() if "lowbit." not in x}
    tensors = checkpoints.read(output)
    for name in tensors:
        if name.endswith("weight_scale"):
            tensors[name] = tensors[name].view(torch.float8_e8m0fnu)
    checkpoints.write(output, tensors, metadata)
    found = api.verify(output, device="cpu", fix=tmp_path / "b.safetensors", consumers=["comfyui"])
    assert found.fixed and found.failures == ()
    (check,) = [one for one in found.checks if one.what.startswith("the manifest names every")]
    assert check.ok


def test_what_is_damaged_gets_no_new_proof(planted, tmp_path):
    output = planted.copy("nvfp4", "compressed-tensors", proof=True)
    config(output, lambda said: said.pop("quantization_status"))
    poke(output, DOWN + "weight_packed", 5, lambda byte: byte ^ 1)
    with pytest.raises(CheckpointError, match="nothing is fixed"):
        fixed(output, tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == []


def test_nothing_to_put_right_writes_nothing(planted, tmp_path):
    found = fixed(planted.made("nvfp4", "compressed-tensors"), tmp_path / "new")
    assert found.fixed == () and not (tmp_path / "new").exists()
    assert [one for one in found.problems if one.severity == FAIL] == []


def test_it_is_never_in_place(planted, tmp_path):
    output = planted.copy("nvfp4", "compressed-tensors")
    config(output, lambda said: said.pop("quantization_status"))
    with pytest.raises(UsageError):
        fixed(output, output, force=True)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "there").touch()
    with pytest.raises(OutputError):
        fixed(output, tmp_path / "new")
