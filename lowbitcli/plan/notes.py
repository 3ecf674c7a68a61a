"""What a user should be told of a plan: nothing is quantized, a scheme refused matrices, a reader
will mix dtypes."""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from lowbitcli.containers import container
from lowbitcli.errors import LowbitError
from lowbitcli.plan.nouns import Plan, Weight
from lowbitcli.recipe import Recipe
from lowbitcli.schemes import BY_NAME
from lowbitcli.tensors import Shape, safe

NAMED = 10  # matrices that are named, of those that a scheme refused
REASONS = 3
ALONE = 5  # weights without their fused partners that are named
DECODED_TO_BF16 = ("mxfp8", "nvfp4")  # by transformers 5.24, whatever dtype the model has


def notes_on(plan: Plan, recipe: Recipe) -> tuple[str, ...]:
    """Return what should be told of a plan that was made with `recipe`."""
    schemes = tuple(dict.fromkeys(rule.scheme for rule in recipe.rules if rule.scheme))
    kept = [weight for weight in plan.weights if weight.target is None and weight.kept]
    refused = [weight for weight in kept if _is_refused(weight, schemes)]
    return (
        *_nothing(plan),
        *_idle(plan, recipe),
        *_refused(refused),
        *_alone(plan, recipe),
        *_mixed_experts(plan),
        *_requantized(plan),
        *_mixed_dtypes(plan),
        *_unweighed(plan),
    )


def _alone(plan: Plan, recipe: Recipe) -> list[str]:
    """Tell of weights whose fused partners are not there: it is legal, and rarely meant."""
    if not container(plan.container).fuses:
        return []
    sharing = [w for w in plan.quantized if w.target is not None and w.target.shares]
    groups: dict[str, list[str]] = {}
    for weight in sharing:
        if weight.group:  # one of no group has no partners
            groups.setdefault(weight.group, []).append(weight.name.removesuffix(".weight"))
    broken = {key for key, its in groups.items() if not _is_whole(key, its)}
    if not broken:
        return []
    present = {weight.name.removesuffix(".weight") for weight in sharing}
    found = recipe.missing([w.name for w in sharing if w.group in broken], present)
    if not found:
        return []
    lines = [
        f"{safe(name)}: {', '.join(safe(one) for one in lacking)} not quantized with it"
        for name, lacking in list(found.items())[:ALONE]
    ]
    if len(found) > ALONE:
        lines.append(f"and {len(found) - ALONE:,} more")
    return ["\n".join(["these are served fused with others, and share a scale with none:", *lines])]


def _mixed_experts(plan: Plan) -> list[str]:
    """Tell of modules of experts that have several schemes, or keep some: they are served as one,
    and by what the first expert has."""
    if container(plan.container).stacks != "split":
        return []
    experts = [weight for weight in plan.weights if ".experts." in weight.name]
    if len({weight.target and weight.target.name for weight in experts}) < 2:
        return []
    found: dict[str, set[str]] = {}
    for weight in experts:
        module, dot, expert = weight.name.partition(".experts.")
        if dot and len(weight.shape) == 2 and expert.partition(".")[0].isdigit():
            found.setdefault(module, set()).add(weight.target.name if weight.target else "kept")
    mixed = [(module, schemes) for module, schemes in found.items() if len(schemes) > 1]
    if not mixed:
        return []
    lines = [f"{safe(one)}.experts: {', '.join(sorted(some))}" for one, some in mixed[:ALONE]]
    if len(mixed) > ALONE:
        lines.append(f"and {len(mixed) - ALONE:,} more")
    told = "programs that serve experts take those of a module for one scheme, the first expert's:"
    return ["\n".join([told, *lines])]


def _is_whole(key: str, modules: Sequence[str]) -> bool:
    """Are these the modules that the key of a group shows, `a.{b,c}`?"""
    stem, _, rest = key.partition("|")[0].partition(".{")
    return {f"{stem}.{tail}" for tail in rest.rstrip("}").split(",")} == set(modules)


def _nothing(plan: Plan) -> list[str]:
    if plan.quantized or not plan.weights:
        return []
    reasons = Counter(weight.kept for weight in plan.weights).most_common(REASONS)
    told = ", ".join(f"{safe(reason)} ({count:,})" for reason, count in reasons)
    return [f"nothing is quantized; most tensors are kept because: {told}"]


def _idle(plan: Plan, recipe: Recipe) -> list[str]:
    """Tell of rules of a recipe that ships that take nothing here, while others do: what such a
    recipe is named for did not happen. (A pattern of the user's own is an error.)"""
    taken = {weight.target.name for weight in plan.weights if weight.target is not None}
    return [
        f"rule {number} of {safe(recipe.name)} takes nothing of this model: no {rule.scheme} in it"
        for number, rule in enumerate(recipe.rules[:-1], 1)
        if rule.scheme and all(pattern.shipped for pattern in rule.match)
        if taken and rule.scheme not in taken
    ]


def _refused(refused: list[Weight]) -> list[str]:
    if not refused:
        return []
    lines = [f"{safe(weight.name)}: {safe(weight.kept)}" for weight in refused[:NAMED]]
    if len(refused) > NAMED:
        lines.append(f"and {len(refused) - NAMED:,} more")
    return ["\n".join(["a rule takes these, but they are kept:", *lines])]


def _is_refused(weight: Weight, schemes: tuple[str, ...]) -> bool:
    """Did a rule take this kept weight and its scheme not? Its reason is then a scheme's."""
    if len(weight.shape) < 2:
        return False
    if weight.kept.startswith(("stored [in, out]", "a stack of ")):
        return True
    if weight.kept == f"{len(weight.shape)}-dimensional":
        return True
    return len(weight.shape) == 2 and weight.kept in _misfits(schemes, weight.shape)


@lru_cache(maxsize=4096)  # a model has few different shapes
def _misfits(schemes: tuple[str, ...], shape: Shape) -> frozenset[str]:
    found = set()
    for name in schemes:
        try:
            BY_NAME[name].check(shape)
        except LowbitError as error:
            found.add(error.message)
    return frozenset(found)


def _requantized(plan: Plan) -> list[str]:
    """Tell of weights that lose twice: only the second loss can be measured here."""
    pairs = Counter(
        (weight.source.name, weight.target.name)
        for weight in plan.quantized
        if weight.source is not None and weight.target is not None and not weight.recodes
    )
    return [
        f"{count:,} weights are requantized from {before} to {after}: the errors shown are against "
        f"the {before} values, not the original"
        for (before, after), count in sorted(pairs.items())
    ]


def _mixed_dtypes(plan: Plan) -> list[str]:
    if plan.container != "compressed-tensors":
        return []
    names = {w.target.name for w in plan.quantized if w.target is not None and w.dtype == "F32"}
    if not names.intersection(DECODED_TO_BF16):
        return []
    return [
        "the weights are F32, and transformers decodes these schemes to bf16 while the rest stays "
        "fp32: load the model with dtype=bfloat16"
    ]


def _unweighed(plan: Plan) -> list[str]:
    """Tell of weights whose scales are searched without importance, which there could be."""
    searched = [
        weight
        for weight in plan.quantized
        if weight.target is not None
        and weight.rule in weight.target.weighs
        and not weight.recodes
        and not weight.importance
    ]
    if not searched or any(weight.importance for weight in plan.quantized):
        return []  # with a file, those that it lacks are named
    return [
        f"the scales of {len(searched):,} weights are searched for the least error of weights "
        "alone: --importance FILE, which lowbit importance makes without data, weighs it by what "
        "each input channel carries"
    ]
