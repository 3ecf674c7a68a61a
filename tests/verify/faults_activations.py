"""Faults of scales of activations."""

import json
import math

import torch

from tests.checkpoints import weight
from tests.verify.bench import LOST, Bench, Fault
from tests.verify.faults_numbers import CT, INPUT, K, Q, V
from tests.verify.planted import change


def activations(edit, container: str = CT):
    """Return how to change an output that has scales of activations."""

    def plant(bench: Bench):
        names = [Q[:-1], K[:-1], V[:-1]]
        stats = bench.folder() / "a.json"
        stats.write_text(json.dumps(dict.fromkeys(names, 3.0)))
        tensors = {f"{name}.weight": weight(64, 64) for name in names}
        output = bench.made(tensors, container=container, activation_scales=stats)
        change(output, edit)
        return output

    return plant


ACTIVATIONS = [
    Fault(
        "inputs.inputs:missing",
        "a scale of activations that is declared and gone",
        "declares 4-bit activations, and it is not there",
        activations(lambda tensors: tensors.pop(V + INPUT)),
    ),
    Fault(
        "inputs._number:scale",
        "a scale of activations that is stored as integers",
        "it is stored as I32",
        activations(lambda x: x.update({V + INPUT: x[V + INPUT].to(torch.int32)})),
    ),
    Fault(
        "inputs._number:scale#2",
        "a scale of activations that is NaN",
        "nan, and a scale is above zero",
        activations(lambda tensors: tensors[V + INPUT].fill_(math.nan)),
    ),
    Fault(
        "inputs._number:unreadable",
        "a file that is lost while scales of activations are read",
        LOST,
        activations(lambda _: None),
        fails="inputs",
    ),
    Fault(
        "inputs._differing:shared",
        "scales of activations of q, k and v that differ",
        "served as one matrix, and their inputs have different scales",
        activations(lambda tensors: tensors[K + INPUT].mul_(2)),
        severity="warn",
    ),
]
