"""A group gives what its weights give one by one; kernels are held in `agreement`, tables here."""

import pytest
import torch

from lowbit_kernels import fp8, grouped, integer, mx, nvfp4
from tests.kernels.samples import difference, finite


def parts_of(ops, ws, shared=None, rule="amax"):
    given = [None] * len(ws) if shared is None else shared
    return [ops.quantize(w, s, rule) for w, s in zip(ws, given, strict=True)]


@pytest.mark.parametrize("rule", ["amax", "mse"])
@pytest.mark.parametrize("ops", [nvfp4.NVFP4, mx.MXFP8, mx.MXFP4])
def test_a_group_is_its_weights_one_by_one(ops, rule):
    ws = [finite(torch.bfloat16)["wide"], finite(torch.float32)["gauss"], torch.zeros(0, 64)]
    for got, want in zip(
        grouped.quantize(ops, ws, None, rule), parts_of(ops, ws, None, rule), strict=True
    ):
        assert got.keys() == want.keys()
        assert not any(difference(got[name], want[name]) for name in want)


def test_shared_scales_go_to_their_weights():
    ws = [finite(torch.bfloat16)["wide"], finite(torch.bfloat16)["gauss"]]
    shared = [torch.tensor(0.5), torch.tensor(0.25)]
    plain = (fp8.TENSOR, fp8.TENSOR_E5M2)
    for ops, name in ((nvfp4.NVFP4, "global_scale"), *((one, "scale") for one in plain)):
        found = grouped.quantize(ops, ws, shared)
        assert [one[name].item() for one in found] == [0.5, 0.25]


def test_each_entry_says_where_it_lies_and_which_program_is_its_first():
    jobs = [([100, 200, 300], [7, 1, 5], [0, 7, 8], [4, 1, 3]), ([1], [2], [3], [1])]
    tables, more = grouped._table(torch.device("cpu"), *jobs, more=[9, 8])
    (table, first, entries, steps), programs = tables[0]
    assert table.view(3, 3).tolist() == [[100, 7, 0], [200, 1, 7], [300, 5, 8]]
    assert first.tolist() == [0, 4, 5, 8] and first.dtype == torch.int32
    assert (entries, steps, programs) == (3, 2, 8)
    (table, first, entries, steps), programs = tables[1]
    assert (table.tolist(), first.tolist()) == ([1, 2, 3], [0, 1])
    assert (entries, steps, programs) == (1, 0, 1)
    assert more.tolist() == [9, 8]


def test_refusals_and_nothing():
    assert grouped.quantize(nvfp4.NVFP4, []) == []
    with pytest.raises(ValueError, match="1 shared scales for 2"):
        grouped.quantize(fp8.TENSOR, [torch.ones(2, 2)] * 2, [torch.tensor(1.0)])
    with pytest.raises(ValueError, match="columns"):
        grouped.quantize(nvfp4.NVFP4, [torch.ones(2, 16), torch.ones(2, 8)])
    with pytest.raises(ValueError, match="no rule"):
        grouped.quantize(integer.INT8_CHANNEL, [torch.ones(2, 2)] * 2, None, "mse")
