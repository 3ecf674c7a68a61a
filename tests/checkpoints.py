"""Small checkpoints to test with: seeded weights, a single file, shards with a correct index, and
files whose headers nobody checked.

Files are written here by hand, from the format alone, so that what the tests believe of a file does
not come from the code that they test.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LAYER = "model.layers.0."
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
INDEX = "model.safetensors.index.json"

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
TORCH = {name: dtype for dtype, name in DTYPES.items()}


def weight(rows: int, cols: int, scale: float = 1.0, seed: int | None = None) -> Tensor:
    """Return bf16 `[rows, cols]`, Gaussian with standard deviation `scale`; equal arguments give
    equal numbers."""
    generator = torch.Generator().manual_seed(rows * 1009 + cols if seed is None else seed)
    return (torch.randn(rows, cols, generator=generator) * scale).to(torch.bfloat16)


def raw(tensor: Tensor) -> bytes:
    """Return a tensor's bytes as a file holds them."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def write_raw(path: Path, header: bytes | Mapping[str, Any], data: bytes = b"") -> Path:
    """Write a file of this header, right or wrong, followed by `data`."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def write(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Path:
    """Write a flawless safetensors file, tensors in the order given."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    data = b""
    for name, tensor in tensors.items():
        piece = raw(tensor)
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(piece)],
        }
        data += piece
    return write_raw(path, header, data)


def single(
    root: Path,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any] | None = CONFIG,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Make the directory `root` with one `model.safetensors` and, if any, a `config.json`."""
    root.mkdir(parents=True, exist_ok=True)
    write(root / "model.safetensors", tensors, {"format": "pt"} if metadata is None else metadata)
    if config is not None:
        (root / "config.json").write_text(json.dumps(config, indent=2))
    return root


def sharded(
    root: Path,
    *shards: Mapping[str, Tensor],
    config: Mapping[str, Any] | None = CONFIG,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Make the directory `root` with a file for each of `shards` and a correct index."""
    root.mkdir(parents=True, exist_ok=True)
    places, total = {}, 0
    for number, tensors in enumerate(shards, 1):
        file = shard_name(number, len(shards))
        write(root / file, tensors, {"format": "pt"} if metadata is None else metadata)
        places.update(dict.fromkeys(tensors, file))
        total += sum(len(raw(tensor)) for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (root / INDEX).write_text(json.dumps(index, indent=2))
    if config is not None:
        (root / "config.json").write_text(json.dumps(config, indent=2))
    return root


def shard_name(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def header_of(path: Path) -> dict[str, Any]:
    """Return the JSON of a file's header."""
    data = path.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def metadata_of(path: Path) -> dict[str, str]:
    return header_of(path).get("__metadata__", {})


def read(path: Path) -> dict[str, Tensor]:
    """Return every tensor of a file, or of all the files of a directory."""
    if path.is_dir():
        return {k: v for file in sorted(path.glob("*.safetensors")) for k, v in read(file).items()}
    data = path.read_bytes()
    base = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in header_of(path).items():
        if name == "__metadata__":
            continue
        start, stop = entry["data_offsets"]
        dtype = TORCH[entry["dtype"]]
        piece = torch.tensor(list(data[base + start : base + stop]), dtype=torch.uint8)
        tensors[name] = piece.view(dtype).reshape(entry["shape"])
    return tensors


def config_of(root: Path) -> dict[str, Any]:
    return json.loads((root / "config.json").read_text())


def quantization_of(root: Path) -> dict[str, Any]:
    return config_of(root)["quantization_config"]


def same(a: Tensor, b: Tensor) -> bool:
    """Are dtype, shape and every bit equal? (-0.0 is not 0.0, and a NaN is itself.)"""
    return a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)


def hashes(path: Path) -> dict[str, str]:
    """Return name -> sha256 of every file below `path`, or of the file `path`."""
    if path.is_file():
        return {"": hashlib.sha256(path.read_bytes()).hexdigest()}
    return {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }


def everything_below(path: Path) -> list[str]:
    """Return every name below `path`, hidden ones too: what a failed run must not add to."""
    return sorted(
        os.path.relpath(os.path.join(folder, name), path)
        for folder, folders, files in os.walk(path)
        for name in [*folders, *files]
    )
