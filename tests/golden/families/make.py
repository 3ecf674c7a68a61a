"""Make the lists of tensors in this folder: names, dtypes and shapes of models of the families that
the shipped recipes are for, without a weight.

    python tests/golden/families/make.py        needs transformers and diffusers

Sizes are those of public config.json files, but with few layers, experts and words: what stands in
a layer is what counts. Names are those that `save_pretrained` writes, and of models that are
released as they were trained those of their releases. `{0-2}` stands for 0, 1 and 2.
"""

import itertools
import json
import re
import sys
from collections import defaultdict
from pathlib import Path

import diffusers
import torch
import transformers as t
from transformers.core_model_loading import revert_weight_conversion

HERE = Path(__file__).parent
WORDS = 2048  # of every vocabulary
LAYERS = {"num_hidden_layers": 2, "vocab_size": WORDS, "pad_token_id": None}
SHORT = {"bos_token_id": 1, "eos_token_id": 2}


def text(cls, config, **sizes):
    return cls, config, {**LAYERS, **SHORT, **sizes}


def gqa(hidden, inner, heads, keys, **more):
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        **more,
    }


ROUTED = {"num_experts": 4, "num_experts_per_tok": 2}
LLMS = {
    "llama": text(t.LlamaForCausalLM, t.LlamaConfig, **gqa(4096, 14336, 32, 8)),
    "qwen2": text(t.Qwen2ForCausalLM, t.Qwen2Config, **gqa(3584, 18944, 28, 4)),
    "qwen3": text(t.Qwen3ForCausalLM, t.Qwen3Config, **gqa(4096, 12288, 32, 8, head_dim=128)),
    "gemma2": text(t.Gemma2ForCausalLM, t.Gemma2Config, **gqa(3584, 14336, 16, 8, head_dim=256)),
    "gemma3-text": text(
        t.Gemma3ForCausalLM, t.Gemma3TextConfig, **gqa(1152, 6912, 4, 1, head_dim=256)
    ),
    "mistral": text(t.MistralForCausalLM, t.MistralConfig, **gqa(4096, 14336, 32, 8)),
    "phi2": text(t.PhiForCausalLM, t.PhiConfig, **gqa(2560, 10240, 32, 32)),
    "phi3": text(t.Phi3ForCausalLM, t.Phi3Config, **gqa(3072, 8192, 32, 32)),
    "deepseek-v3": text(
        t.DeepseekV3ForCausalLM,
        t.DeepseekV3Config,
        first_k_dense_replace=1,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
    ),
    "qwen3-moe": text(
        t.Qwen3MoeForCausalLM,
        t.Qwen3MoeConfig,
        **gqa(2048, 6144, 32, 4, head_dim=128, moe_intermediate_size=768, **ROUTED),
    ),
    "qwen3-next": text(
        t.Qwen3NextForCausalLM, t.Qwen3NextConfig, **{"num_hidden_layers": 4, **ROUTED}
    ),
    "mixtral": text(t.MixtralForCausalLM, t.MixtralConfig, num_local_experts=4),
    "gpt-oss": text(
        t.GptOssForCausalLM, t.GptOssConfig, num_local_experts=4, num_experts_per_tok=2
    ),
    "bert": text(t.BertForSequenceClassification, t.BertConfig),
    "minilm": text(
        t.BertModel, t.BertConfig, hidden_size=384, intermediate_size=1536, num_attention_heads=12
    ),
    "modernbert": text(t.ModernBertForMaskedLM, t.ModernBertConfig),
}
VISION = {"depth": 2, "out_hidden_size": 3584}
SEEING = {
    "qwen2.5-vl": (
        t.Qwen2_5_VLForConditionalGeneration,
        t.Qwen2_5_VLConfig(
            text_config={**LAYERS, **SHORT, **gqa(3584, 18944, 28, 4)},
            vision_config={**VISION, "hidden_size": 1280, "intermediate_size": 3420},
        ),
    ),
    "qwen3-vl": (
        t.Qwen3VLForConditionalGeneration,
        t.Qwen3VLConfig(
            text_config={**LAYERS, **SHORT, **gqa(4096, 12288, 32, 8, head_dim=128)},
            vision_config={"depth": 2, "out_hidden_size": 4096, "deepstack_visual_indexes": [0]},
        ),
    ),
    "qwen3.5-moe": (
        t.Qwen3_5MoeForConditionalGeneration,
        t.Qwen3_5MoeConfig(
            text_config={**LAYERS, **SHORT, "num_hidden_layers": 4, **ROUTED},
            vision_config={"depth": 2},
        ),
    ),
    "llava": (
        t.LlavaForConditionalGeneration,
        t.LlavaConfig(
            text_config={"model_type": "llama", **LAYERS, **gqa(4096, 11008, 32, 32)},
            vision_config={
                "model_type": "clip_vision_model",
                **gqa(1024, 4096, 16, 16),
                "num_hidden_layers": 2,
                "image_size": 336,
                "patch_size": 14,
            },
        ),
    ),
    "gemma3": (
        t.Gemma3ForConditionalGeneration,
        t.Gemma3Config(
            text_config={**LAYERS, **gqa(2560, 10240, 8, 4, head_dim=256)},
            vision_config={**gqa(1152, 4304, 16, 16), "num_hidden_layers": 2},
        ),
    ),
}
DIFFUSION = {
    "flux-diffusers": (
        diffusers.FluxTransformer2DModel,
        {"num_layers": 2, "num_single_layers": 2, "guidance_embeds": True},
    ),
    "sd3-diffusers": (
        diffusers.SD3Transformer2DModel,
        {
            "num_layers": 3,
            "num_attention_heads": 38,
            "caption_projection_dim": 2432,
            "qk_norm": "rms_norm",
            "pos_embed_max_size": 8,
            "dual_attention_layers": [0],
        },
    ),
    "wan-diffusers": (diffusers.WanTransformer3DModel, {"num_layers": 2}),
    "qwen-image": (diffusers.QwenImageTransformer2DModel, {"num_layers": 2}),
}


