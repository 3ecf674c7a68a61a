"""verify on a CUDA device: the CPU's report to the last digit, and one flipped code of many."""

import pytest
import torch

from lowbit_kernels import error_codes, error_looks
from lowbitcli import api
from lowbitcli.pipeline.arithmetic import ops_of
from lowbitcli.tensors import DATA
from lowbitcli.verify.bound import ruler, step_of
from tests.checkpoints import single, weight
from tests.kernels.test_error_codes import CASES, CHANGES, made
from tests.verify.planted import model, poke
from tests.verify.test_flipped import COLUMN, NAME, ROW, SIZE, neighbour

pytestmark = pytest.mark.gpu

SCHEMES = ("nvfp4", "mxfp8", "mxfp4", "fp8_tensor", "fp8_channel", "fp8_block128", "int8_channel")


def report_of(output, source, device):
    """Return the report without what names the device."""
    told = api.verify(output, against=source, device=device).to_dict()
    assert told.pop("environment")["device"].partition(" ")[0] in ("cpu", "cuda:0")
    return told


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("proof", [True, False])
def test_both_devices_say_the_same(tmp_path, scheme, proof):
    more = {NAME.replace("layers.0", "layers.7"): weight(300, 512, 0.02)}
    source = single(tmp_path / "source", {**model(), **more})
    output = tmp_path / "out"
    api.quantize(source, output, api.Request(scheme=scheme), device="cpu")
    if not proof:
        (output / "lowbit.json").unlink()
    assert report_of(output, source, "cuda") == report_of(output, source, "cpu")


@pytest.mark.parametrize(("one", "shape"), CASES, ids=lambda x: getattr(x, "name", None))
def test_the_device_sees_what_the_reference_sees(one, shape):
    high, wide = one.block[0] or 1, one.block[1] or shape[1]
    for change in (None, *CHANGES):
        w, parts, generator = made(one, *shape, torch.bfloat16)
        if change is not None:
            change(w, parts, generator)
        step, held_to = step_of(one, parts, 0, shape[0]), ruler(one.element, None)
        v = ops_of(one).dequantize(parts, torch.float32)
        want = error_codes.reference(w, v, parts[DATA], step, held_to, high, wide)
        there = [x.cuda() for x in (w, v, parts[DATA], step)]
        assert error_looks.look(*there, held_to, one.block) == want, change


def test_one_flipped_code_among_16_million(tmp_path):
    source = single(tmp_path / "source", {NAME: weight(SIZE, SIZE, 0.02)})
    output = tmp_path / "out"
    api.quantize(source, output, api.Request(scheme="nvfp4"), device="cuda")
    poke(output, NAME + "_packed", ROW * SIZE // 2 + COLUMN // 2, neighbour)
    found = api.verify(output, against=source, device="cuda")
    assert [one.kind for one in found.failures] == ["manifest", "bound"]
    (row,) = found.weights
    assert row.figures is not None and row.figures.outside == 1
    assert row.figures.first_outside == (ROW, COLUMN)
    assert found.environment["device"].startswith("cuda:0 (")
