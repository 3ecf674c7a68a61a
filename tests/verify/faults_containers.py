"""Faults of what a container declares, and of parts that are missing, alone or of another kind."""

import json

import torch

from tests import checkpoints
from tests.checkpoints import LAYER, weight
from tests.verify.bench import Bench, Fault, json_of, metadata
from tests.verify.faults_structure import edited
from tests.verify.planted import DOWN, NORM

CT = "compressed-tensors"
MODULE = DOWN[:-1]
LOST_SCALE = LAYER + "mlp.lost_proj.weight_scale"
ENTRY = DOWN + "weight"


def declared(edit, scheme: str = "nvfp4", container: str = CT):
    """Return how to change the config of an output."""
    return lambda bench: bench.config(bench.out(scheme, container), edit)


def described(edit):
    """Return how to change what a file of lowbit's own says of a weight."""

    def plant(bench: Bench):
        output = bench.out("nvfp4", "lowbit")

        def change_entries(said):
            entries = json.loads(said["lowbit.weights"])
            edit(entries)
            said["lowbit.weights"] = json.dumps(entries)

        metadata(output / "model.safetensors", change_entries)
        return output

    return plant


def golden(name: str, edit=None, settings=None):
    """Return how to change what a peer wrote, its tensors and its config."""

    def plant(bench: Bench):
        output = bench.golden(name, edit)
        return output if settings is None else bench.config(output, settings)

    return plant


def first(tensors, suffix: str) -> str:
    return next(name for name in tensors if name.endswith(suffix))


def lose(suffix: str):
    return lambda tensors: tensors.pop(first(tensors, suffix))


def lose_module(module: str):
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if module in name]


def replace(suffix: str, how):
    """Return an edit of the first tensor of such a name."""

    def edit(tensors):
        name = first(tensors, suffix)
        tensors[name] = how(tensors[name])

    return edit


def two_groups(said) -> None:
    """Name modules, of which one is stored as it was, and one is not there."""
    said["config_groups"]["group_0"]["targets"] = ["Linear", LAYER + "mlp.named", NORM[:-7]]


def another_method(output):
    json_of(
        output / "config.json", lambda said: said["quantization_config"].update(quant_method="fp8")
    )


def said_otherwise(bench: Bench):
    output = bench.out("nvfp4", "lowbit")
    another_method(output)
    return output


CONTAINERS = [
    Fault(
        "grouping.weight_from:missing",
        "a scale that is gone",
        f"nvfp4 needs the tensor {DOWN}weight_scale, which is not there",
        edited(lambda tensors: tensors.pop(DOWN + "weight_scale"), container=CT),
    ),
    Fault(
        "grouping.weight_from:mismatch",
        "codes whose columns are no whole blocks",
        "declared nvfp4: ",
        edited(replace("down_proj.weight_packed", lambda x: x[:, :-3].contiguous()), container=CT),
    ),
    Fault(
        "grouping.weight_from:mismatch#2",
        "a scale of another dtype",
        "F8_E4M3 is needed, F32 is stored",
        edited(replace("down_proj.weight_scale", lambda x: x.float())),
    ),
    Fault(
        "grouping.weight_from:mismatch#2",
        "a scale of another shape",
        "the shape [64, 1] is needed, [64] is stored",
        edited(replace("down_proj.weight_scale", lambda x: x.reshape(-1)), "fp8_channel"),
    ),
    Fault(
        "grouping.orphans:orphan",
        "a scale without a weight",
        "a part of a quantized weight, but the weight is not there",
        edited(lambda x: x.update({LOST_SCALE: x[DOWN + "weight_scale"]}), container=CT),
    ),
    Fault(
        "suffixes.foreign:orphan",
        "a part of another container",
        "a part of a quantized weight, but not as this container has them",
        edited(lambda x: x.update({DOWN + "weight_scale_2": torch.ones(1)}), container=CT),
    ),
    *(
        Fault(
            "suffixes.unread:unknown",
            what,
            words,
            edited(lambda x, name=DOWN[:-1] + suffix: x.update({name: torch.ones(4)}),
                   container=CT),
        )
        for suffix, what, words in (
            (".weight_zero_point", "a zero point",
             "a zero point: asymmetric weights are not read"),
            (".weight_g_idx", "an activation order",
             "an activation order: reordered groups are not read"),
            (".pre_quant_scale", "a scale that was folded out",
             "a scale of the inputs that was folded out of the weight"),
            (".hadamard_transform", "a rotation",
             "a rotation of the weight, which is not undone"),
        )
    ),
    Fault(
        "plain.examine:unknown",
        "a scale where nothing is declared",
        "part of a quantized weight, but nothing says of which kind",
        lambda bench: checkpoints.single(
            bench.folder(),
            {"a.weight": weight(64, 64), "a.weight_scale": torch.ones(64)},
        ),
    ),
    Fault(
        "source._otherwise:mismatch",
        "a config that declares another container",
        "it says quant_method 'fp8', the headers say lowbit",
        said_otherwise,
    ),
    Fault(
        "source._twice:duplicate",
        "a weight that is also there as it was",
        "stored twice: as nvfp4 in model.layers.0.mlp.down_proj.weight_packed, and as it is",
        edited(lambda tensors: tensors.update({DOWN + "weight": weight(64, 64)}), container=CT),
    ),
    Fault(
        "lowbit.examine:unknown",
        "a scheme of a later version",
        "its scheme 'nvfp3' is not known to this version",
        described(lambda entries: entries[ENTRY].update(scheme="nvfp3")),
    ),
    Fault(
        "lowbit._misdescribed:mismatch",
        "a weight that is described under another name",
        "its name does not end in .weight",
        described(lambda entries: entries.update({MODULE: entries.pop(ENTRY)})),
    ),
    Fault(
        "lowbit._misdescribed:mismatch#2",
        "a weight that is described as of codes",
        "described as of dtype U8",
        described(lambda entries: entries[ENTRY].update(dtype="U8")),
    ),
    Fault(
        "lowbit._misdescribed:mismatch#3",
        "a weight that is described in another shape",
        "shape: [64, 32] described, [64, 64] stored",
        described(lambda entries: entries[ENTRY].update(shape=[64, 32])),
    ),
    Fault(
        "compressed_tensors.examine:mismatch",
        "a quantized module that the config ignores",
        "stored as if quantized, but the config ignores it or has no group for it",
        declared(lambda said: said["ignore"].append(MODULE)),
    ),
    Fault(
        "compressed_tensors._named_and_not_quantized:missing",
        "a module that the config names and is not there",
        "the config names it, and no tensor of it is there",
        declared(two_groups),
    ),
    Fault(
        "compressed_tensors._named_and_not_quantized:mismatch",
        "a module that the config names and is stored as it was",
        "the config names it as quantized, but it is stored as BF16",
        declared(two_groups),
    ),
]  # fmt: skip
