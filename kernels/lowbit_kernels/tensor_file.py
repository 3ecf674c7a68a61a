"""A few tensors and strings in a file of the safetensors format.

| bytes | content |
|---|---|
| 8 | length of the header, little endian |
| that many | JSON: `{name: {dtype, shape, data_offsets}}`, strings under `__metadata__` |
| the rest | tensors, row-major, one after another |

Source: the format's own description at https://github.com/huggingface/safetensors. Written here
because the kernels depend on nothing but torch.
"""

import ctypes
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I8": torch.int8,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write(
    path: str | bytes | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Write `tensors` and `metadata` beside `path`, then rename.

    Raises ValueError for a dtype that is not in DTYPES and tensors without memory, OSError where
    the file cannot be written.
    """
    path = os.fsdecode(path)
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    content = bytearray()
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise ValueError(f"{name} is {tensor.dtype}, files hold {', '.join(_NAMES.values())}")
        if tensor.is_meta or tensor.layout != torch.strided:
            raise ValueError(f"{name} has no bytes of its own: {tensor.device}, {tensor.layout}")
        flat = tensor.detach().cpu().contiguous()
        start = len(content)
        # torch alone hands out bytes by way of numpy, which need not be there.
        content += ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.nbytes else b""
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, len(content)],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    beside = Path(f"{path}.part")
    try:
        beside.write_bytes(len(text).to_bytes(8, "little") + text + content)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def read(path: str | bytes | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors, on the CPU, and the metadata of a file.

    Raises ValueError for a file that is not whole or holds other dtypes, OSError for one that
    cannot be read.
    """
    content = Path(os.fsdecode(path)).read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    try:
        header = json.loads(content[8:start])
        metadata = header.pop("__metadata__", {})
        body, tensors = content[start:], {}
        for name, said in header.items():
            first, last = said["data_offsets"]
            dtype, shape = DTYPES[said["dtype"]], said["shape"]
            if not 0 <= first <= last <= len(body):
                raise ValueError(f"{name} is not in the file")
            flat = torch.frombuffer(bytearray(body[first:last]) or bytearray(1), dtype=torch.uint8)
            tensors[name] = flat[: last - first].view(dtype).reshape(shape)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(
            f"{os.fsdecode(path)} is no safetensors file of tensors: {error}"
        ) from error
    return tensors, metadata
