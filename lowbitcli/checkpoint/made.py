"""What a run made of its weights, as a manifest tells it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lowbitcli.errors import CheckpointError


@dataclass(frozen=True)
class Made:
    """What a run made of its weights: `rounded` is name -> rule of the scales, of those whose codes
    the run itself computed, `kept` is name -> reason, of those that it left as they were. A weight
    in neither only changed how it is stored."""

    rounded: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[str, str] = field(default_factory=dict)

    def document(self) -> dict[str, dict[str, list[str]]]:
        """Return it as a JSON document: rule or reason -> names, in order."""
        return {"kept": _grouped(self.kept), "rounded": _grouped(self.rounded)}


def made_from(document: Any, where: str) -> Made | None:
    """Return what `Made.document` told, None where nothing was told.

    Raises:
        CheckpointError: it is something else.
    """
    if document is None:
        return None
    found = []
    for key in ("rounded", "kept"):
        groups = document.get(key) if isinstance(document, dict) else None
        if not isinstance(groups, dict) or not all(isinstance(x, list) for x in groups.values()):
            raise CheckpointError(f"{where}: it does not say what became of the weights")
        if not all(isinstance(name, str) for listed in groups.values() for name in listed):
            raise CheckpointError(f"{where}: a name of a weight is no text")
        found.append({name: group for group, listed in groups.items() for name in listed})
    return Made(*found)


def _grouped(said: Mapping[str, str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name in sorted(said):
        groups.setdefault(said[name], []).append(name)
    return groups
