"""Outputs to plant faults in: a small model, quantized once per scheme and container, and copies of
it whose tensors can be changed."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from lowbitcli import api
from lowbitcli.verify import Verification
from tests import checkpoints
from tests.checkpoints import LAYER, weight

SCHEMES = (
    "fp8_tensor",
    "fp8_channel",
    "fp8_block128",
    "mxfp8",
    "mxfp4",
    "nvfp4",
    "int8_channel",
)
CONTAINERS = ("lowbit", "compressed-tensors")
DOWN = LAYER + "mlp.down_proj."
GATE, UP = LAYER + "mlp.gate_proj.", LAYER + "mlp.up_proj."
NORM, EMBED = "model.norm.weight", "model.embed_tokens.weight"


def model() -> dict[str, Tensor]:
    """Return the tensors of a one-layer model; fused partners differ in size."""
    made = {}
    for number, name in enumerate(("q_proj", "k_proj", "v_proj", "o_proj")):
        made[f"{LAYER}self_attn.{name}.weight"] = weight(64, 64, 0.02 * (1 + number), seed=number)
    for number, name in enumerate(("gate_proj", "up_proj", "down_proj")):
        made[f"{LAYER}mlp.{name}.weight"] = weight(64, 64, 0.03 * (1 + number), seed=9 + number)
    made[NORM] = torch.ones(64, dtype=torch.bfloat16)
    made[EMBED] = weight(96, 64, seed=20)
    return made


class Planted:
    """A source and outputs of it in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._copies = 0
        self.source = checkpoints.single(folder / "source", model())
        self.made = cache(self._make)

    def _make(self, scheme: str, container: str) -> Path:
        """Return an output of the source, which is not to be changed."""
        output = self._folder / f"{scheme}-{container}"
        request = api.Request(scheme=scheme, container=container)
        api.quantize(self.source, output, request, device="cpu")
        return output

    def copy(self, scheme: str, container: str, *, proof: bool = False) -> Path:
        """Return a copy to change, with its manifest only for `proof`: hashes see everything."""
        self._copies += 1
        output = self._folder / f"copy-{self._copies}"
        shutil.copytree(self.made(scheme, container), output)
        if not proof:
            (output / "lowbit.json").unlink()
        return output

    def verify(self, output: Path, *, source: bool = True, **options) -> Verification:
        against = self.source if source else None
        found = api.verify(output, against=against, device="cpu", **options)
        json.dumps(found.to_dict(), allow_nan=False)  # whatever is found can be told
        return found


def change(output: Path, edit: Callable[[dict[str, Tensor]], None]) -> None:
    """Write an output anew with tensors, dtypes and shapes as `edit` leaves them."""
    file = output / "model.safetensors" if output.is_dir() else output
    tensors = {name: tensor.clone() for name, tensor in checkpoints.read(file).items()}
    metadata = checkpoints.metadata_of(file)
    edit(tensors)
    checkpoints.write(file, tensors, metadata)


def poke(output: Path, name: str, at: int, edit: Callable[[int], int]) -> None:
    """Change one byte of a tensor in place."""

    file = output / "model.safetensors" if output.is_dir() else output
    data = bytearray(file.read_bytes())
    start, stop = checkpoints.header_of(file)[name]["data_offsets"]
    place = 8 + int.from_bytes(data[:8], "little") + start + at
    assert start + at < stop
    data[place] = edit(data[place])
    file.write_bytes(data)


def told(found: Verification) -> list[tuple[str, str, str]]:
    """Return (severity, kind, tensor) of each problem."""
    return [(one.severity, one.kind, one.tensor) for one in found.problems]


def message(found: Verification, kind: str) -> str:
    """Return the message of the only problem of a kind."""
    (one,) = [problem for problem in found.problems if problem.kind == kind]
    return one.message
