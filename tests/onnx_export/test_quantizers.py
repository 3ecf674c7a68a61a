"""Fake quantizers in ONNX give eager's values: by ONNX' reference evaluator, and by onnxruntime
where it has the operators (not E2M1).
"""

import pytest
import torch

pytest.importorskip("onnxscript", reason="onnxscript is not installed")
pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")

from lowbit_kernels import fake_quant as f
from lowbitcli import onnx_export
from tests.onnx_export import graphs

ROWS = torch.linspace(0, 3, 36)  # an amax of 0 first
BLOCKS = torch.linspace(0.1, 3, 36 * 6).view(36, 6)
NVFP4, MXFP8, MXFP4, MXE5M2 = ((2, 1), (4, 3)), ((4, 3), (8, 0)), ((2, 1), (8, 0)), ((5, 2), (8, 0))
SCALED = {
    "int8": lambda x: f.fake_tensor_quant(x, torch.tensor(1.25)),
    "int8, whole range": lambda x: f.fake_tensor_quant(x, torch.tensor(1.25), narrow_range=False),
    "int8 by rows": lambda x: f.fake_tensor_quant(x, ROWS, axis=0),
    "int8, rows first": lambda x: f.fake_tensor_quant(x.T, ROWS[None]),
    "int6, own amax": lambda x: f.fake_tensor_quant(x, x.abs().amax(1, keepdim=True), num_bits=6),
    "int4 by blocks": lambda x: f.fake_tensor_quant(x, BLOCKS, num_bits=4, block_size=16),
    "int4 by blocks of rows": lambda x: f.fake_tensor_quant(
        x, BLOCKS.reshape(-1)[:192].view(2, 96), num_bits=4, block_size=18, axis=0
    ),
    "uint8": lambda x: f.fake_tensor_quant(x.abs(), torch.tensor(2.0), unsigned=True),
    "uint3": lambda x: f.fake_tensor_quant(x.abs(), ROWS, num_bits=3, unsigned=True, axis=0),
    "int16": lambda x: f.fake_tensor_quant(x, torch.tensor(3.0), num_bits=16),
    "biased": lambda x: f.fake_tensor_quant(x, torch.tensor(1.25), torch.tensor(0.3)),
    "matrices": lambda x: f.fake_quant_impl(x.view(2, 18, 96), BLOCKS[:1, :2].T[..., None]),
    "each row of matrices": lambda x: f.fake_quant_impl(x.view(2, 18, 96), ROWS.view(2, 18, 1)),
    "each element": lambda x: f.fake_quant_impl(x[:, :6], BLOCKS),
    "e4m3": lambda x: f.scaled_e4m3(x, torch.tensor(1.25)),
    "e4m3 by rows": lambda x: f.scaled_e4m3(x, ROWS[:, None]),
    "e4m3, own amax": lambda x: f.fp8_eager(x, x.abs().amax(1, keepdim=True)),
}
WITHOUT_E2M1 = {
    "e4m3, no scale": lambda x: f.scaled_e4m3(x),
    "int_cast": lambda x: f.int_cast(x, 8),
    "int_cast to 3": lambda x: f.int_cast(x, 3, narrow_range=False),
    "uint_cast": lambda x: f.int_cast(x, 4, unsigned=True),
    "mxfp8": lambda x: f.dynamic_block_quant(x, 32, None, None, *MXFP8),
    "mxfp8 in 16": lambda x: f.dynamic_block_quant(x, 16, None, None, *MXFP8),
    "mxfp8, ragged": lambda x: f.dynamic_block_quant(x[:, :70], 32, None, None, *MXFP8),
    "mxfp8 of a vector": lambda x: f.dynamic_block_quant(x[3], 32, None, None, *MXFP8),
    "mxfp8 of matrices": lambda x: f.dynamic_block_quant(x.view(3, 12, 96), 8, None, None, *MXFP8),
    "mx of e5m2": lambda x: f.dynamic_block_quant(x, 32, None, None, *MXE5M2),
}
WITH_E2M1 = {
    "fp4_cast": lambda x: f.fp4_cast(x),
    "fp4_cast to fp16": lambda x: f.fp4_cast(x, torch.float16),
    "nvfp4": lambda x: f.dynamic_block_quant(x, 16, None, None, *NVFP4),
    "nvfp4, given amax": lambda x: f.dynamic_block_quant(x, 16, ROWS, None, *NVFP4),
    "nvfp4 of zeros": lambda x: f.dynamic_block_quant(x * 0, 16, None, None, *NVFP4),
    "nvfp4, ragged": lambda x: f.dynamic_block_quant(x[:, :70], 16, None, None, *NVFP4),
    "mxfp4": lambda x: f.dynamic_block_quant(x, 32, None, None, *MXFP4),
    "static, fp32 scales": lambda x: f.static_block_fp4(x, BLOCKS, None, False),
    "static, across rows": lambda x: f.static_block_fp4(x, ROWS[:18] + 0.1, None, False),
}


