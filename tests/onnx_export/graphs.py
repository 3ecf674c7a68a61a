"""Models of fake quantization, exported once, and what runs them."""

import logging
import warnings

import ml_dtypes
import numpy
import onnx
import torch
from onnx.reference import ReferenceEvaluator

from lowbitcli import onnx_export
from tests.kernels import samples

CASES = ("gauss", "wide", "sparse", "zeros", "ties", "ties_scaled")


class Each(torch.nn.Module):
    """Gives an output for each of the functions."""

    def __init__(self, functions):
        super().__init__()
        self.functions = functions

    def forward(self, x):
        return tuple(function(x) for function in self.functions.values())


def example(dtype=torch.float32):
    """Return `[36, 96]` of all that rounding meets, less what is far from ordinary."""
    return torch.cat([samples.weights(dtype)[name] for name in CASES])


def exported(model, x, **options):
    """Return the checked model."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = onnx_export.export(model, (x,), **options)
        onnx.checker.check_model(program.model_proto, full_check=True)
    return program.model_proto


def _array(x):
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def _tensor(array):
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(numpy.int16)).view(torch.bfloat16)
    return torch.from_numpy(numpy.array(array))


def by_reference(model, x):
    """Return the outputs of ONNX' reference evaluator."""
    name = model.graph.input[0].name
    return [_tensor(y) for y in ReferenceEvaluator(model).run(None, {name: _array(x)})]


def by_onnxruntime(runtime, model, x, level="ORT_DISABLE_ALL"):
    """Return the outputs of onnxruntime; its optimizer reorders fp32 arithmetic of scales."""
    options = runtime.SessionOptions()
    options.graph_optimization_level = getattr(runtime.GraphOptimizationLevel, level)
    session = runtime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return [_tensor(y) for y in session.run(None, {model.graph.input[0].name: _array(x)})]


def unequal(functions, x, outputs):
    """Return the names of functions whose values, signs of zeros aside, are not those of eager."""
    found = []
    for (name, function), got in zip(functions.items(), outputs, strict=True):
        want = function(x)
        if got.dtype != want.dtype or not torch.equal(got, want):
            found.append(name)
    return found