def linear(name, rows, cols, bias=True):
    return {f"{name}.weight": [rows, cols], **({f"{name}.bias": [rows]} if bias else {})}


def flux():
    """Black Forest Labs' own names, as in their single files: `flux/model.py`, `layers.py`."""
    wide, inner = 3072, 12288
    found = {**linear("img_in", wide, 64), **linear("txt_in", wide, 4096)}
    for name, cols in (("time_in", 256), ("guidance_in", 256), ("vector_in", 768)):
        found |= linear(f"{name}.in_layer", wide, cols) | linear(f"{name}.out_layer", wide, wide)
    for block in range(2):
        stem = f"double_blocks.{block}."
        for side in ("img", "txt"):
            found |= linear(f"{stem}{side}_mod.lin", 6 * wide, wide)
            found |= linear(f"{stem}{side}_attn.qkv", 3 * wide, wide)
            found |= linear(f"{stem}{side}_attn.proj", wide, wide)
            found |= {f"{stem}{side}_attn.norm.{x}_norm.scale": [128] for x in ("query", "key")}
            found |= linear(f"{stem}{side}_mlp.0", inner, wide)
            found |= linear(f"{stem}{side}_mlp.2", wide, inner)
        stem = f"single_blocks.{block}."
        found |= linear(f"{stem}modulation.lin", 3 * wide, wide)
        found |= linear(f"{stem}linear1", 3 * wide + inner, wide)
        found |= linear(f"{stem}linear2", wide, wide + inner)
        found |= {f"{stem}norm.{x}_norm.scale": [128] for x in ("query", "key")}
    found |= linear("final_layer.adaLN_modulation.1", 2 * wide, wide)
    return found | linear("final_layer.linear", 64, wide)


def wan():
    """Alibaba's own names: `wan/modules/model.py` of Wan 2.1, 14B."""
    wide, inner = 5120, 13824
    found = {"patch_embedding.weight": [wide, 16, 1, 2, 2], "patch_embedding.bias": [wide]}
    found |= linear("text_embedding.0", wide, 4096) | linear("text_embedding.2", wide, wide)
    found |= linear("time_embedding.0", wide, 256) | linear("time_embedding.2", wide, wide)
    found |= linear("time_projection.1", 6 * wide, wide)
    for block in range(2):
        stem = f"blocks.{block}."
        found |= {f"{stem}modulation": [1, 6, wide]}
        for part in ("self_attn", "cross_attn"):
            for one in "qkvo":
                found |= linear(f"{stem}{part}.{one}", wide, wide)
            found |= {f"{stem}{part}.norm_{one}.weight": [wide] for one in "qk"}
        found |= {f"{stem}norm3.{one}": [wide] for one in ("weight", "bias")}
        found |= linear(f"{stem}ffn.0", inner, wide) | linear(f"{stem}ffn.2", wide, inner)
    return {**found, "head.modulation": [1, 2, wide], **linear("head.head", 64, wide)}


def sd3():
    """Stability's own names: `mmditx.py` of SD 3.5 large, in a checkpoint with VAE and encoders."""
    wide, stem = 2432, "model.diffusion_model."
    found = {
        f"{stem}pos_embed": [1, 36864, wide],
        f"{stem}x_embedder.proj.weight": [wide, 16, 2, 2],
    }
    found |= linear(f"{stem}context_embedder", wide, 4096)
    for name, cols in (("t_embedder", 256), ("y_embedder", 2048)):
        found |= linear(f"{stem}{name}.mlp.0", wide, cols) | linear(
            f"{stem}{name}.mlp.2", wide, wide
        )
    for block in range(2):
        for side in ("context_block", "x_block"):
            name = f"{stem}joint_blocks.{block}.{side}"
            found |= linear(f"{name}.adaLN_modulation.1", 6 * wide, wide)
            found |= linear(f"{name}.attn.qkv", 3 * wide, wide)
            found |= linear(f"{name}.attn.proj", wide, wide)
            found |= {f"{name}.attn.ln_{x}.weight": [64] for x in "qk"}
            found |= linear(f"{name}.mlp.fc1", 4 * wide, wide)
            found |= linear(f"{name}.mlp.fc2", wide, 4 * wide)
    found |= linear(f"{stem}final_layer.adaLN_modulation.1", 2 * wide, wide)
    found |= linear(f"{stem}final_layer.linear", 64, wide)
    found |= linear("first_stage_model.decoder.mid.attn_1.to_q", 512, 512)
    clip = "text_encoders.clip_l.transformer.text_model.encoder.layers.0."
    return found | linear(f"{clip}mlp.fc1", 3072, 768)


