"""How the source of an output lies, as the output's manifest tells it."""

from collections.abc import Mapping

from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.containers.stacks import Stacking
from lowbitcli.errors import CheckpointError
from lowbitcli.plan import source as sources
from lowbitcli.recipe import Layouts
from lowbitcli.verify import structure


def nibbles_of(target: Checkpoint) -> str:
    """Return how the manifest says that the source's NVFP4 was read."""
    said, _ = structure.manifest_of(target)
    told = said.recipe.get("nibbles", "") if said is not None else ""
    return told if told in ("low", "high") else ""


def raw_fp8_of(target: Checkpoint) -> bool:
    """Say whether the manifest says that FP8 without a scale was taken for numbers."""
    said, _ = structure.manifest_of(target)
    return said is not None and said.recipe.get("raw_fp8") is True


def layouts_of(target: Checkpoint) -> sources.Layouts | None:
    """Return how weights of the source lie, where the manifest says that a recipe said it: of a
    pipeline `component/name`."""
    said, _ = structure.manifest_of(target)
    told = said.recipe.get("layout") if said is not None else None
    try:
        if isinstance(told, Mapping):
            return _of_components({part: Layouts.read(one) for part, one in told.items()})
        return None if told is None else Layouts.read(told).of
    except CheckpointError:
        return None  # the source is then held against the output as if nothing had been said


def _of_components(said: Mapping[str, Layouts]) -> sources.Layouts:
    def of(name: str) -> Stacking | None:
        part, _, own = name.partition("/")
        return said[part].of(own) if part in said else None

    return of
