"""Faults that only the source tells of, and layers that nobody wrote."""

import torch

from lowbitcli import api
from tests import checkpoints
from tests.verify.bench import LOST, Bench, Fault, json_of
from tests.verify.faults_structure import CT, Q, edited, poked
from tests.verify.planted import DOWN, EMBED, change, poke


def deeper(output):
    json_of(output / "config.json", lambda said: said.update(num_hidden_layers=3))
    return output


def double(output):
    """Make the global scale of q, k and v twice what it was, and codes and scales for it."""

    def edit(tensors):
        for name in (Q, Q.replace("q_proj", "k_proj"), Q.replace("q_proj", "v_proj")):
            tensors[name + "weight_global_scale"].mul_(2)
            half = tensors[name + "weight_scale"].float() / 2
            tensors[name + "weight_scale"] = half.to(torch.float8_e4m3fn)

    change(output, edit)
    return output


def by_floor(output):
    """Say that a weight was made by another rule than it was."""
    made = {"kept": {}, "rounded": {"floor": [DOWN + "weight"]}}
    json_of(output / "lowbit.json", lambda said: said.update(made=made))
    return output


def dequantized(bench: Bench):
    source = bench.out("fp8_channel")
    output = bench.folder() / "plain"
    api.dequantize(source, output, device="cpu")
    (output / "lowbit.json").unlink()
    poke(output, DOWN + "weight", 100, lambda byte: byte ^ 1)
    bench.source = source
    return output


def of_nan(bench: Bench):
    output = bench.out("fp8_channel")
    tensors = checkpoints.read(bench.source)
    tensors[DOWN + "weight"][1, 2] = float("nan")
    bench.source = checkpoints.single(bench.folder(), tensors)
    return output


def nibbles(tensors):
    packed = tensors[DOWN + "weight_packed"]
    tensors[DOWN + "weight_packed"] = (packed >> 4) | (packed << 4)


AGAINST = [
    Fault(
        "compare.same_bytes:changed",
        "a bit of a tensor that is not quantized",
        "not the source's bytes; the first that differs is byte 1001 of 12288",
        poked(EMBED, 1001, lambda byte: byte ^ 0x40),
        against=True,
    ),
    Fault(
        "compare.same_bytes:unreadable",
        "a file that is lost while it is held against the source",
        LOST,
        edited(None),
        against=True,
        fails="same_bytes",
    ),
    Fault(
        "check._compare:unreadable",
        "a file that is lost while its codes are looked at",
        LOST,
        edited(None),
        against=True,
        fails="_seen_of",
    ),
    Fault(
        "compare.quantized:bound",
        "one flipped code",
        "1 of 4096 elements are not in the interval of their code; the first at row 5, column 6",
        poked(DOWN + "weight", 32 * 5 + 3, lambda byte: byte ^ 1),
        against=True,
    ),
    Fault(
        "compare.quantized:layout",
        "the nibbles of all bytes exchanged",
        "against the source: the nibbles of its bytes are exchanged",
        edited(nibbles, container=CT),
        against=True,
    ),
    Fault(
        "compare.quantized:scale",
        "scales by another rule than lowbit says",
        "bytes of the rows that were made differ, the first is byte 0 of row 1 of its codes",
        lambda bench: by_floor(bench.proven("mxfp8")),
        against=True,
    ),
    Fault(
        "counted.layers:missing",
        "a layer that the config counts and nobody wrote",
        "config.json counts 3 layers, and of 2 of model.layers nothing is there: 1, 2",
        lambda bench: deeper(bench.out("nvfp4")),
        severity="warn",
    ),
    Fault(
        "largest.problems:scale",
        "a scale of a whole matrix that its largest element does not make",
        "and the largest element in any of the 3 that share it, ",
        lambda bench: double(bench.proven()),
        against=True,
    ),
    Fault(
        "compare.unquantized:bound",
        "one value of a dequantized weight",
        "1 of 4096 elements are not the source's value in BF16, the first at [0, 50]: "
        "0.0480957031 in the source, 0.0478515625 in the output",
        dequantized,
        against=True,
    ),
    Fault(
        "compare._non_finite:nonfinite",
        "NaN in the source",
        "the source holds NaN or Inf in it, and it is quantized",
        of_nan,
        against=True,
    ),
    Fault(
        "compare._non_finite:code",
        "a code that is NaN",
        "it stands for values that are NaN or Inf",
        poked(DOWN + "weight", 100, 0x7F, "fp8_channel"),
        against=True,
    ),
]
