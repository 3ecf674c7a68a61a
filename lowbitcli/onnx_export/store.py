"""Store the codes and scales of weights in an ONNX model, in the place of operators that make them.

What depends on no input of the model is computed once, by ONNX' reference evaluator. Kept are the
DequantizeLinear that read it, so that a weight takes the memory of its codes: with NVFP4 one for
the scales of blocks and one for the weight.
"""

from typing import Any

import numpy
import onnx  # pyright: ignore[reportMissingImports]
from onnx.reference import ReferenceEvaluator  # pyright: ignore[reportMissingImports]
from onnxscript import ir  # pyright: ignore[reportMissingImports]

KEPT = "DequantizeLinear"

Value = Any
Node = Any


def constants(model: Any) -> None:
    """Store what `model`, an `onnxscript.ir.Model`, needs not compute anew: it is changed."""
    graph = model.graph
    made = _made_of_weights(graph)
    inside = set(made)
    wanted = [
        value
        for node in made
        if node.op_type not in (KEPT, "Constant")
        for value in node.outputs
        if any(user.op_type == KEPT or user not in inside for user, _ in value.uses())
    ]
    if not wanted:
        return
    for value, array in zip(wanted, _evaluated(graph, made, wanted), strict=True):
        _store(graph, value, array)
    _drop_unused(graph)


def _made_of_weights(graph: Any) -> list[Node]:
    """Return the nodes that quantize what depends on no input, and those that lead to them."""
    known: set[Value] = set(graph.initializers.values())
    nodes = []
    for node in graph:  # in an order of computation
        inputs = [value for value in node.inputs if value is not None]
        if all(value in known for value in inputs) and not _has_graphs(node):
            nodes.append(node)
            known.update(node.outputs)
    needed: set[Value] = set()
    leading = []
    for node in reversed(nodes):
        if node.op_type == "QuantizeLinear" or any(value in needed for value in node.outputs):
            leading.append(node)
            needed.update(value for value in node.inputs if value is not None)
    return leading[::-1]


def _has_graphs(node: Node) -> bool:
    kinds = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    return any(attribute.type in kinds for attribute in node.attributes.values())


def _evaluated(graph: Any, nodes: list[Node], wanted: list[Value]) -> list[numpy.ndarray]:
    """Return the arrays of values that `nodes` make of initializers."""
    read = {value for node in nodes for value in node.inputs if value is not None}
    proto = onnx.helper.make_model(
        onnx.helper.make_graph(
            [ir.to_proto(node) for node in nodes],
            "constants",
            [],
            [onnx.ValueInfoProto(name=value.name) for value in wanted],
            [ir.to_proto(_named(v)) for v in graph.initializers.values() if v in read],
        ),
        opset_imports=[onnx.helper.make_opsetid(d, v) for d, v in graph.opset_imports.items()],
    )
    return ReferenceEvaluator(proto).run(None, {})


def _named(initializer: Value) -> Any:
    tensor = initializer.const_value
    return ir.tensor(tensor.numpy(), dtype=tensor.dtype, name=initializer.name)


def _store(graph: Any, value: Value, array: numpy.ndarray) -> None:
    """Put an initializer in the place of a value."""
    name = f"{value.name}_stored"
    tensor = ir.tensor(array, dtype=value.dtype, name=name)
    stored = ir.Value(
        name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor
    )
    graph.register_initializer(stored)
    value.replace_all_uses_with(stored, replace_graph_outputs=True)


def _drop_unused(graph: Any) -> None:
    """Leave out nodes and initializers that nothing reads any more."""
    for node in reversed(list(graph)):
        if not any(value.uses() or value in graph.outputs for value in node.outputs):
            graph.remove(node, safe=True)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and value not in graph.outputs and value not in graph.inputs:
            del graph.initializers[name]
