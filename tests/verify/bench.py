"""Where faults are planted: copies of small outputs and of what peers wrote, each changed in one
way, and reads that fail in one place."""

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from lowbitcli import api
from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.errors import CheckpointError
from lowbitcli.verify import Verification
from tests import checkpoints
from tests.checkpoints import single
from tests.verify.asked import config as edit_config
from tests.verify.planted import Planted, change

GOLDEN = Path(__file__).parents[1] / "golden"
LOST = "it went away"
Tensors = dict[str, Tensor]
Edit = Callable[[Tensors], object]


class Bench:
    """Makes outputs to find faults in; every one that is returned is a new one."""

    def __init__(self, folder: Path, planted: Planted) -> None:
        self._folder = folder
        self._planted = planted
        self._count = 0
        self.source: Path | None = planted.source

    def folder(self) -> Path:
        """Return a new folder."""
        self._count += 1
        path = self._folder / str(self._count)
        path.mkdir()
        return path

    def out(
        self, scheme: str, container: str = "compressed-tensors", edit: Edit | None = None
    ) -> Path:
        """Return a copy of an output of the small model without its manifest, changed."""
        output = self._planted.copy(scheme, container)
        if edit is not None:
            change(output, edit)
        return output

    def proven(self, scheme: str = "nvfp4", container: str = "lowbit") -> Path:
        """Return a copy of an output with its manifest."""
        return self._planted.copy(scheme, container, proof=True)

    def made(
        self,
        tensors: Mapping[str, Tensor],
        scheme: str = "nvfp4",
        container: str = "compressed-tensors",
        **options: Any,
    ) -> Path:
        """Return an output of other tensors; they are the source from now on. `settings` is the
        model's config, `recipe` the text of a recipe, the rest goes into the request."""
        folder = self.folder()
        settings = options.pop("settings", checkpoints.CONFIG)
        source = single(folder / "source", tensors, config=settings)
        recipe = options.pop("recipe", None)
        if recipe is not None:
            (folder / "r.yaml").write_text(recipe)
            scheme, options["recipe"] = "", folder / "r.yaml"
        output = folder / "out"
        if container == "comfyui":
            source, output = source / "model.safetensors", folder / "out.safetensors"
        request = api.Request(scheme=scheme or None, container=container, **options)
        api.quantize(source, output, request, device="cpu")
        (folder / "out" / "lowbit.json").unlink(missing_ok=True)
        self.source = source
        return output

    def golden(self, name: str, edit: Edit | None = None) -> Path:
        """Return a copy of what a peer wrote, changed; nobody has its source."""
        self.source = None
        output = self.folder() / Path(name).name
        if (GOLDEN / name).is_dir():
            shutil.copytree(GOLDEN / name, output)
        else:
            shutil.copy(GOLDEN / name, output)
        if edit is not None:
            change(output, edit)
        return output

    def config(self, output: Path, edit: Callable[[dict], object], name: str = "config.json"):
        """Edit what is declared of an output, and return it."""
        edit_config(output, edit, name)
        return output


class Fault(NamedTuple):
    """A fault: the `site` that tells of it, `what` is planted, the `words` of its own message, and
    how it is planted. It is looked for without the source, unless `against`; of `consumers` all are
    asked, and told of it. `fails` is a function of the code in which reading fails."""

    site: str
    what: str
    words: str
    plant: Callable[[Bench], Path]
    against: bool = False
    consumers: tuple[str, ...] = ()
    severity: str = "fail"
    fails: str = ""
    options: Mapping[str, Any] = {}

    def find(self, bench: Bench) -> Verification:
        """Plant it, and verify."""
        output = self.plant(bench)
        options = dict(self.options)
        if "recipe" in options:
            path = bench.folder() / "limits.yaml"
            path.write_text(options["recipe"])
            options["recipe"] = path
        against = bench.source if self.against else None
        with failing(self.fails, output):
            return api.verify(
                output, against=against, device="cpu", consumers=self.consumers, **options
            )


def failing(function: str, output: Path):
    """Return a context in which the bytes of an output cannot be read by a function of this name,
    nor by what it calls; "" is none."""
    read = Checkpoint.read_into

    def lost(self, *arguments):
        frame = sys._getframe(1) if function and self.path == output else None
        while frame is not None:
            if frame.f_code.co_name == function:
                raise CheckpointError(LOST)
            frame = frame.f_back
        return read(self, *arguments)

    return patch.object(Checkpoint, "read_into", lost)


def json_of(path: Path, edit: Callable[[dict], object]) -> None:
    """Edit a JSON file."""
    said = json.loads(path.read_text())
    edit(said)
    path.write_text(json.dumps(said))


def metadata(path: Path, edit: Callable[[dict[str, str]], object]) -> None:
    """Edit the metadata of a file's header."""
    said = dict(checkpoints.metadata_of(path))
    edit(said)
    checkpoints.write(path, checkpoints.read(path), said)


def relabelled(tensors: Tensors) -> None:
    """Call exponents F8_E8M0."""
    for name in tensors:
        if name.endswith(("weight_scale", "weight_scale_inv")):
            tensors[name] = tensors[name].view(torch.float8_e8m0fnu)
