"""From bytes of a checkpoint to tensors in canonical layout, and from tensors to bytes."""

import torch
from torch import Tensor

from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.pipeline.arithmetic import torch_dtype
from lowbitcli.plan.nouns import Part
from lowbitcli.tensors import TensorSpec


def tensor_of(raw: bytearray, spec: TensorSpec) -> Tensor:
    """Return `raw` as the tensor that `spec` describes; E8M0 stays the byte that it is."""
    dtype = torch.uint8 if spec.dtype == "F8_E8M0" else torch_dtype(spec.dtype)
    if not raw:
        return torch.empty(spec.shape, dtype=dtype)
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(spec.shape)


def load(checkpoint: Checkpoint, part: Part, device: torch.device) -> Tensor:
    """Read one part of a weight and bring it into canonical layout on `device`."""
    tensor = tensor_of(checkpoint.read(part.spec.name), part.spec).to(device)
    return canonical(tensor, part)


def canonical(tensor: Tensor, part: Part) -> Tensor:
    """Return a stored tensor in canonical layout and dtype (other writers' dtypes go by value)."""
    if part.stored is None:
        return tensor
    wanted = torch_dtype(part.stored.dtype)
    return part.stored.layout.decode(tensor if tensor.dtype == wanted else tensor.to(wanted))


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor as they go into a file."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.numel() == 0:
        return memoryview(b"")
    return flat.view(torch.uint8).numpy().data
