"""The checkpoint that a plan will write, on paper: what readers will find, before it is there."""

import json
from typing import Any

from lowbitcli.checkpoint import header
from lowbitcli.checkpoint.reader import Checkpoint, StoredTensor
from lowbitcli.errors import CheckpointError
from lowbitcli.plan.nouns import Plan
from lowbitcli.tensors import safe

QUANT_CONFIG = "hf_quant_config.json"


class Paper(Checkpoint):
    """Names, dtypes, shapes and configs as a run of the plan leaves them. Of tensors only those
    that are known on paper can be read."""

    def __init__(self, plan: Plan, source: Checkpoint) -> None:
        """Take what stays as it is from the `source`."""
        super().__init__(plan.source)
        self.root, self.is_directory = source.root, plan.directory
        self._known = {one.spec.name: one.data for one in plan.constants}
        self.config = source.config if plan.config is None else json.loads(plan.config)
        text = plan.documents.get(QUANT_CONFIG)
        self.quant_config = None if text is None else json.loads(text)
        self.files = tuple(file.name for file in plan.files)
        self.index_name = plan.index_name if plan.index is not None else None
        self.headers, self.metadata = {}, {file.name: _metadata(file.header) for file in plan.files}
        self.tensors = {
            name: StoredTensor(entry.spec, file.name, entry.start, entry.stop)
            for file in plan.files
            for name, entry in file.entries.items()
        }

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytearray:
        """Return bytes of a tensor that is known on paper.

        Raises:
            CheckpointError: it is computed when the plan is followed.
        """
        if name not in self._known:
            raise CheckpointError(f"{safe(name)} is not computed yet")
        return bytearray(self._known[name][start:stop])


def _metadata(text: bytes) -> dict[str, Any]:
    return json.loads(text[8:]).get(header.METADATA, {})
