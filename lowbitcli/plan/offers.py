"""What a rule asks of a container and a scheme, held against what these have."""

from lowbitcli.containers import Container
from lowbitcli.errors import RecipeError
from lowbitcli.plan.amaxes import Amaxes
from lowbitcli.recipe import Rule
from lowbitcli.schemes import Scheme


def activations_of(
    scheme: Scheme, rule: Rule, container: Container | None, amaxes: Amaxes | None
) -> str:
    """Return what a rule makes of activations: static where amaxes of inputs are there, and it does
    not say otherwise."""
    measured = amaxes is not None and bool(amaxes.inputs)
    if measured and not rule.said and container and scheme.name in container.static:
        return "static"
    return rule.activations


def check_options(
    scheme: Scheme,
    rule: Rule,
    where: str,
    container: Container | None,
    activations: str,
    amaxes: Amaxes | None,
) -> None:
    """Raise RecipeError, with the place of a pattern, where the scheme or the container (None: what
    is quantized is stored as plain numbers) has not what the rule asks for."""
    if rule.scale not in scheme.rules:
        raise RecipeError(
            f"{scheme.name} has no scale rule {rule.scale!r}",
            where=where,
            hint=f"it has: {', '.join(scheme.rules)}",
        )
    if container is None:
        return
    if scheme.name not in container.writes:
        raise RecipeError(
            f"the container {container.name} has no {scheme.name}",
            where=where,
            hint=f"it has: {', '.join(container.writes) or 'no quantized weights at all'}",
        )
    offered = container.activations.get(scheme.name, ("none",))
    measure = ", with --activation-scales FILE" if "static" in offered else ""
    if activations not in offered:
        raise RecipeError(
            f"{scheme.name} in {container.name} cannot have activations {activations!r}",
            where=where,
            hint=f"it can have: {', '.join(offered)}{measure}",
        )
    if activations == "static" and amaxes is None and rule.activation_scale is None:
        raise RecipeError(
            "activations: static needs the scales of activations, and none are given",
            where=where or rule.where,
            hint="--activation-scales FILE, or a constant in the rule, as in activation_scale: 1.0",
        )
