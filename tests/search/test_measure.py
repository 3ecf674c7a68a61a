"""What each scheme loses: the figures of a run that quantizes, from one pass, in any memory."""

import os
import signal

import pytest
import torch

from lowbit_kernels.error import sums
from lowbitcli import api
from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.errors import NonFiniteError, StoppedError
from lowbitcli.pipeline import memory
from lowbitcli.pipeline.arithmetic import ops_of
from lowbitcli.schemes import BY_NAME
from tests import experts as stacks
from tests.checkpoints import read, single, weight
from tests.search import models
from tests.search.importances import by_columns, errors_of

SCHEMES = "nvfp4,nvfp4:mse,mxfp8,fp8,fp8_block128,mxfp4"


def measured(path, schemes="nvfp4,mxfp8,fp8", progress=None, by=None):
    return errors_of(path, schemes, by, progress)


def quantized(source, target, scheme):
    """Return the errors of a run that quantizes."""
    return api.quantize(source, target, api.Request(scheme=scheme), device="cpu").errors


def test_the_figures_are_those_of_a_run_that_quantizes(tmp_path):
    source = models.dense(tmp_path / "m", layers=1)
    found = measured(source, SCHEMES).lost
    for scheme in ("nvfp4", "mxfp8", "fp8", "fp8_block128", "mxfp4"):
        assert found[scheme] == quantized(source, tmp_path / scheme, scheme)
    better = [found["nvfp4:mse"][name].error < one.error for name, one in found["nvfp4"].items()]
    assert len(better) == 7 and all(better)


def test_stacks_are_measured_as_they_are_taken_apart(tmp_path):
    source = stacks.model(tmp_path / "m", "qwen3_vl_moe")
    found = measured(source, "nvfp4,fp8").lost
    for scheme in ("nvfp4", "fp8"):
        assert found[scheme] == quantized(source, tmp_path / scheme, scheme)
        assert len(found[scheme]) == 3 * stacks.E


def test_a_quantized_source_is_measured_by_its_values(tmp_path):
    source = models.dense(tmp_path / "m", layers=1)
    quantized(source, tmp_path / "q", "mxfp4")
    found = measured(tmp_path / "q", "nvfp4,mxfp8,mxfp4").lost
    for scheme in ("nvfp4", "mxfp8"):
        assert found[scheme] == quantized(tmp_path / "q", tmp_path / scheme, scheme)
    assert all(one.error == 0 and one.count for one in found["mxfp4"].values())
    assert all(one.error == 0 for one in found["mxfp8"].values())


def test_a_figure_is_that_of_the_arithmetic_alone(tmp_path):
    source = single(tmp_path / "m", {"model.layers.0.mlp.down_proj.weight": weight(160, 64)})
    w = read(source)["model.layers.0.mlp.down_proj.weight"]
    (one,) = measured(source, "mxfp8").lost["mxfp8"].values()
    ops = ops_of(BY_NAME["mxfp8"])
    alone = sums(w, ops.dequantize(ops.quantize(w, None, "amax"), torch.float32))
    assert one.error == alone.error
    assert one.signal == alone.signal


@pytest.mark.parametrize(("elements", "held", "threads"), [(1 << 13, 1 << 30, 1), (1 << 13, 0, 3)])
def test_neither_slices_nor_threads_nor_what_is_held_show(
    tmp_path, monkeypatch, elements, held, threads
):
    tensors = {f"model.layers.0.mlp.{x}_proj.weight": weight(400, 64) for x in ("gate", "up")}
    tensors["model.layers.0.mlp.down_proj.weight"] = weight(64, 400)
    source = single(tmp_path / "m", tensors)
    usual = measured(source)
    monkeypatch.setattr(memory, "budget", lambda *_: memory.Budget(threads, elements, held))
    other = measured(source)
    assert other.lost == usual.lost
    assert other.digest == usual.digest


