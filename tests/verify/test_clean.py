"""What was written right passes, whatever its numbers: no false alarm, and it is known what was
looked at."""

import pytest
import torch

from lowbit_kernels import mx
from lowbitcli import api
from lowbitcli.verify import Verification
from tests import checkpoints
from tests.checkpoints import LAYER, sharded, single, weight
from tests.verify.planted import CONTAINERS, DOWN, EMBED, NORM, SCHEMES, change, told


def check(found: Verification, what: str):
    (one,) = [check for check in found.checks if check.what.startswith(what)]
    return one


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_right_output_passes_and_says_what_was_checked(planted, scheme, container):
    found = planted.verify(planted.made(scheme, container))
    assert told(found) == []
    assert (found.passed, found.exit_code, found.container) == (True, 0, container)
    assert found.untouched == 2
    assert len(found.weights) == 7
    assert all(row.figures is not None and row.figures.outside == 0 for row in found.weights)
    assert {one.name: one.reason for one in found.kept} == {NORM: "norm", EMBED: "embedding"}
    assert check(found, "quantized weights against the source").count == 7
    assert check(found, "tensors left as they were").count == 2
    assert check(found, "weights that are served as one").count == (
        2 if scheme in ("nvfp4", "fp8_tensor") else 0
    )
    assert check(found, "stored bytes agree with the manifest").count > 9
    assert check(found, "SQNR of every weight").ok is None


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_single_file_passes_on_its_own_manifest(planted, tmp_path, scheme):
    source = planted.source / "model.safetensors"
    output = tmp_path / "renamed.safetensors"
    api.quantize(source, output, api.Request(scheme=scheme, container="lowbit"), device="cpu")
    found = api.verify(output, against=source, device="cpu")
    assert told(found) == []
    assert check(found, "the manifest names every tensor").ok is True
    assert check(found, "stored bytes agree with the manifest").count > 9


def test_without_a_source_what_was_not_checked_is_said(planted):
    found = planted.verify(planted.made("nvfp4", "lowbit"), source=False)
    assert found.passed
    skipped = {one.what: one.note for one in found.checks if one.ok is None}
    assert skipped["quantized weights against the source, element by element"] == (
        "no source was named"
    )
    assert skipped["tensors left as they were are the source's bytes"] == "no source was named"
    assert all(row.figures is None for row in found.weights)
    assert found.summary.bytes_before is None


def test_sizes_and_errors_are_those_of_the_run(planted, tmp_path):
    outcome = api.quantize(
        planted.source, tmp_path / "out", api.Request(scheme="nvfp4"), device="cpu"
    )
    found = api.verify(tmp_path / "out", against=planted.source, device="cpu")
    assert found.summary.bytes_after == outcome.bytes_out
    assert found.summary.bits_per_weight == outcome.plan.bits_per_weight
    for row in found.weights:
        sums = outcome.errors[row.name]
        assert row.figures is not None
        assert (row.figures.sqnr_db, row.figures.largest) == (sums.sqnr_db, sums.largest)
    assert [row.name for row in found.worst(1)] == [outcome.worst(1)[0][0]]


def test_shards_and_an_index_pass(planted, tmp_path):
    source = sharded(
        tmp_path / "source",
        {LAYER + "self_attn.q_proj.weight": weight(64, 64), NORM: torch.ones(64)},
        {LAYER + "self_attn.k_proj.weight": weight(64, 64, 10.0)},
    )
    api.quantize(source, tmp_path / "out", device="cpu")
    found = api.verify(tmp_path / "out", against=source, device="cpu")
    assert told(found) == []
    assert check(found, "the index names every tensor").count == 7


