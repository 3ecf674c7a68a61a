"""Faults of what a container declares, and of parts that are missing, alone or of another kind."""

import json

import torch

from tests import checkpoints
from tests.checkpoints import LAYER, weight
from tests.verify.bench import Bench, Fault, json_of, metadata
from tests.verify.faults_structure import edited
from tests.verify.planted import DOWN, NORM, change

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


def comfy(edit=None, mark=None):
    """Return how to change a file for ComfyUI: tensors, and what a mark says."""

    def plant(bench: Bench):
        output = bench.made({DOWN + "weight": weight(64, 64)}, "nvfp4", "comfyui")

        def both(tensors):
            if edit is not None:
                edit(tensors)
            if mark is not None:
                name = MODULE + ".comfy_quant"
                said = json.loads(bytes(tensors[name].tolist()))
                mark(said)
                tensors[name] = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)

        change(output, both)
        return output

    return plant


def v4(tensors, **said):
    """Return how to make a checkpoint of DeepSeek-V4."""

    def plant(bench: Bench):
        settings = {
            **checkpoints.CONFIG,
            "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], **said},
        }
        bench.source = None
        return checkpoints.single(bench.folder(), tensors, config=settings)

    return plant


FP8 = weight(128, 128).to(torch.float8_e4m3fn)
ONE = torch.ones(1, 1)
V4 = {"layers.0.a.weight": FP8, "layers.0.a.scale": ONE}
EXPERT = "layers.0.ffn.experts.0.w1"


def torchao(edit):
    """Return how to change the header of what torchao wrote, whose tensors of a module are told of
    under one name."""

    def plant(bench: Bench):
        output = bench.golden("torchao/float8")
        metadata(output / "model.safetensors", edit)
        return output

    return plant


def strange(said):
    name = next(key for key in said if '"Float8Tensor"' in said[key])
    entry = json.loads(said[name])
    entry["_type"] = "Int4Tensor"
    said[name] = json.dumps(entry)


def plainly_listed(said):
    names = json.loads(said["tensor_names"])
    said["tensor_names"] = json.dumps([*names, "a.lost"])
    said["a.lost"] = json.dumps({"_type": "Tensor"})


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
    Fault(
        "ct_integers.shape:missing",
        "packed integers without their shape",
        "packed integers need it",
        golden("compressed-tensors/pack-int4", lose(".weight_shape")),
    ),
    Fault(
        "ct_integers.shape:mismatch",
        "a shape of packed integers that is stored as F32",
        "a shape is I64 [2], stored is F32 [2]",
        golden("compressed-tensors/pack-int4", replace(".weight_shape", lambda x: x.float())),
    ),
    Fault(
        "ct_integers.shape:mismatch#2",
        "a shape of packed integers that is another one",
        "words of 8 codes are stored",
        golden("compressed-tensors/pack-int4", replace(".weight_shape", lambda x: x * 2)),
    ),
    Fault(
        "ct_integers.shape:unknown",
        "packed integers whose columns fill no words",
        "columns, which are no whole words of 8 codes, are not read",
        golden(
            "compressed-tensors/pack-int4",
            replace(".weight_shape", lambda x: x - torch.tensor([0, 3], dtype=x.dtype)),
        ),
    ),
    Fault(
        "modelopt.examine:mismatch",
        "a quantized module that the config excludes",
        "stored as if quantized, but the config does not say so",
        declared(
            lambda said: said["ignore"].append(MODULE) or said["exclude_modules"].append(MODULE)
            if "exclude_modules" in said
            else said["ignore"].append(MODULE),
            container="modelopt",
        ),
    ),
    Fault(
        "modelopt.examine:missing",
        "a layer that the config names and is stored as it was",
        "the config names it as quantized, and it is not",
        golden("modelopt/mixed", lose_module("k_proj")),
    ),
    Fault(
        "deepseek.examine_fp8:mismatch",
        "a quantized module that the config says is not converted",
        "stored as FP8, but the config says that it is not converted",
        declared(
            lambda said: said["modules_to_not_convert"].append(MODULE), "fp8_block128", "deepseek"
        ),
    ),
    Fault(
        "deepseek_v4.examine:mismatch",
        "a quantized module that the config says is not converted",
        "stored as F8_E4M3, but the config says that it is not converted",
        v4(V4, modules_to_not_convert=["layers.0.a"]),
    ),
    Fault(
        "deepseek_v4.examine:mismatch",
        "experts of another kind than declared",
        "expert_dtype is fp4, stored is F8_E4M3",
        v4({EXPERT + ".weight": FP8, EXPERT + ".scale": ONE}, expert_dtype="fp4"),
    ),
    Fault(
        "deepseek_v4._alone:orphan",
        "a scale without a weight",
        "a scale, but the weight is not there",
        v4({**V4, "layers.0.b.scale": ONE}),
    ),
    Fault(
        "deepseek_v4._alone:mismatch",
        "a scale beside a weight that is not quantized",
        "a scale, but its weight is stored as BF16",
        v4({**V4, "layers.0.b.weight": weight(128, 128), "layers.0.b.scale": ONE}),
    ),
    Fault(
        "gpt_oss.examine:mismatch",
        "blocks of another shape",
        "blocks are [E, out, in/32, 16], this is",
        golden("gpt-oss/mxfp4", replace("_blocks", lambda x: x.flatten(2))),
    ),
    Fault(
        "torchao.examine:missing",
        "a tensor that the header lists and is gone",
        "listed in the header, and not there",
        torchao(plainly_listed),
    ),
    Fault(
        "torchao.examine:unknown",
        "a class that is not read",
        "torchao's Int4Tensor is not read",
        torchao(strange),
    ),
    Fault(
        "comfyui.examine",
        "a marked weight that is gone",
        "marked as quantized, and not there",
        comfy(lambda tensors: tensors.pop(DOWN + "weight")),
    ),
    Fault(
        "comfyui.examine",
        "a format that is not read",
        "its format 'nvfp3' is not read",
        comfy(mark=lambda said: said.update(format="nvfp3")),
    ),
    Fault(
        "comfyui.examine",
        "a rotated weight",
        "rotated by ConvRot, which is not undone",
        comfy(mark=lambda said: said.update(convrot=True)),
    ),
    Fault(
        "comfyui._marked:mismatch",
        "a mark that is none",
        "a mark is U8 and small; this is not",
        comfy(lambda x: x.update({MODULE + ".comfy_quant": torch.ones(4)})),
    ),
    Fault(
        "comfyui._marked:mismatch#2",
        "a mark and a header that disagree",
        "_quantization_metadata names another format",
        comfy(mark=lambda said: said.update(format="mxfp8")),
    ),
    Fault(
        "comfyui._shape:mismatch",
        "a mark that says another shape",
        "its mark says the shape [64, 128], stored is [64, 32]",
        comfy(mark=lambda said: said.update(orig_shape=[64, 128])),
    ),
]  # fmt: skip
