"""Families of diffusion models, each known by tensors that only it has: what ComfyUI loads from one
file.

Names stand after the prefix of the model in a file of several parts, if there is one. Source:
ComfyUI 0.38 `comfy/model_detection.py`, which asks for the same names.
"""

from collections.abc import Iterable

PREFIXES = ("", "model.diffusion_model.", "diffusion_model.", "model.", "net.")

# family -> tensors that must all be there
FAMILIES: dict[str, tuple[str, ...]] = {
    "Stable Diffusion": ("input_blocks.0.0.weight", "middle_block.0.in_layers.0.weight"),
    "Stable Diffusion 3": ("joint_blocks.0.context_block.attn.qkv.weight",),
    "Stable Cascade": ("clip_txt_mapper.weight",),
    "Flux": ("double_blocks.0.img_attn.norm.key_norm.scale",),
    "Flux 2": ("double_stream_modulation_img.lin.weight",),
    "Chroma": ("distilled_guidance_layer.norms.0.scale",),
    "AuraFlow": ("double_layers.0.attn.w1q.weight",),
    "PixArt": ("t_block.1.weight", "y_embedder.y_embedding"),
    "Hunyuan-DiT": ("mlp_t5.0.weight",),
    "HunyuanVideo": ("txt_in.individual_token_refiner.blocks.0.norm1.weight",),
    "Mochi": ("t5_yproj.weight",),
    "LTX-Video": ("adaln_single.emb.timestep_embedder.linear_1.bias", "scale_shift_table"),
    "Wan": ("head.modulation",),
    "Lumina 2": ("cap_embedder.1.weight",),
    "HiDream": ("caption_projection.0.linear.weight",),
    "Cosmos": ("blocks.block0.blocks.0.block.attn.to_q.0.weight",),
    "Cosmos-Predict2": ("x_embedder.proj.1.weight",),
    "OmniGen 2": ("time_caption_embed.timestep_embedder.linear_1.bias",),
    "Qwen-Image": ("txt_norm.weight", "transformer_blocks.0.img_mod.1.weight"),
}


def family_of(names: Iterable[str]) -> str:
    """Return the family of diffusion models whose tensors are among `names`, "" for none."""
    held = set(names)
    for family, marks in FAMILIES.items():
        for prefix in PREFIXES:
            if all(prefix + mark in held for mark in marks):
                return family
    return ""
