"""What each consumer reads of each container, and what becomes of the rest: tables.

`OK` is read; `No` is not, or is read wrong; `Known` is read with something to be known. A pair that
is not listed was neither tried nor read in the consumer's source, and is said to be so.

| consumer | read or tried | sources |
|---|---|---|
| vllm | 0.33.0 | `model_executor/layers/quantization/` |
| sglang | 0.5.23 | `srt/layers/quantization/`, `srt/models/llama.py` |
| tensorrt-llm | main @2edf354d | `quantization/`, `_torch/modules/linear.py`, read and not run |
| transformers | 5.24.0, compressed-tensors 0.20.1 | `quantizers/`, `integrations/` |
| comfyui | 0.38.1, comfy-kitchen 0.2.40 | `comfy/ops.py`, `comfy/quant_ops.py` |
"""

from typing import NamedTuple

VERSIONS = {
    "vllm": "vLLM 0.33.0",
    "sglang": "SGLang 0.5.23",
    "tensorrt-llm": "TensorRT-LLM main @2edf354d",
    "transformers": "transformers 5.24.0",
    "comfyui": "ComfyUI 0.38.1",
}
CONSUMERS = tuple(VERSIONS)


class OK(NamedTuple):
    """It is read as it is meant."""


class No(NamedTuple):
    """It is not read, or wrong: what happens. `where` is all, dense (no experts) or experts."""

    why: str
    where: str = "all"


class Known(NamedTuple):
    """It is read, with something to be known."""

    why: str


Answer = OK | No | Known
_OK = OK()
_FLOATS = ("fp8_tensor", "fp8_channel", "fp8_block128", "mxfp8", "mxfp4", "nvfp4")
_ALL = (*_FLOATS, "int8_channel", "int4_g128")
_NO_SCHEME = No("NotImplementedError: No compressed-tensors compatible scheme", "dense")
_GARBAGE = No(
    "it does not know quant_method modelopt, warns that it skips the quantization, and takes the "
    "FP8 codes for weights"
)
_OTHER_SIZE = No("it does not know quant_method modelopt: RuntimeError, the sizes do not match")
_LOST_SCALE = No("it looks for weight_scale_inv, and leaves every weight_scale unread")
_UNKNOWN_ALGO = No("ValueError: it has no such quant_algo")

# consumer -> container -> scheme -> answer
READS: dict[str, dict[str, dict[str, Answer]]] = {
    "vllm": {
        "compressed-tensors": dict.fromkeys(_ALL, _OK),
        "modelopt": {
            **dict.fromkeys(_FLOATS, _OK),
            "fp8_channel": No("it has no experts in FP8_PER_CHANNEL_PER_TOKEN", "experts"),
            "mxfp4": _UNKNOWN_ALGO,
        },
        "deepseek": {"fp8_block128": _OK, "fp8_tensor": _OK},
        "native-mxfp8": {
            "mxfp8": No(
                "ValueError: There is no module or parameter named ...weight_scale_inv (only some "
                "models rename it)"
            )
        },
        "gpt-oss": {"mxfp4": _OK},
    },
    "sglang": {
        "compressed-tensors": {
            **dict.fromkeys(_ALL, _OK),
            "mxfp8": _NO_SCHEME,
            "mxfp4": _NO_SCHEME,
        },
        "modelopt": {
            "fp8_tensor": _OK,
            "nvfp4": _OK,
            "fp8_channel": No("it has no method for FP8_PER_CHANNEL_PER_TOKEN"),
            "fp8_block128": No("it has no method for fp8_pb_wo"),
            "mxfp8": _LOST_SCALE,
            "mxfp4": _UNKNOWN_ALGO,
        },
        "deepseek": {"fp8_block128": _OK, "fp8_tensor": _OK},
        "native-mxfp8": {"mxfp8": _OK},
        "gpt-oss": {"mxfp4": _OK},
    },
    "tensorrt-llm": {
        "compressed-tensors": {
            "fp8_channel": _OK,
            "fp8_block128": _OK,
            "nvfp4": _OK,
            "mxfp4": Known("it reads it as weight-only W4A16_MXFP4"),
            "mxfp8": No("ValueError: Unsupported weights_quant_strategy: group"),
        },
        "modelopt": dict.fromkeys(("fp8_tensor", "fp8_block128", "nvfp4", "mxfp8"), _OK),
        "deepseek": {"fp8_block128": _OK},
        "native-mxfp8": {"mxfp8": _OK},
    },
    "transformers": {
        "compressed-tensors": {
            **dict.fromkeys(_ALL, _OK),
            "fp8_block128": No("RuntimeError where it loads experts", "experts"),
            "mxfp8": No("RuntimeError where it loads experts", "experts"),
            "nvfp4": No(
                "it leaves out the global scale of experts and says nothing: their weights come "
                "out larger by its reciprocal",
                "experts",
            ),
        },
        "modelopt": {
            **dict.fromkeys(("fp8_tensor", "fp8_channel", "fp8_block128", "mxfp8"), _GARBAGE),
            "nvfp4": _OTHER_SIZE,
            "mxfp4": _OTHER_SIZE,
        },
        "deepseek": {"fp8_block128": _OK},
        "native-mxfp8": {"mxfp8": _OK},
        "gpt-oss": {"mxfp4": _OK},
        "torchao": dict.fromkeys(_FLOATS, Known("it needs torchao installed")),
    },
    "comfyui": {
        "comfyui": dict.fromkeys(
            ("fp8_tensor", "fp8_tensor_e5m2", "mxfp8", "nvfp4", "int8_channel"), _OK
        )
    },
}

# Containers of which a consumer knows nothing at all -> what it says.
STRANGERS: dict[str, str] = {
    "lowbit": "it does not know lowbit's own container: write one of its own with --container",
    "comfyui": "it does not read ComfyUI's container",
    "torchao": "torchao's flattened tensors were not tried there",
    "gpt-oss": "gpt-oss's stacks were not tried there",
    "deepseek-v4": "DeepSeek-V4's tensors were not tried there",
}
# What is not tried is a warning, and not a reason to fail.
UNTRIED = ("torchao", "gpt-oss", "deepseek-v4")