def test_more_rows_than_a_band_and_more_than_a_chunk(tmp_path):
    source = single(tmp_path / "source", {DOWN + "weight": weight(1100, 2048)})
    for scheme in SCHEMES:
        output = tmp_path / scheme
        outcome = api.quantize(source, output, api.Request(scheme=scheme), device="cpu")
        found = api.verify(output, against=source, device="cpu")
        assert told(found) == []
        (row,) = found.weights
        assert row.figures is not None
        assert row.figures.sqnr_db == outcome.errors[row.name].sqnr_db


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_dequantized_output_is_the_source_s_values(planted, tmp_path, scheme, dtype):
    made = planted.made(scheme, "compressed-tensors")
    api.dequantize(made, tmp_path / "out", dtype=dtype, device="cpu")
    found = api.verify(tmp_path / "out", against=made, device="cpu")
    assert told(found) == [("warn", "nothing", "")]
    assert found.passed
    assert check(found, "dequantized weights against the source").count == 7
    assert [row.how for row in found.weights] == ["dequantized"] * 7


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_dequantized_output_against_the_original_says_what_was_rounded_before(
    planted, tmp_path, dtype
):
    made = planted.made("nvfp4", "lowbit")
    api.dequantize(made, tmp_path / "out", dtype=dtype, device="cpu")
    found = api.verify(tmp_path / "out", against=planted.source, device="cpu")
    assert found.failures == ()
    assert check(found, "tensors left as they were").count == 2
    values = check(found, "dequantized weights against the source")
    assert values.count == 7 and "7 were dequantized from a quantized checkpoint" in values.note
    assert all(row.how == "dequantized" for row in found.weights)
    assert all(0.05 < row.figures.relative < 0.2 for row in found.weights)
    assert api.verify(
        tmp_path / "out", against=planted.source, device="cpu", fail_under_db=40
    ).failures


def test_a_tensor_that_was_left_alone_is_still_held_to_the_original(planted, tmp_path):
    api.dequantize(planted.made("nvfp4", "lowbit"), tmp_path / "out", device="cpu")
    other = tmp_path / "other"
    tensors = checkpoints.read(planted.source)
    tensors[NORM] = tensors[NORM] + 1
    single(other, tensors)
    found = api.verify(tmp_path / "out", against=other, device="cpu")
    assert [one.tensor for one in found.failures] == [NORM]


def test_a_dequantized_element_that_was_changed_is_found(planted, tmp_path):
    made = planted.made("mxfp8", "lowbit")
    api.dequantize(made, tmp_path / "out", device="cpu")
    (tmp_path / "out" / "lowbit.json").unlink()
    file = tmp_path / "out" / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in checkpoints.read(file).items()}
    tensors[DOWN + "weight"][3, 5] *= 1.01
    checkpoints.write(file, tensors, checkpoints.metadata_of(file))
    found = api.verify(tmp_path / "out", against=made, device="cpu")
    assert ("fail", "bound", DOWN + "weight") in told(found)
    assert "the first at [3, 5]" in found.failures[0].message


def test_a_recoded_output_passes_against_either_source(planted, tmp_path):
    """compressed-tensors to lowbit: the source is quantized itself."""
    made = planted.made("nvfp4", "compressed-tensors")
    request = api.Request(scheme="nvfp4", container="lowbit")
    api.quantize(made, tmp_path / "out", request, device="cpu")
    for source in (made, planted.source):
        found = api.verify(tmp_path / "out", against=source, device="cpu")
        assert told(found) == []


def test_a_requantized_output_is_held_against_the_quantized_source(planted, tmp_path):
    made = planted.made("fp8_channel", "lowbit")
    api.quantize(made, tmp_path / "out", api.Request(scheme="nvfp4"), device="cpu")
    assert told(api.verify(tmp_path / "out", against=made, device="cpu")) == []


def test_a_fake_output_is_measured_and_not_called_changed(planted, tmp_path):
    request = api.Request(scheme="nvfp4", fake=True)
    outcome = api.quantize(planted.source, tmp_path / "out", request, device="cpu")
    found = api.verify(tmp_path / "out", against=planted.source, device="cpu")
    assert found.passed
    assert [row.how for row in found.weights] == ["fake"] * 7
    for row in found.weights:
        assert row.figures is not None
        assert row.figures.outside is None
        assert row.figures.sqnr_db == pytest.approx(outcome.errors[row.name].sqnr_db, abs=0.1)


