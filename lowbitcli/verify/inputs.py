"""What stored scales of activations must fulfil: they are there where they are declared, finite and
above zero, and one for weights that are served as one matrix."""

from collections.abc import Iterator

import torch

from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.errors import CheckpointError
from lowbitcli.pipeline.read import tensor_of
from lowbitcli.plan.consumers import Seen
from lowbitcli.plan.rules_activations import activations_of
from lowbitcli.plan.source import Source
from lowbitcli.recipe import Recipe
from lowbitcli.tensors import DTYPES, FLOATING, safe
from lowbitcli.verify.nouns import WARN, Problem, Step


def inputs(checkpoint: Checkpoint, target: Source) -> list[Step]:
    """Check the scales of activations, where a checkpoint has or declares some."""
    seen = Seen(checkpoint, target)
    due = {tensor: (module, told) for module, tensor, told in activations_of(seen)}
    if not target.activations and not due:
        return []
    problems = [
        Problem("missing", tensor, f"{told}, and it is not there", seen.quantized[module].file)
        for tensor, (module, told) in due.items()
        if tensor not in checkpoint.tensors
    ]
    numbers: dict[str, float] = {}
    for name in target.activations:
        problems += _number(checkpoint, name, numbers)
    if target.container.fuses:
        problems += _differing(checkpoint, numbers)
    count = len(target.activations.keys() | due.keys())
    return [Step("scales of activations are there, finite and above zero", count, tuple(problems))]


def _number(checkpoint: Checkpoint, name: str, numbers: dict[str, float]) -> Iterator[Problem]:
    """Read a scale, and yield what is wrong with it; that of each head or channel is read too."""
    stored = checkpoint.tensors[name]
    if stored.spec.dtype not in FLOATING or not DTYPES[stored.spec.dtype][1]:
        yield Problem("scale", name, f"it is stored as {stored.spec.dtype}", stored.file)
        return
    try:
        scale = tensor_of(checkpoint.read(name), stored.spec).float().reshape(-1)
    except CheckpointError as error:
        yield Problem("unreadable", name, error.message, stored.file)
        return
    bad = ~(torch.isfinite(scale) & (scale > 0))
    if bool(bad.any()):
        first = float(scale[bad][0])
        yield Problem("scale", name, f"{first:g}, and a scale is above zero", stored.file)
    elif scale.numel() == 1:
        numbers[name] = float(scale[0])


def _differing(checkpoint: Checkpoint, numbers: dict[str, float]) -> Iterator[Problem]:
    """Yield groups whose members have different scales of inputs, which they have in common."""
    for suffix in (".input_scale", ".input_global_scale"):
        modules = {
            f"{name.removesuffix(suffix)}.weight": name for name in numbers if name.endswith(suffix)
        }
        groups: dict[str, list[str]] = {}
        for weight, key in Recipe().groups(modules).items():
            groups.setdefault(key, []).append(modules[weight])
        for names in groups.values():
            if len({numbers[name] for name in names}) > 1:
                told = ", ".join(f"{safe(name)} {numbers[name]:.6g}" for name in sorted(names))
                first = min(names)
                message = f"served as one matrix, and their inputs have different scales: {told}"
                yield Problem("shared", first, message, checkpoint.tensors[first].file, WARN)
