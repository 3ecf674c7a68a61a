"""What a consumer would make of shapes and numbers of scales, and of parts that are missing: a
fault for each rule and each consumer that it holds for."""

import torch

from tests.checkpoints import weight
from tests.verify.bench import Bench, Fault, relabelled
from tests.verify.faults_activations import activations
from tests.verify.faults_consumers import CT, EXTRA, HUB, SERVERS, WRITTEN
from tests.verify.faults_containers import golden, lose, replace
from tests.verify.faults_numbers import INPUT, K, Q, V
from tests.verify.faults_structure import edited
from tests.verify.planted import DOWN, GATE, UP

GROUPED = "global scales differ in a group"


def ragged(container: str):
    def plant(bench: Bench):
        return bench.made(
            {name + "weight": weight(192, 128) for name in (Q, K, V)}, "fp8_block128", container
        )

    return plant


def awkward(bench: Bench):
    """133 rows are two blocks, and no multiple of two."""
    return bench.made({DOWN + "weight": weight(133, 128)}, "fp8_block128", "deepseek")


def comfy_exponents(bench: Bench):
    return bench.golden("comfyui/mxfp8.safetensors", relabelled)


LOADED = [
    Fault("rules_shapes.shapes", "[o] for [o, 1]",
          "the scale is stored as [64], [64, 1] is asserted",
          edited(replace("down_proj.weight_scale", lambda x: x.reshape(-1)), "fp8_channel", CT),
          consumers=("vllm", "sglang")),
    Fault("rules_shapes.shapes#2", "[o, 1] for [o]",
          "the scale is stored as [64, 1], [64] is asserted",
          edited(replace("down_proj.weight_scale", lambda x: x.reshape(-1, 1)), "fp8_channel",
                 "modelopt"), consumers=("vllm",)),
    Fault("rules_shapes.shapes#3", "two dimensions for four",
          "the scale is stored as [1, 1], four dimensions are asserted",
          edited(replace("down_proj.weight_scale", lambda x: x.reshape(1, 1)), "fp8_block128",
                 "modelopt"), consumers=("vllm",)),
    *(
        Fault("rules_shapes.e8m0", "exponents that are called F8_E8M0",
              "scales are stored as F8_E8M0, U8 is read: " + words, plant, consumers=(consumer,))
        for consumer, words, plant in (
            ("vllm", "it copies them by value into bytes: scales below 1 become 0, and so do",
             edited(relabelled, "mxfp4", CT)),
            ("sglang", "ValueError in copy_with_check", edited(relabelled, "mxfp4", CT)),
            ("tensorrt-llm", "bytes are expected", edited(relabelled, "mxfp4", CT)),
            ("transformers", "it copies them by value into bytes: relative error 1",
             edited(relabelled, "mxfp4", CT)),
            ("comfyui", "KeyError: 'F8_E8M0'", comfy_exponents),
        )
    ),
    Fault("rules_shapes.stored_twice", "a scale under two names",
          "a scale is stored twice, also as model.layers.0.mlp.down_proj.weight_scale: ValueError",
          edited(lambda x: x.update({DOWN + "weight_scale_inv": x[DOWN + "weight_scale"]}),
                 "fp8_block128", CT), consumers=("vllm",)),
    Fault("rules_shapes.ragged_columns", "merged columns that are no whole blocks",
          "192 rows are no multiple of 128, and", ragged("deepseek"), consumers=("vllm",)),
    Fault("rules_shapes.ragged_blocks", "blocks that are not whole",
          "[192, 128] is no multiple of 128: it takes blocks for 96 x 128: read wrong, silently",
          ragged("deepseek"), consumers=("transformers",)),
    Fault("rules_shapes.ragged_blocks", "blocks that are not whole",
          "[133, 128] is no multiple of 128: ValueError", awkward, consumers=("transformers",)),
    Fault("rules_scales.global_scales#2", "global scales of NVFP4 that differ in a group",
          GROUPED + " that is served as one matrix",
          edited(lambda tensors: tensors[GATE + "weight_global_scale"].mul_(4), container=CT),
          consumers=("vllm", "sglang")),
    Fault("rules_scales.global_scales", "global scales of NVFP4 that differ in a group",
          GROUPED + ": AssertionError",
          edited(lambda tensors: tensors[K + "weight_scale_2"].mul_(2), container="modelopt"),
          consumers=("tensorrt-llm",)),
    Fault("rules_scales.input_scales", "scales of activations that differ in a group",
          "scales of activations differ in a group: it takes the largest for all",
          activations(lambda tensors: tensors[K + INPUT].mul_(2)),
          consumers=SERVERS, severity="warn"),
    Fault("rules_scales.input_scales", "scales of activations that differ in a group",
          "scales of activations differ in a group: AssertionError",
          activations(lambda tensors: tensors[K + "input_scale"].mul_(2), "modelopt"),
          consumers=("tensorrt-llm",)),
    Fault("rules_scales.tensor_scales", "scales of fp8_tensor that differ in a group",
          "scales differ in a group: it requantizes all to",
          edited(lambda tensors: tensors[UP + "weight_scale"].mul_(8), "fp8_tensor", CT),
          consumers=("vllm", "sglang"), severity="warn"),
    Fault("rules_scales.deep_gemm", "scales of blocks that are no powers of two",
          "scales of 128 x 128 blocks are no powers of two: where it uses DeepGEMM",
          edited(None, "fp8_block128", CT), consumers=("vllm",), severity="warn"),
    Fault("consumers._problems:unreadable", "a file that is lost while its scales are held",
          "it went away", edited(None, container=CT), consumers=("vllm",), fails="global_scales"),
    *(
        Fault("rules_names.findings", what, words, plant, consumers=consumers)
        for what, words, plant, consumers in (
            ("a scale that is gone", f"is not there: {WRITTEN}, or stops",
             edited(lose("weight_scale"), container=CT), ("vllm",)),
            ("a scale that is gone",
             "is not there: it logs a line and computes with memory that nothing was written to",
             edited(lose("weight_scale"), container=CT), ("sglang",)),
            ("a scale that is gone", "is not there: KeyError where it loads the layer",
             edited(lose("weight_scale"), container=CT), ("tensorrt-llm",)),
            ("a scale that is gone", "is not there: the weight is initialised anew",
             edited(lose("weight_scale"), container=CT), ("transformers",)),
            ("a scale that is gone", "is not there: KeyError where it loads the layer",
             golden("comfyui/nvfp4.safetensors", lose("weight_scale")), ("comfyui",)),
            ("a scale without a weight",
             "but the weight is not there: ValueError: There is no module or parameter named so",
             edited(lambda x: x.update({EXTRA + ".weight_scale": torch.ones(1)}), container=CT),
             ("vllm",)),
            ("a scale without a weight",
             "but the weight is not there: a line in the log, and nothing else",
             edited(lambda x: x.update({EXTRA + ".weight_scale": torch.ones(1)}), container=CT),
             ("sglang",)),
            ("a scale without a weight", "but the weight is not there: reported as UNEXPECTED",
             edited(lambda x: x.update({EXTRA + ".weight_scale": torch.ones(1)}), container=CT),
             ("transformers",)),
            ("a scale of another dtype",
             "F32 is stored: an AssertionError, or numbers that are read wrong",
             edited(replace("weight_scale", lambda x: x.float()), container=CT), HUB),
            ("a scale of another dtype",
             "F32 is stored: an AssertionError, or numbers that are read wrong",
             golden("comfyui/nvfp4.safetensors", replace("weight_scale", lambda x: x.float())),
             ("comfyui",)),
            ("a weight that is also there as it was",
             "and as it is: ValueError: There is no module or parameter named so",
             edited(lambda x: x.update({DOWN + "weight": weight(64, 64)}), container=CT),
             ("vllm",)),
        )
    ),
]  # fmt: skip
