"""What is printed of a run is what happened in it."""

import pytest
import torch

from lowbitcli import tables
from lowbitcli.api import Request, dequantize, quantize
from lowbitcli.errors import NonFiniteError
from tests import checkpoints
from tests.checkpoints import LAYER, single, weight

DOWN = LAYER + "mlp.down_proj.weight"
MOVED = "moved by an ulp: compressed-tensors stores the reciprocal"


def told(outcome):
    return "\n".join(tables.outcome_lines(outcome))


def test_global_scales_that_moved_are_told_and_only_where_values_changed(tmp_path):
    tensors = {
        f"model.layers.{n}.self_attn.o_proj.weight": weight(32, 64, 0.1 + n / 7, seed=n)
        for n in range(24)
    }
    one = quantize(single(tmp_path / "m", tensors), tmp_path / "1", Request(container="lowbit"))
    two = quantize(one.output, tmp_path / "2", Request(container="compressed-tensors"))
    three = quantize(two.output, tmp_path / "3", Request(container="lowbit"))
    values = [
        checkpoints.read(dequantize(x.output, tmp_path / f"{n}d", dtype="fp32").output)
        for n, x in enumerate((one, two, three))
    ]
    differ = sum(not torch.equal(values[0][name], values[1][name]) for name in tensors)
    assert two.moved == differ > 0
    assert f"{differ} global scales {MOVED}" in told(two)
    assert all(torch.equal(values[1][name], values[2][name]) for name in tensors)
    assert one.moved == three.moved == 0
    assert MOVED not in told(one) + told(three)


def test_a_dequantization_tells_what_was_dequantized_and_what_was_copied(tmp_path):
    tensors = {DOWN: weight(32, 64), "model.norm.weight": weight(1, 64)[0]}
    made = quantize(single(tmp_path / "m", tensors), None, Request(scheme="mxfp8"))
    done = dequantize(made.output)
    assert "copied 1, dequantized 1 tensors; " in told(done)
    assert "kept" not in told(done)


def test_a_code_that_is_nan_is_told_without_an_option_that_is_not_there(tmp_path):
    made = quantize(single(tmp_path / "m", {DOWN: weight(32, 64)}), None, Request(scheme="mxfp8"))
    tensors = checkpoints.read(made.output)
    tensors[DOWN].view(torch.uint8)[3, 5] = 0x7F
    source = single(tmp_path / "nan", tensors, checkpoints.config_of(made.output))
    with pytest.raises(NonFiniteError) as caught:
        dequantize(source)
    assert "--nonfinite" not in caught.value.hint
    assert "lowbit verify" in caught.value.hint
    with pytest.raises(NonFiniteError) as caught:
        quantize(source, tmp_path / "out", Request(scheme="nvfp4"))
    assert "--nonfinite keep" in caught.value.hint


def test_an_empty_checkpoint_is_told_in_whole_words(tmp_path):
    done = quantize(single(tmp_path / "m", {}))
    assert "no tensors; " in told(done)


def test_both_sizes_are_those_of_files(tmp_path):
    for source in (
        single(tmp_path / "m", {DOWN: weight(512, 512)}),
        tmp_path / "m" / "model.safetensors",
    ):
        done = quantize(source, None, Request(scheme="mxfp8"))
        files = [p if p.is_file() else p / "model.safetensors" for p in (source, done.output)]
        before, after = (path.stat().st_size for path in files)
        assert (done.plan.size_in, done.plan.bytes_out) == (before, after)
        lines = tables.plan_lines(done.plan)
        assert any(line.startswith("input ") and f"({before:,} bytes)" in line for line in lines)
        assert any(line.startswith("output ") and f"({after:,} bytes)" in line for line in lines)