def test_values_are_those_of_eager():
    x = graphs.example()
    model = graphs.exported(graphs.Each(WITH_E2M1), x)
    assert graphs.unequal(WITH_E2M1, x, graphs.by_reference(model, x)) == []
    operators = {node.op_type for node in model.graph.node}
    assert {"QuantizeLinear", "DequantizeLinear"} < operators
    assert {node.domain for node in model.graph.node} == {""}


def test_values_without_e2m1_are_those_of_eager():
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    x = graphs.example()
    model = graphs.exported(graphs.Each(WITHOUT_E2M1), x)
    assert graphs.unequal(WITHOUT_E2M1, x, graphs.by_reference(model, x)) == []
    assert graphs.unequal(WITHOUT_E2M1, x, graphs.by_onnxruntime(runtime, model, x)) == []


def test_exact_values_of_a_scale_are_those_of_eager():
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    x = graphs.example()
    model = graphs.exported(graphs.Each(SCALED), x, exact=True)
    assert graphs.unequal(SCALED, x, graphs.by_reference(model, x)) == []
    assert graphs.unequal(SCALED, x, graphs.by_onnxruntime(runtime, model, x)) == []


def far(x, got, want):
    """Return how many values are neither within two ulp of `want`, nor the code beside it where
    `x` lies within 2^-20 of the middle of both.
    """
    near = (got - want).abs() <= want.abs() * 2.0**-22
    middle = (got.double() + want.double()) / 2
    tie = (x.double() - middle).abs() <= x.double().abs() * 2.0**-20
    return int((~near & ~tie).sum())


def test_values_of_a_scale_differ_by_ulps_and_at_ties():
    """The operators divide by a scale where eager multiplies by its reciprocal."""
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    x = graphs.example()
    x[30:, :48] = (torch.arange(6 * 48).view(6, 48) - 144.5) * (1.25 / 127)  # ties of int8
    functions = {name: call for name, call in SCALED.items() if name != "biased"}
    model = graphs.exported(graphs.Each(functions), x)
    outputs = graphs.by_reference(model, x)
    again = [
        *graphs.by_onnxruntime(runtime, model, x),
        *graphs.by_onnxruntime(runtime, model, x, "ORT_ENABLE_ALL"),
    ]
    flips = 0
    for i, got in enumerate(outputs + again):
        name, call = list(functions.items())[i % len(functions)]
        want = call(x)
        source = {"int8, rows first": x.T, "each element": x[:, :6]}.get(name, x)
        source = source.abs() if name.startswith("uint") else source
        assert far(source.reshape(want.shape), got, want) == 0, name
        flips += int(((got - want).abs() > want.abs() * 2.0**-20).sum())
    assert flips


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inputs_of_16_bits_go_through_fp32(dtype):
    chosen = ("nvfp4", "mxfp4", "fp4_cast", "static, fp32 scales")
    functions = {name: WITH_E2M1[name] for name in chosen}
    functions |= {name: WITHOUT_E2M1[name] for name in ("mxfp8", "e4m3, no scale")}
    x = graphs.example(dtype)
    model = graphs.exported(graphs.Each(functions), x)
    assert graphs.unequal(functions, x, graphs.by_reference(model, x)) == []


def test_a_precision_is_that_of_what_is_quantized():
    functions = {name: WITH_E2M1[name] for name in ("nvfp4", "mxfp4")}
    functions |= {"mxfp8": WITHOUT_E2M1["mxfp8"], "int8": SCALED["int8"], "e4m3": SCALED["e4m3"]}
    x = graphs.example(torch.float16).clamp(-100, 100)  # fp16 holds 100 over the scale of int8
    for asked, element in ((None, 10), ("Half", 10), ("BFloat16", 16)):
        model = graphs.exported(graphs.Each(functions), x, trt_high_precision_dtype=asked)
        values = {v.name: v.type.tensor_type.elem_type for v in model.graph.value_info}
        values |= {v.name: v.type.tensor_type.elem_type for v in model.graph.input}
        rounded = [n.output[0] for n in model.graph.node if n.op_type == "DequantizeLinear"]
        values |= {v.name: v.type.tensor_type.elem_type for v in model.graph.output}
        assert [values[name] for name in rounded].count(element) == len(functions)
        for (name, call), got in zip(functions.items(), graphs.by_reference(model, x), strict=True):
            want = call(x)
            assert got.dtype == torch.float16
            error = (got.double() - want.double()).square().sum() / want.double().square().sum()
            assert error < 1e-3, name


@pytest.mark.parametrize("version", [25, onnx_export.translate.LAST_OPSET])
def test_a_later_operator_set(version):
    x = graphs.example()
    functions = {"nvfp4": WITH_E2M1["nvfp4"], "mxfp8": WITHOUT_E2M1["mxfp8"]}
    model = graphs.exported(graphs.Each(functions), x, opset_version=version)
    assert [one.version for one in model.opset_import] == [version]
    assert graphs.unequal(functions, x, graphs.by_reference(model, x)) == []