def test_each_weight_is_read_once_for_all_schemes(tmp_path, monkeypatch):
    source = models.dense(tmp_path / "m", layers=2)
    read_bytes = []
    before = Checkpoint.read_into

    def counted(self, name, buffer, start=0):
        read_bytes.append((name, len(buffer)))
        before(self, name, buffer, start)

    monkeypatch.setattr(Checkpoint, "read_into", counted)
    told = []
    found = measured(source, progress=lambda done, total, name: told.append((done, total)))
    names = set(found.lost["nvfp4"])
    assert len(read_bytes) == len(names) == 14
    assert sum(size for _, size in read_bytes) == told[-1][0] == told[-1][1]


def test_the_digest_is_that_of_the_numbers(tmp_path):
    source = models.dense(tmp_path / "m", layers=1)
    first = measured(source, "mxfp8").digest
    assert measured(source, "nvfp4,fp8").digest == first
    tensors = read(source)
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] += 1
    assert measured(single(tmp_path / "n", tensors), "mxfp8").digest != first


def test_a_weight_with_nan_is_named(tmp_path):
    source = models.dense(tmp_path / "m", layers=1)
    tensors = read(source)
    tensors["model.layers.0.self_attn.v_proj.weight"][3, 5] = float("nan")
    bad = single(tmp_path / "n", tensors)
    with pytest.raises(NonFiniteError, match=r"v_proj\.weight holds 1 NaN.*\(3, 5\)") as told:
        measured(bad)
    assert "--nonfinite" not in told.value.hint  # which is no option of recipe auto
    assert "`nonfinite: keep`" in told.value.hint


def test_a_signal_stops_it_between_two_steps(tmp_path):
    source = models.dense(tmp_path / "m", layers=4)

    sent = []

    def interrupt(done, total, name):
        if not sent:
            sent.append(os.kill(os.getpid(), signal.SIGINT))

    with pytest.raises(StoppedError, match="interrupted") as raised:
        measured(source, "mxfp8", progress=interrupt)
    assert raised.value.exit_code == 130


def test_with_importance_errors_are_those_of_weighed_columns(tmp_path):
    source = models.dense(tmp_path / "m", layers=1)
    by = by_columns(tmp_path / "h.safetensors", source)
    plain, found = (measured(source, "nvfp4,mxfp8,mxfp4", by=one) for one in (None, by))
    assert found.lost == plain.lost
    name = "model.layers.0.mlp.down_proj"
    w, h = read(source)[f"{name}.weight"].double(), by.tensors[name][1]
    weights = torch.tensor([2.0 ** (e - 256 if e > 127 else e) for e in h], dtype=torch.float64)
    for scheme in ("mxfp8", "mxfp4"):
        ops = ops_of(BY_NAME[scheme])
        v = ops.dequantize(ops.quantize(w.bfloat16(), None, "amax"), torch.float32).double()
        due = ((v - w).square() * weights).sum() / (w.square() * weights).sum()
        one = found.weighed[scheme][f"{name}.weight"]
        assert one.error / one.signal == pytest.approx(float(due), rel=1e-4)
        unweighed = plain.lost[scheme][f"{name}.weight"].relative ** 2
        assert one.error / one.signal != pytest.approx(unweighed, rel=1e-3)


def test_with_importance_scales_are_searched_by_it(tmp_path):
    source = models.dense(tmp_path / "m", layers=1)
    file = tmp_path / "h.safetensors"
    found = measured(source, "nvfp4:mse,nvfp4", by=by_columns(file, source))
    recipe = tmp_path / "r.yaml"
    recipe.write_text("rules: [{match: '*', scheme: nvfp4, scale: mse}]")
    made = api.quantize(source, tmp_path / "q", api.Request(recipe=recipe, importance=file))
    assert found.lost["nvfp4:mse"] == made.errors
    assert found.lost["nvfp4:mse"] != measured(source, "nvfp4:mse").lost["nvfp4:mse"]
    for name, one in found.weighed["nvfp4:mse"].items():
        assert one.error < found.weighed["nvfp4"][name].error
