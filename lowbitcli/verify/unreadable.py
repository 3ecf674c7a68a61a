"""What is said of a checkpoint that cannot be read, and of what looked at it."""

from pathlib import Path

import torch

from lowbitcli import __version__
from lowbitcli.errors import CheckpointError
from lowbitcli.verify.nouns import Check, Problem, Verification


def unreadable(
    path: Path, source: str | None, error: CheckpointError, device: torch.device | None = None
) -> Verification:
    """Return the verification of a checkpoint that cannot even be opened or understood."""
    message = f"{error.message} ({error.hint})" if error.hint else error.message
    what = "the checkpoint can be read and understood"
    return Verification(
        target=str(path),
        source=source,
        container="",
        problems=(Problem("unreadable", "", message),),
        checks=(Check(what, 1, False), Check("everything else", 0, None, "it cannot be read")),
        environment=environment(device),
    )


def environment(device: torch.device | None) -> dict[str, str]:
    """Return the versions and the device that a report names."""
    said = {"lowbit": __version__, "torch": torch.__version__, "device": str(device or "")}
    if device is not None and device.type == "cuda":
        said["device"] = f"{device} ({torch.cuda.get_device_name(device)})"
    return said
