"""Models to measure with: the layers of one of 8 billion weights over and over, or experts.

shapes    7 matrices and a norm a layer, 0.44 GB; of few bytes narrower, so that there are four
experts   3 matrices of 3 MB an expert; of few bytes of 48 kB
"""

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

LAYER = (  # an 8B model's, in billions of bytes 0.436
    ("self_attn.q_proj", 4096, 4096),
    ("self_attn.k_proj", 1024, 4096),
    ("self_attn.v_proj", 1024, 4096),
    ("self_attn.o_proj", 4096, 4096),
    ("mlp.gate_proj", 14336, 4096),
    ("mlp.up_proj", 14336, 4096),
    ("mlp.down_proj", 4096, 14336),
)
EXPERT = (("gate_proj", 768, 2048), ("up_proj", 768, 2048), ("down_proj", 2048, 768))
SHARD = 4 << 30


def shapes(size: float) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of a model of about `size` bytes; a small one has narrow layers."""
    shrink = 1
    while size / (436e6 / shrink**2) < 4 and shrink < 16:
        shrink *= 2
    number, left = 0, size
    while left > 0 or not number:
        for name, rows, cols in LAYER:
            shape = (rows // shrink, cols // shrink)
            left -= 2 * shape[0] * shape[1]
            yield f"model.layers.{number}.{name}.weight", shape
        yield f"model.layers.{number}.input_layernorm.weight", (4096 // shrink,)
        number += 1


def experts(size: float) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of about `size` bytes of experts, of 3 MB; of few bytes smaller."""
    shrink = 1 if size >= 5e7 else 8
    number, left = 0, size
    while left > 0:
        stem = f"model.layers.{number // 128}.mlp.experts.{number % 128}."
        for name, rows, cols in EXPERT:
            shape = (rows // shrink, cols // shrink)
            left -= 2 * shape[0] * shape[1]
            yield f"{stem}{name}.weight", shape
        number += 1


def make(folder: Path, size: float, *, small: bool = False) -> None:
    """Write a bf16 model in shards, with an index, a block of random numbers over and over."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    held = 0
    for name, shape in (experts if small else shapes)(size):
        count = 2 * int(np.prod(shape))
        if held + count > SHARD:
            shards.append({})
            held = 0
        shards[-1][name] = shape
        held += count
    folder.mkdir(parents=True)
    block = (torch.randn(1 << 22) * 0.02).bfloat16().view(torch.uint8).numpy().tobytes()
    weight_map, parts = {}, []
    for index, held_shapes in enumerate(shards):
        file = f"model-{index + 1:05}-of-{len(shards):05}.safetensors"
        header, offset = {}, 0
        for name, shape in held_shapes.items():
            count = 2 * int(np.prod(shape))
            header[name] = {
                "dtype": "BF16",
                "shape": shape,
                "data_offsets": [offset, offset + count],
            }
            offset += count
            weight_map[name] = file
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        parts.append((folder / file, len(text).to_bytes(8, "little") + text, offset))

    def write(part: tuple[Path, bytes, int]) -> None:
        path, head, size = part
        with path.open("wb") as out:
            out.write(head)
            for start in range(0, size, len(block)):
                out.write(memoryview(block)[: min(len(block), size - start)])
            out.flush()
            os.fsync(out.fileno())

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, parts))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
