"""A tiny checkpoint in every container, as its own tool wrote it where that can be."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from lowbitcli import api
from tests import checkpoints
from tests.checkpoints import LAYER, sharded, single, weight

GOLDEN = Path(__file__).parents[1] / "golden"
# container -> goldens of it: directories, and files
DIRECTORIES = {
    "compressed-tensors": (
        *("fp8_block", "fp8_dynamic", "int8-g64", "mxfp4", "mxfp8", "nvfp4a16", "nvfp4a16-moe"),
        *("oneshot-nvfp4", "pack-int4", "pack-int4-channel", "pack-int8"),
    ),
    "modelopt": (
        *("fp8", "fp8-kv", "fp8_pb_wo", "fp8_per_channel", "mixed", "mxfp4", "mxfp8", "nvfp4"),
        *("nvfp4-moe", "w4a16_nvfp4"),
    ),
    "deepseek": ("fp8-block", "fp8-block-ue8m0"),
    "gpt-oss": ("mxfp4",),
    "native-mxfp8": ("mxfp8",),
    "torchao": ("float8", "mx", "mx-swizzled", "nvfp4", "nvfp4-swizzled"),
}
FILES = {"comfyui": ("float8_e4m3fn", "float8_e5m2", "int8_tensorwise", "mxfp8", "nvfp4")}


def _copied(source: Path) -> Callable[[Path], Path]:
    def make(place: Path) -> Path:
        where = place / ("in" if source.is_dir() else "in.safetensors")
        return Path(
            shutil.copytree(source, where) if source.is_dir() else shutil.copy(source, where)
        )

    return make


def plain(place: Path) -> Path:
    """Two shards with a fused group in both."""
    first = {f"{LAYER}self_attn.{x}_proj.weight": weight(32, 64, seed=ord(x)) for x in "qk"}
    second = {
        f"{LAYER}self_attn.v_proj.weight": weight(32, 64),
        "model.norm.weight": torch.ones(64, dtype=torch.bfloat16),
    }
    return sharded(place / "in", first, second)


def lowbit(place: Path) -> Path:
    """What we write: shards, a manifest, and beside them a file."""
    api.quantize(plain(place / "made"), place / "in", api.Request(scheme="nvfp4"), device="cpu")
    shutil.rmtree(place / "made")
    return place / "in"


def lowbit_file(place: Path) -> Path:
    tensors = {"a.weight": weight(32, 64), "b.weight": weight(32, 64, seed=1)}
    source = checkpoints.write(place / "made.safetensors", tensors)
    request = api.Request(scheme="mxfp8", container="lowbit")
    api.quantize(source, place / "in.safetensors", request, device="cpu")
    source.unlink()
    return place / "in.safetensors"


def deepseek_v4(place: Path) -> Path:
    codes = torch.arange(8, dtype=torch.uint8).reshape(2, 4) + 118
    config = {
        "model_type": "deepseek_v4",
        "torch_dtype": "bfloat16",
        "expert_dtype": "fp4",
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
    }
    expert, linear = "layers.0.ffn.experts.3.w1", "layers.0.attn.wq_a"
    tensors = {
        f"{linear}.weight": weight(200, 288).float().clamp(-448, 448).to(torch.float8_e4m3fn),
        f"{linear}.scale": (torch.arange(6, dtype=torch.uint8).reshape(2, 3) + 118).view(
            torch.float8_e8m0fnu
        ),
        f"{expert}.weight": torch.arange(128, dtype=torch.int8).reshape(2, 64),
        f"{expert}.scale": codes.view(torch.float8_e8m0fnu),
        "layers.0.attn_norm.weight": weight(1, 64)[0],
    }
    return single(place / "in", tensors, config)


def diffusers(place: Path) -> Path:
    root = place / "in"
    block = "transformer_blocks.0.attn.to_q.weight"
    single(root / "transformer", {block: weight(32, 64)}, {"_class_name": "FluxTransformer2DModel"})
    text = {"encoder.block.0.layer.0.SelfAttention.q.weight": weight(32, 64)}
    single(root / "text_encoder", text, {"model_type": "t5", "architectures": ["T5EncoderModel"]})
    for folder in ("transformer", "text_encoder"):
        name = (
            "diffusion_pytorch_model.safetensors"
            if folder == "transformer"
            else "model.safetensors"
        )
        (root / folder / "model.safetensors").rename(root / folder / name)
    said = {
        "_class_name": "FluxPipeline",
        "_diffusers_version": "0.35",
        "transformer": ["diffusers", "FluxTransformer2DModel"],
        "text_encoder": ["transformers", "T5EncoderModel"],
    }
    (root / "model_index.json").write_text(json.dumps(said))
    return root


MODELS: dict[str, Callable[[Path], Path]] = {
    **{
        f"{container}/{name}": _copied(GOLDEN / container / name)
        for container, names in DIRECTORIES.items()
        for name in names
    },
    **{
        f"{container}/{name}": _copied(GOLDEN / container / f"{name}.safetensors")
        for container, names in FILES.items()
        for name in names
    },
    "plain": plain,
    "lowbit": lowbit,
    "lowbit file": lowbit_file,
    "deepseek-v4": deepseek_v4,
    "diffusers": diffusers,
}
