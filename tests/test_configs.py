"""The shipped recipes and the kept kinds, over names of real checkpoints."""

from itertools import chain

import pytest

from lowbitcli.recipe import Matcher, Recipe, for_scheme, load, names, schema

SHIPPED = {
    "mxfp4-best": ("mxfp4", "none"),
    "nvfp4-best": ("nvfp4", "none"),
    "fp8": ("fp8_tensor", "dynamic"),
    "fp8-dynamic": ("fp8_channel", "dynamic"),
    "fp8-block": ("fp8_block128", "dynamic"),
    "int8": ("int8_channel", "dynamic"),
    "mxfp4": ("mxfp4", "none"),
    "mxfp8": ("mxfp8", "dynamic"),
    "nvfp4": ("nvfp4", "none"),
}
MIXED = {name: ["fp8_channel", "nvfp4"] for name in ("mixed-4.5bit", "nvfp4-qkv-fp8")}

Q = "quantized"

# checkpoint -> kept kind or Q -> names; {n} are written as they stand in the file
NAMES = {
    "Llama 3": {
        "embeddings": ["model.embed_tokens.weight"],
        Q: [
            *(f"model.layers.0.self_attn.{p}_proj.weight" for p in "qkvo"),
            *(f"model.layers.31.mlp.{p}_proj.weight" for p in ("gate", "up", "down")),
        ],
        "norms": [
            "model.layers.0.input_layernorm.weight",
            "model.layers.0.post_attention_layernorm.weight",
            "model.norm.weight",
        ],
        "heads": ["lm_head.weight"],
    },
    "Llama, as released": {
        "embeddings": ["tok_embeddings.weight"],
        Q: [
            *(f"layers.0.attention.w{p}.weight" for p in "qkvo"),
            *(f"layers.0.feed_forward.w{p}.weight" for p in "123"),
        ],
        "norms": ["layers.0.attention_norm.weight", "layers.0.ffn_norm.weight", "norm.weight"],
        "heads": ["output.weight"],
    },
    "Qwen3, Qwen3-Next, Qwen2-VL": {
        Q: [
            "model.layers.0.mlp.experts.0.gate_proj.weight",
            "model.layers.0.mlp.shared_expert.up_proj.weight",
            "model.layers.0.linear_attn.in_proj_qkvz.weight",
            "model.layers.0.linear_attn.out_proj.weight",
            "model.language_model.layers.0.self_attn.q_proj.weight",
        ],
        "norms": [
            "model.layers.0.self_attn.q_norm.weight",
            "model.layers.0.self_attn.k_norm.weight",
            "model.layers.0.linear_attn.norm.weight",
        ],
        "routers": [
            "model.layers.0.mlp.gate.weight",
            "model.layers.0.mlp.shared_expert_gate.weight",
        ],
        "convolutions": ["model.layers.0.linear_attn.conv1d.weight"],
        "gates": [
            "model.layers.0.linear_attn.in_proj_ba.weight",
            "model.language_model.layers.0.linear_attn.in_proj_a.weight",
        ],
        "towers": [
            "visual.patch_embed.proj.weight",
            "visual.blocks.0.attn.qkv.weight",
            "visual.blocks.0.norm1.weight",
            "model.visual.merger.mlp.0.weight",
        ],
        "mtp": ["mtp.layers.0.mlp.gate_proj.weight", "mtp.fc.weight"],
    },
    "Mixtral": {
        Q: [f"model.layers.0.block_sparse_moe.experts.7.w{p}.weight" for p in "123"],
        "routers": ["model.layers.0.block_sparse_moe.gate.weight"],
    },
    "DeepSeek-V3": {
        Q: [
            "model.layers.0.self_attn.q_a_proj.weight",
            "model.layers.0.self_attn.q_b_proj.weight",
            "model.layers.0.self_attn.kv_a_proj_with_mqa.weight",
            "model.layers.0.self_attn.kv_b_proj.weight",
            "model.layers.3.mlp.shared_experts.gate_proj.weight",
            "model.layers.3.mlp.experts.255.down_proj.weight",
            "layers.0.attn.wq_a.weight",
            "layers.0.attn.wkv_a.weight",
            "layers.3.ffn.experts.0.w1.weight",
            "layers.3.ffn.shared_experts.w2.weight",
        ],
        "norms": [
            "model.layers.0.self_attn.q_a_layernorm.weight",
            "model.layers.0.self_attn.kv_a_layernorm.weight",
        ],
        "routers": ["model.layers.3.mlp.gate.weight", "layers.3.ffn.gate.weight"],
        "mtp": [
            "model.layers.61.eh_proj.weight",
            "model.layers.61.enorm.weight",
            "model.layers.61.hnorm.weight",
            "model.layers.61.shared_head.head.weight",
            "model.layers.61.shared_head.norm.weight",
        ],
        "embeddings": ["embed.weight"],
        "heads": ["head.weight"],
    },
    "gpt-oss": {
        Q: [
            "model.layers.0.mlp.experts.gate_up_proj",
            "model.layers.0.mlp.experts.down_proj",
            "model.layers.0.self_attn.o_proj.weight",
        ],
        "routers": ["model.layers.0.mlp.router.weight"],
    },
    "GPT-2": {
        "embeddings": ["wte.weight", "transformer.wpe.weight"],
        Q: [
            "h.0.attn.c_attn.weight",
            "h.0.attn.c_proj.weight",
            "transformer.h.11.mlp.c_fc.weight",
        ],
        "norms": ["h.0.ln_1.weight", "h.0.ln_2.weight", "transformer.ln_f.weight"],
    },
    "BERT and all-MiniLM-L6-v2": {
        "embeddings": [
            "embeddings.word_embeddings.weight",
            "embeddings.position_embeddings.weight",
            "embeddings.token_type_embeddings.weight",
            "embeddings.LayerNorm.weight",
            "bert.embeddings.word_embeddings.weight",
        ],
        Q: [
            "encoder.layer.0.attention.self.query.weight",
            "encoder.layer.0.attention.self.key.weight",
            "encoder.layer.0.attention.self.value.weight",
            "encoder.layer.0.attention.output.dense.weight",
            "encoder.layer.0.intermediate.dense.weight",
            "encoder.layer.5.output.dense.weight",
        ],
        "norms": [
            "encoder.layer.0.attention.output.LayerNorm.weight",
            "encoder.layer.0.output.LayerNorm.weight",
        ],
        "heads": [
            "pooler.dense.weight",
            "classifier.weight",
            "cls.predictions.transform.dense.weight",
            "qa_outputs.weight",
            "score.weight",
        ],
    },
    "T5": {
        "embeddings": ["shared.weight", "encoder.embed_tokens.weight"],
        "relative_attention_bias": [
            "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        ],
        Q: [
            "encoder.block.0.layer.0.SelfAttention.q.weight",
            "encoder.block.0.layer.1.DenseReluDense.wi_0.weight",
            "encoder.block.0.layer.1.DenseReluDense.wo.weight",
            "decoder.block.0.layer.1.EncDecAttention.k.weight",
        ],
        "norms": ["encoder.block.0.layer.0.layer_norm.weight", "encoder.final_layer_norm.weight"],
        "heads": ["lm_head.weight"],
    },
    "CLIP and LLaVA": {
        Q: [
            "text_model.encoder.layers.0.self_attn.q_proj.weight",
            "text_model.encoder.layers.0.mlp.fc1.weight",
            "language_model.model.layers.0.self_attn.q_proj.weight",
        ],
        "embeddings": [
            "text_model.embeddings.token_embedding.weight",
            "text_model.embeddings.position_embedding.weight",
        ],
        "towers": [
            "vision_model.encoder.layers.0.self_attn.q_proj.weight",
            "vision_model.embeddings.patch_embedding.weight",
            "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight",
            "multi_modal_projector.linear_1.weight",
            "audio_tower.layers.0.self_attn.q_proj.weight",
        ],
        "norms": ["text_model.encoder.layers.0.layer_norm1.weight"],
        "heads": ["text_projection.weight", "visual_projection.weight"],
    },
    "Flux, as released": {
        "embeddings": [
            "img_in.weight",
            "txt_in.weight",
            "time_in.in_layer.weight",
            "vector_in.out_layer.weight",
            "guidance_in.in_layer.weight",
        ],
        Q: [
            "double_blocks.0.img_attn.qkv.weight",
            "double_blocks.0.img_mlp.0.weight",
            "double_blocks.0.img_mod.lin.weight",
            "single_blocks.37.linear1.weight",
            "model.diffusion_model.single_blocks.37.linear2.weight",
        ],
        "heads": ["final_layer.linear.weight", "final_layer.adaLN_modulation.1.weight"],
    },
    "Flux and SD3 in diffusers": {
        "embeddings": [
            "x_embedder.weight",
            "context_embedder.weight",
            "time_text_embed.timestep_embedder.linear_1.weight",
            "pos_embed.proj.weight",
        ],
        Q: [
            "transformer_blocks.0.attn.to_q.weight",
            "transformer_blocks.0.attn.add_k_proj.weight",
            "transformer_blocks.0.attn.to_out.0.weight",
            "transformer_blocks.0.ff.net.0.proj.weight",
            "transformer_blocks.0.ff_context.net.2.weight",
            "single_transformer_blocks.0.proj_mlp.weight",
            "single_transformer_blocks.0.proj_out.weight",
            "transformer_blocks.0.norm1.linear.weight",
            "single_transformer_blocks.0.norm.linear.weight",
        ],
        "norms": ["transformer_blocks.0.attn.norm_q.weight"],
        "heads": ["proj_out.weight", "norm_out.linear.weight"],
    },
    "Wan": {
        "embeddings": [
            "patch_embedding.weight",
            "text_embedding.0.weight",
            "time_embedding.2.weight",
            "time_projection.1.weight",
        ],
        Q: [
            "blocks.0.self_attn.q.weight",
            "blocks.0.cross_attn.o.weight",
            "blocks.39.ffn.0.weight",
        ],
        "norms": ["blocks.0.self_attn.norm_q.weight", "blocks.0.norm3.weight"],
        "heads": ["head.head.weight"],
    },
    "Mamba, vision and audio models, names of bug reports": {
        "convolutions": [
            "backbone.layers.0.mixer.conv1d.weight",
            "conv1.weight",
            "layer1.0.conv2.weight",
            "conv1d.weight",
        ],
        Q: ["backbone.layers.0.mixer.in_proj.weight", "backbone.layers.0.mixer.out_proj.weight"],
        "norms": ["time_norm_proj.weight", "norm.weight"],
        "heads": ["classifier.1.weight", "roberta.pooler.dense.weight", "heads.head.weight"],
    },
    "one file of a diffusion model": {
        "companions": [
            "first_stage_model.decoder.mid.attn_1.proj_out.weight",
            "cond_stage_model.transformer.text_model.encoder.layers.0.mlp.fc1.weight",
            "conditioner.embedders.1.model.transformer.resblocks.0.mlp.c_fc.weight",
            "text_encoders.t5xxl.transformer.encoder.block.0.layer.0.SelfAttention.q.weight",
            "vae.decoder.mid_block.attentions.0.to_q.weight",
        ],
        Q: [
            "model.diffusion_model.joint_blocks.0.x_block.attn.qkv.weight",
            "model.diffusion_model.middle_block.1.transformer_blocks.0.attn1.to_q.weight",
        ],
    },
}

ROWS = [
    (model, kind, name)
    for model, kinds in NAMES.items()
    for kind, listed in kinds.items()
    for name in listed
]


@pytest.fixture(scope="module")
def matcher():
    return Matcher(load("nvfp4"))


def test_the_table_is_long_enough():
    assert len({name for _, _, name in ROWS}) >= 120
    known = {kind.name for kind in load("nvfp4").kinds}
    assert {kind for _, kind, _ in ROWS} == {*known, Q}


@pytest.mark.parametrize("model", NAMES)
def test_kept_kinds_of_real_names(matcher, model):
    got, wanted = {}, {}
    for one, kind, name in ROWS:
        if one == model:
            decision = matcher.decide(name)
            got[name] = decision.kind or (Q if decision.rule else decision.reason)
            wanted[name] = kind
    assert got == wanted


def test_every_kind_can_be_turned_off():
    for kind in load("nvfp4").kinds:
        recipe = load("nvfp4").model_copy(update={"defaults": {kind.name: "quantize"}})
        assert kind.name not in [one.name for one in recipe.kinds]
        assert len(recipe.kinds) == len(load("nvfp4").kinds) - 1
        assert recipe.digest != load("nvfp4").digest


def test_shipped_recipes_say_what_their_names_say():
    assert {one.name for one in names()} == {*SHIPPED, *MIXED}
    for one in names():
        recipe = load(one.name)
        if one.name in MIXED:
            assert [rule.scheme for rule in recipe.rules] == MIXED[one.name]
            continue
        assert [(rule.scheme, rule.activations) for rule in recipe.rules] == [SHIPPED[one.name]]
        assert recipe.container == "auto"
        assert recipe.name == one.name
        assert 20 < len(one.description) < 110


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("nvfp4", "nvfp4"),
        ("fp8", "fp8"),
        ("fp8_tensor", "fp8"),
        ("FP8_DYNAMIC", "fp8-dynamic"),
        ("fp8_channel", "fp8-dynamic"),
        ("FP8_BLOCK", "fp8-block"),
        ("fp8_block128", "fp8-block"),
        ("INT8", "int8"),
        ("mxfp4", "mxfp4"),
        ("MXFP8", "mxfp8"),
    ],
)
def test_a_scheme_means_its_shipped_recipe(asked, name):
    assert for_scheme(asked) == load(name)


