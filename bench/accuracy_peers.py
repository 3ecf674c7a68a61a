"""What peers' NVFP4 without data loses on MiniLM, by the figures of `accuracy`.

    python -m bench.accuracy_peers memoryless_minmax       or another observer of llm-compressor
    python -m bench.accuracy_peers convert_to_quant --steps 60

Needs llmcompressor (with datasets) or convert-to-quant beside what `accuracy` needs; one peer in a
process, as they do not get on. Each is given the matrices that lowbit quantizes, one by one.
"""

import argparse
import importlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.accuracy_models import minilm
from lowbitcli import api

Run = Callable[[Tensor, str], Tensor]


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("peer", help="convert_to_quant, or an observer of llm-compressor")
    parser.add_argument("--steps", type=int, default=60, help="of convert_to_quant's rounding")
    given = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    learned = given.peer == "convert_to_quant"
    run = convert_to_quant(given.steps) if learned else llm_compressor(given.peer)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = minilm(folder)
        request = api.Request(scheme="nvfp4", container="lowbit")
        plan = api.plan_quantize(model.source, None, request)
        tensors = load_file(model.source / "model.safetensors")
        error = signal = 0.0
        began = time.perf_counter()
        for weight in plan.quantized:
            w = tensors[weight.name]
            value = run(w, weight.name)
            error += float((value - w).double().square().sum())
            signal += float(w.double().square().sum())
            tensors[weight.name] = value.contiguous()
        seconds = time.perf_counter() - began
        back = folder / "back"
        shutil.copytree(model.source, back)
        save_file(tensors, back / "model.safetensors", metadata={"format": "pt"})
        figures = {"mse": error / signal, "seconds": seconds, **model.figures(back)}
        print(given.peer, json.dumps(figures))


if __name__ == "__main__":
    main()
