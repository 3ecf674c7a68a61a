"""What a checkpoint holds as it was, and why."""

from functools import cache

from lowbitcli.checkpoint.made import Made
from lowbitcli.plan.source import Source, SourceWeight
from lowbitcli.recipe import Matcher, Recipe
from lowbitcli.verify.nouns import Kept


def kept(ours: Source, made: Made) -> tuple[Kept, ...]:
    """Return what is not quantized, and why: as the manifest has it, else as by default."""
    told = made.kept or made.rounded
    return tuple(
        Kept(
            weight.name,
            weight.dtype,
            weight.shape,
            made.kept.get(weight.name, "") if told else _reason(weight),
        )
        for weight in ours.weights.values()
        if weight.scheme is None
    )


@cache
def _kinds() -> Matcher:
    return Matcher(Recipe())


def _reason(weight: SourceWeight) -> str:
    """Return why a tensor of this name and shape is kept by default, "" where it is not."""
    decision = _kinds().decide(weight.name)
    if decision.kind:
        return decision.reason
    return f"{len(weight.shape)}-dimensional" if len(weight.shape) != 2 else ""