def test_a_scheme_takes_options():
    recipe = for_scheme("mxfp8", activations="none", container="lowbit")
    assert (recipe.rules[0].activations, recipe.container) == ("none", "lowbit")
    assert for_scheme("NVFP4A16").rules[0].activations == "none"
    assert for_scheme("MXFP8A16").rules[0].activations == "none"
    Matcher(recipe).dead(["nothing"])


def test_shipped_recipes_have_no_dead_patterns():
    for one in names():
        Matcher(load(one.name)).dead([])


def test_the_schema_knows_every_key():
    result = schema()
    keys = set(Recipe.model_fields) - {"name"} | {"extends", "quantize", "ignore", "exclude"}
    assert set(result["properties"]) == keys
    rule = result["$defs"]["Rule"]["properties"]
    assert "where" not in rule
    assert set(rule) >= {"match", "scheme", "keep", "scale", "activations", "exclude", "ignore"}


def test_members_of_builtin_groups_are_no_kept_kinds(matcher):
    members = chain.from_iterable(group.members for group in load_groups())
    for member in members:
        if member in ("{}.in_proj_b", "{}.in_proj_a"):  # kept both
            continue
        assert matcher.decide(member.replace("{}", "model.layers.0.x") + ".weight").rule, member


def load_groups():
    from lowbitcli.recipe.defaults import load_defaults

    return load_defaults().fuse