def drafts(found, config):
    """Add the layers that predict further tokens, which transformers leaves out."""
    kind = config["model_type"]
    if kind == "deepseek_v3":
        last, new = "model.layers.1.", "model.layers.2."
        found |= {new + x.removeprefix(last): y for x, y in found.items() if x.startswith(last)}
        wide = config["hidden_size"]
        found |= linear(f"{new}eh_proj", wide, 2 * wide, bias=False)
        found |= {f"{new}{x}.weight": [wide] for x in ("enorm", "hnorm", "shared_head.norm")}
        found |= {f"{new}{x}.weight": [WORDS, wide] for x in ("embed_tokens", "shared_head.head")}
        config["num_nextn_predict_layers"] = 1
    if kind in ("qwen3_next", "qwen3_5_moe"):
        stem = "model." if kind == "qwen3_next" else "model.language_model."
        last = f"{stem}layers.3."
        found |= {
            "mtp.layers.0." + x.removeprefix(last): y
            for x, y in found.items()
            if x.startswith(last)
        }
        wide = config.get("hidden_size") or config["text_config"]["hidden_size"]
        found |= linear("mtp.fc", wide, 2 * wide, bias=False)
        norms = ("mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")
        found |= {f"{x}.weight": [wide] for x in norms}
    return found


KEPT_CONFIG = ("model_type", "hidden_size", "num_hidden_layers", "tie_word_embeddings",
               "num_nextn_predict_layers", "text_config")  # fmt: skip


def short(config):
    found = {key: config[key] for key in KEPT_CONFIG if key in config}
    if "text_config" in found:
        found["text_config"] = short(found["text_config"])
    return found


def of_transformers(cls, config):
    with torch.device("meta"):
        model = cls(config)
    state = revert_weight_conversion(model, model.state_dict())
    found = {name: list(value.shape) for name, value in state.items()}
    said = config.to_dict()
    if said.get("tie_word_embeddings"):
        found.pop("lm_head.weight", None)
    found = drafts(found, said)
    return {"config": {**short(said), "architectures": [cls.__name__]}, "tensors": collapsed(found)}


def of_diffusers(cls, sizes):
    with torch.device("meta"):
        model = cls(**sizes)
    found = {name: list(value.shape) for name, value in model.state_dict().items()}
    return {"config": {"_class_name": cls.__name__}, "tensors": collapsed(found)}


def collapsed(found):
    """Return the names with numbers as ranges, where all are there and of one shape."""
    groups = defaultdict(list)
    for name, shape in found.items():
        groups[re.sub(r"(?<=\.)\d+(?=\.|$)", "#", f".{name}")[1:], tuple(shape)].append(name)
    lines = {}
    for (template, shape), names in groups.items():
        numbers = [re.findall(r"(?<=\.)\d+(?=\.|$)", f".{name}") for name in names]
        sides = [sorted({int(row[i]) for row in numbers}) for i in range(len(numbers[0]))]
        whole = len(set(itertools.product(*sides))) == len(names)
        if not whole:
            lines |= {name: list(shape) for name in names}
            continue
        for side in sides:
            template = template.replace("#", ranged(side), 1)
        lines[template] = list(shape)
    return lines


def ranged(numbers):
    if len(numbers) == 1:
        return str(numbers[0])
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{{{numbers[0]}-{numbers[-1]}}}"
    return f"{{{','.join(map(str, numbers))}}}"


def write(name, document, source):
    text = [f"{json.dumps(x)}: {json.dumps(y)}" for x, y in document["tensors"].items()]
    lines = ",\n  ".join(text)
    (HERE / f"{name}.json").write_text(
        f'{{"source": {json.dumps(source)},\n "config": {json.dumps(document["config"])},\n'
        f' "tensors": {{\n  {lines}}}}}\n'
    )
    print(name, len(document["tensors"]), file=sys.stderr)


def main():
    for name, (cls, config, sizes) in LLMS.items():
        write(name, of_transformers(cls, config(**sizes)), f"transformers {t.__version__}")
    for name, (cls, config) in SEEING.items():
        write(name, of_transformers(cls, config), f"transformers {t.__version__}")
    for name, (cls, sizes) in DIFFUSION.items():
        write(name, of_diffusers(cls, sizes), f"diffusers {diffusers.__version__}")
    for name, made in (("flux", flux), ("wan", wan), ("sd3", sd3)):
        document = {"config": None, "tensors": collapsed(made())}
        write(name, document, " ".join((made.__doc__ or "").split()))


if __name__ == "__main__":
    main()
