"""The containers: one value in one file each, listed here in the order in which they are asked
whether they recognise a checkpoint. A test fails where a file is missing from the list."""

import difflib

from lowbitcli.containers.comfyui import COMFYUI
from lowbitcli.containers.compressed_tensors import COMPRESSED_TENSORS
from lowbitcli.containers.container import Container, Listing
from lowbitcli.containers.deepseek import DEEPSEEK
from lowbitcli.containers.deepseek_v4 import DEEPSEEK_V4
from lowbitcli.containers.gpt_oss import GPT_OSS
from lowbitcli.containers.lowbit import LOWBIT
from lowbitcli.containers.modelopt import MODELOPT
from lowbitcli.containers.native_mxfp8 import NATIVE_MXFP8
from lowbitcli.containers.plain import PLAIN
from lowbitcli.containers.torchao import TORCHAO
from lowbitcli.errors import UsageError

CONTAINERS: tuple[Container, ...] = (
    LOWBIT,
    COMPRESSED_TENSORS,
    MODELOPT,
    DEEPSEEK_V4,
    DEEPSEEK,
    NATIVE_MXFP8,
    GPT_OSS,
    COMFYUI,
    TORCHAO,
    PLAIN,
)


def container(name: str) -> Container:
    """Return the container of this name; raise UsageError with the nearest names where there is
    none."""
    for candidate in CONTAINERS:
        if candidate.name == name:
            return candidate
    names = [c.name for c in CONTAINERS if c.writes or c is PLAIN]  # others are only read
    near = difflib.get_close_matches(name.lower(), names, n=2, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known containers: {', '.join(names)}"
    raise UsageError(f"no container is called {name!r}", hint=hint)


def recognise(listing: Listing) -> Container:
    """Return the container that a checkpoint is in; plain where none of the others says that it
    is theirs."""
    return next(candidate for candidate in CONTAINERS if candidate.detect(listing))


__all__ = ["CONTAINERS", "Container", "Listing", "container", "recognise"]
