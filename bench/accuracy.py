"""What each scheme and search of scales loses: weights, next tokens, embeddings.

    make accuracy                      installs what it needs (requirements.txt, models.txt)
    make accuracy ARGS="--only minilm --rows nvfp4,nvfp4-mse"
    python -m bench.accuracy --only trained --trained MOE,DENSE --corpus CORPUS

The models and what is measured of each are those of `accuracy_models`. Every row goes the whole
way: quantize into a file, dequantize that to fp32, load it with transformers. Seconds are those of
the run's quantization. A JSON line at the end has everything.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.accuracy_models import Model, minilm, rxnfp, smollm, synthetic, trained
from lowbitcli import api

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
    "nvfp4-qkv-fp8": ("nvfp4-qkv-fp8", "", ""),
    "nvfp4-qkv-fp8-random": ("nvfp4-qkv-fp8", "", "random"),
}

PACKAGED: dict[str, Callable[[Path], Model]] = {
    "minilm": minilm,
    "rxnfp": rxnfp,
    "smollm2": smollm,
}
MODELS = ("synthetic", *PACKAGED)


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


def chosen(given: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Model]]:
    """Yield the models that were asked for."""
    for name in given.only.split(","):
        if name == "synthetic":
            yield from synthetic(folder)
        elif name == "trained":
            for path in given.trained.split(","):
                yield Path(path).name, trained(Path(path), given.corpus)
        else:
            yield name, PACKAGED[name](folder)


def asked(words: list[str] | None = None) -> argparse.Namespace:
    """Return what the command line asks for; end with what is wrong with it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default=",".join(MODELS), help="or trained")
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--folder", help="where to work [a temporary folder]")
    parser.add_argument("--trained", help="models of bench.train_moe, by commas")
    parser.add_argument("--corpus", type=Path, help="what bench.corpus made, for trained")
    given = parser.parse_args(words)
    every = {"only": (*MODELS, "trained"), "rows": tuple(ROWS)}
    for option, known in every.items():
        for name in getattr(given, option).split(","):
            if name not in known:
                parser.error(f"--{option}: {name!r} is none of {', '.join(known)}")
    if "trained" in given.only.split(",") and not (given.trained and given.corpus):
        parser.error("trained needs --trained and --corpus")
    return given


def main() -> None:
    given = asked()
    os.environ["HF_HUB_OFFLINE"] = "1"
    everything = {}
    with tempfile.TemporaryDirectory(dir=given.folder) as temporary:
        folder = Path(temporary)
        for title, model in chosen(given, folder):
            table = {}
            for name in given.rows.split(","):
                if model.source.is_file() and (ROWS[name][2] or not ROWS[name][1]):
                    continue
                if ROWS[name][2] == "text" and not (model.source / "tokenizer.json").exists():
                    continue
                table[name] = row(name, model, folder)
                print(title, name, json.dumps(table[name]), flush=True)
            show(title, table)
            everything[title] = table
    print(json.dumps(everything))


if __name__ == "__main__":
    main()
