"""Faults of what single containers declare: packed integers, ModelOpt, DeepSeek, gpt-oss, torchao,
ComfyUI."""

import json

import torch

from tests import checkpoints
from tests.checkpoints import weight
from tests.verify.bench import Bench, Fault, metadata
from tests.verify.faults_containers import MODULE, declared, golden, lose, lose_module, replace
from tests.verify.planted import DOWN, change


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


PEERS = [
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
