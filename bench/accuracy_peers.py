"""What peers' quantization without data loses on MiniLM, by the figures of `accuracy`.

    make accuracy-peers                each in a venv of its own, as they do not get on
    python -m bench.accuracy_peers convert-to-quant --steps 60

| peer | what | beside `accuracy` needs |
|---|---|---|
| llm-compressor | NVFP4A16, with observers that take no data | llmcompressor, datasets |
| convert-to-quant | NVFP4, learned rounding | convert-to-quant |
| modelopt | NVFP4, `NVFP4QTensor` with its default scales | nvidia-modelopt |
| auto-round | MXFP4, model-free, of those matrices that it takes | auto-round, compressed-tensors |

The first three are given the matrices that lowbit quantizes, one by one; auto-round writes a
checkpoint, which lowbit reads, and lowbit's own MXFP4 of the same matrices stands beside it.
"""

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.accuracy_models import Model, minilm
from lowbitcli import api

Run = Callable[[Tensor, str], Tensor]
PEERS = ("llm-compressor", "convert-to-quant", "modelopt", "auto-round")
OBSERVERS = ("memoryless_minmax", "nvfp4_expanded_mse")
SKIPPED = "re:.*encoder\\.layer\\.[0-9]+\\.(attention\\.)?output\\.dense$"  # auto-round's, of BERT
WEIGHTS = "model.safetensors"


def llm_compressor(observer: str) -> Run:
    """Return its NVFP4A16 of a matrix, with an observer of its own."""
    quantization = importlib.import_module("compressed_tensors.quantization")
    forward = importlib.import_module("compressed_tensors.quantization.lifecycle.forward")
    life = importlib.import_module("llmcompressor.entrypoints.model_free.lifecycle")
    scheme = quantization.preset_name_to_scheme("NVFP4A16", ["Linear"])
    scheme.weights.observer = observer

    def run(w: Tensor, _: str) -> Tensor:
        module = life.initialize_quantized_linear(w, scheme, "cpu")
        life.calibrate_weight(module)
        zero = getattr(module, "weight_zero_point", None)
        scales = {"global_scale": module.weight_global_scale}
        with torch.no_grad():
            arguments = (module.weight, module.weight_scale, zero, scheme.weights)
            return forward.fake_quantize(*arguments, **scales).float()

    return run


def convert_to_quant(steps: int) -> Run:
    """Return its learned rounding of a matrix."""
    room = importlib.import_module("convert_to_quant.converters.learned_nvfp4")
    own = room.LearnedNVFP4Converter(device="cpu", num_iter=steps, optimizer="original")
    return lambda w, name: own.convert(w.float(), name)[3].float()


def modelopt() -> Run:
    """Return its NVFP4 of a matrix, with the scales that it takes by itself."""
    kinds = importlib.import_module("modelopt.torch.quantization.qtensor")

    def run(w: Tensor, _: str) -> Tensor:
        made, scale, double_scale = kinds.NVFP4QTensor.quantize(w.float(), 16)
        said = {"scale": scale, "double_scale": double_scale, "block_sizes": {-1: 16}}
        return made.dequantize(dtype=torch.float32, **said)

    return run


def one_by_one(run: Run, model: Model, folder: Path) -> dict[str, float]:
    """Return the figures of NVFP4 by a peer that is given one matrix after the other."""
    plan = api.plan_quantize(model.source, None, api.Request(scheme="nvfp4", container="lowbit"))
    tensors = load_file(model.source / WEIGHTS)
    began = time.perf_counter()
    made = {x.name: run(tensors[x.name], x.name).contiguous() for x in plan.quantized}
    return figures(model, made, time.perf_counter() - began, folder)


def auto_round(model: Model, folder: Path) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield its MXFP4 without a model, and lowbit's own of the same matrices."""
    searches = ("amax", "even", "mse")
    request = {one: api.Request(recipe=_without_skipped(one, folder)) for one in searches}
    names = [x.name for x in api.plan_quantize(model.source, None, request["amax"]).quantized]
    out, back = folder / "auto-round", folder / "auto-round-back"
    began = time.perf_counter()
    options = ["--model_free", "--scheme", "MXFP4", "--format", "llm_compressor"]
    command = [sys.executable, "-m", "auto_round", "--model", str(model.source), *options]
    subprocess.run([*command, "--output_dir", str(out)], check=True, stdout=sys.stderr)
    seconds = time.perf_counter() - began
    yield "auto-round", _taken_back(model, out, back, names, seconds)
    for one in searches:
        out, back = folder / one, folder / f"{one}-back"
        made = api.quantize(model.source, out, request[one], device="cpu", readback=False)
        yield f"lowbit mxfp4 {one}", _taken_back(model, out, back, names, made.seconds)


def _without_skipped(scale: str, folder: Path) -> str:
    path = folder / f"{scale}.yaml"
    path.write_text(
        "container: compressed-tensors\n"
        f"rules: [{{match: '*', scheme: mxfp4, scale: {scale}, exclude: '{SKIPPED}'}}]\n"
    )
    return str(path)


def _taken_back(
    model: Model, out: Path, back: Path, names: list[str], seconds: float
) -> dict[str, float]:
    """Return the figures of a checkpoint, of those matrices alone; what else it quantized (the
    pooler, which embeddings do without) is as in the source."""
    api.dequantize(out, back, dtype="fp32", device="cpu", readback=False)
    tensors = load_file(back / WEIGHTS)
    return figures(model, {name: tensors[name] for name in names}, seconds, back.parent)


def figures(
    model: Model, made: dict[str, Tensor], seconds: float, folder: Path
) -> dict[str, float]:
    """Return what a model loses in which these matrices stand for its own."""
    tensors = load_file(model.source / WEIGHTS)
    error = signal = 0.0
    for name, value in made.items():
        error += float((value - tensors[name]).double().square().sum())
        signal += float(tensors[name].double().square().sum())
    copy = folder / "copy"
    shutil.copytree(model.source, copy)
    save_file(tensors | made, copy / WEIGHTS, metadata={"format": "pt"})
    found = {"matrices": len(made), "mse": error / signal, "seconds": seconds}
    found |= model.figures(copy)
    shutil.rmtree(copy)
    return found


def measured(peer: str, steps: int, folder: Path) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield what a peer, or each of its ways, loses."""
    model = minilm(folder)
    if peer == "auto-round":
        yield from auto_round(model, folder)
    elif peer == "llm-compressor":
        for observer in OBSERVERS:
            yield f"{peer} {observer}", one_by_one(llm_compressor(observer), model, folder)
    elif peer == "modelopt":
        yield peer, one_by_one(modelopt(), model, folder)
    else:
        yield f"{peer}, {steps} steps", one_by_one(convert_to_quant(steps), model, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--steps", type=int, default=60, help="of convert_to_quant's rounding")
    given = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as temporary:
        for name, found in measured(given.peer, given.steps, Path(temporary)):
            print(name, json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