def test_a_fake_output_of_a_quantized_source_is_measured_too(planted, tmp_path):
    made = planted.made("fp8_channel", "lowbit")
    request = api.Request(scheme="nvfp4", fake=True)
    api.quantize(made, tmp_path / "out", request, device="cpu")
    found = api.verify(tmp_path / "out", against=made, device="cpu")
    assert found.failures == ()
    assert [row.how for row in found.weights] == ["fake"] * 7


def test_what_decodes_to_infinity_is_told(tmp_path):
    """The largest bf16 number rounds up to 2^128 in MXFP8: fp32 has no such number. We refuse to
    write it; other writers do."""
    w = torch.full((32, 32), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    source = single(tmp_path / "source", {DOWN + "weight": w})
    safe = single(tmp_path / "safe", {DOWN + "weight": w / 2})
    api.quantize(safe, tmp_path / "out", api.Request(scheme="mxfp8"), device="cpu")

    def make_larger(tensors):
        data, scale = (tensors[DOWN + name] for name in ("weight", "weight_scale"))
        parts = mx.quantize_mxfp8(w)
        data.copy_(parts[0])
        scale.copy_(parts[1])

    change(tmp_path / "out", make_larger)
    (tmp_path / "out" / "lowbit.json").unlink()
    found = api.verify(tmp_path / "out", against=source, device="cpu")
    assert told(found) == [
        ("warn", "scale", DOWN + "weight"),
        ("fail", "code", DOWN + "weight"),
    ]
    assert found.problems[1].message == "it stands for values that are NaN or Inf"
    assert found.to_dict()["weights"][0]["figures"]["sqnr_db"] == "nan"


def hard(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return weights whose numbers are hard to quantize, each in a module of its own."""
    finfo = torch.finfo(dtype)
    base = weight(48, 64).float()
    grid = torch.arange(-96, 96).repeat(16).reshape(48, 64)
    signs = torch.where(torch.arange(64) % 2 == 0, 1.0, -1.0)
    made = {
        "plain": base,
        "zeros": torch.zeros(48, 64),
        "negative_zeros": -torch.zeros(48, 64),
        "zero_block": torch.where(torch.arange(64) < 32, 0.0, base * 0.01),
        "ties": grid * 0.25 / 4,
        "ties_e4m3": grid * 0.0625,
        "half_steps": grid * 0.5,
        "one_number": torch.full((48, 64), 0.1) * signs,
        "faint": base * finfo.tiny * 0.25,
        "least": signs * finfo.tiny * finfo.eps * torch.ones(48, 1),
        "tiny_beside_large": torch.where(torch.arange(64) % 5 == 0, base * 1e-30, base),
        "huge": signs * 0.85 * finfo.max * torch.linspace(0, 1, 48 * 64).reshape(48, 64),
        "one_huge": torch.where(grid == 95, 0.85 * finfo.max, base),
        "range": base * torch.logspace(-30, 4, 48, base=2).unsqueeze(1),
        "one_row": base[:1],
    }
    return {f"m.{name}.weight": w.to(dtype) for name, w in made.items()}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_hard_numbers_raise_no_alarm(tmp_path, dtype, scheme, container):
    tensors = hard(dtype)
    assert all(torch.isfinite(w).all() for w in tensors.values())
    source = single(tmp_path / "source", tensors)
    request = api.Request(scheme=scheme, container=container)
    api.quantize(source, tmp_path / "out", request, device="cpu")
    found = api.verify(tmp_path / "out", against=source, device="cpu")
    assert found.failures == ()
    assert len(found.weights) == len(tensors)
    assert {row.figures.outside for row in found.weights if row.figures} == {0}
