"""Scales of activations: from amaxes that were measured, or from constants of a recipe, to tensors
that stand beside the weights.

    the inputs of a weight     of rules with `activations: static`; where a file has amaxes of
                               inputs, also of rules that do not say what activations are
    the keys and values        of every attention that the file has, or with `kv_scale` of all

What the file has wins over a constant. Weights that are served as one matrix have the same inputs,
and get the largest scale of them: readers take one for all.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from lowbitcli.containers import Container
from lowbitcli.containers import container as container_of
from lowbitcli.containers.inputs import LARGEST, LARGEST_CACHED, rounded
from lowbitcli.errors import CheckpointError, RecipeError, UsageError
from lowbitcli.plan.amaxes import Amaxes, listed
from lowbitcli.plan.choose import Conditions
from lowbitcli.plan.nouns import Plan, Weight
from lowbitcli.recipe import Recipe
from lowbitcli.recipe.document import did_you_mean
from lowbitcli.tensors import safe

# What readers scale by one number that they find as activations come, where it is no token.
OF_WHAT = {"fp8_block128": "128 at a time", "mxfp8": "32 at a time", "mxfp4": "32 at a time"}
_LEFT = (
    "what is fake stores no scales of activations: kv_scale and activation_scale of the recipe are "
    "left out"
)
APART = ("towers", "companions", "mtp")  # kept kinds whose attention has no cache of ours


def activated(
    weights: Sequence[Weight], recipe: Recipe, conditions: Conditions
) -> tuple[list[Weight], tuple[str, ...]]:
    """Return the weights with the scales of activations that stand beside them, and what to tell.

    Raises:
        CheckpointError: the file names no module, or lacks one.
        RecipeError, UsageError: there is no place for what is asked for, or no use.
    """
    amaxes, container = conditions.amaxes, conditions.container
    if conditions.fake:
        if amaxes is not None:
            raise UsageError("--fake stores no scales of activations", hint="leave one out")
        said = [recipe.kv_scale, *(rule.activation_scale for rule in recipe.rules)]
        left = [one for one in said if one is not None]
        return list(weights), (_LEFT,) if left else ()
    static = [weight for weight in weights if weight.activations == "static"]
    if amaxes is None and recipe.kv_scale is None and not static:
        return list(weights), ()
    amaxes = amaxes or Amaxes("")
    _refuse_orphans(amaxes, amaxes.inputs, _modules(weights))
    caches = _caches(weights, recipe, amaxes, container)
    scales, notes = _scales(static, recipe, amaxes, container)
    if not scales and not caches:
        raise UsageError(
            f"{safe(amaxes.name)} is given, and nothing here has static activations",
            hint=f"they are for {' and '.join(container.static) or 'no scheme'} of {container.name}"
            ", and for rules that do not say activations: none or dynamic",
        )
    found = [_with(weight, scales, caches, container) for weight in weights]
    if caches:
        if not any(weight.target is not None for weight in weights):
            raise UsageError("scales of caches are given, and no weight is quantized")
        notes.append(f"keys and values of {len(caches):,} attentions have scales for an FP8 cache")
    unused = sorted(amaxes.inputs.keys() - {_module(weight) for weight in static})
    if unused:
        told = listed([safe(name) for name in unused])
        notes.append(f"amaxes of modules without static activations are not used: {told}")
    return found, tuple(notes)


def _module(weight: Weight) -> str:
    return weight.name.removesuffix(".weight")


def _scales(
    static: Sequence[Weight], recipe: Recipe, amaxes: Amaxes, container: Container
) -> tuple[dict[str, float], list[str]]:
    """Return weight -> the scale of its inputs, and what to tell."""
    amax = {x.name: amaxes.inputs[m] for x in static if (m := _module(x)) in amaxes.inputs}
    missing = [x.name for x in static if x.name not in amax and x.input_scale is None]
    if missing:
        raise CheckpointError(
            f"{safe(amaxes.name)} has no amax of the inputs of {len(missing):,} weights: "
            f"{listed([safe(name) for name in missing])}",
            hint="calibrate them too, or give their rule a constant: activation_scale: 1.0",
        )
    scales = {x.name: x.input_scale for x in static if x.input_scale is not None}
    constant = len(scales.keys() - amax.keys())
    scales |= {x.name: _scale(x, amax[x.name]) for x in static if x.name in amax}
    notes = [f"activations of {len(scales):,} weights are static"] if scales else []
    if notes and amax:
        notes[0] += f", with scales from {safe(amaxes.name)}"
    if constant:
        notes[0] += f", of {constant:,} by a constant of the recipe"
    differing = _share(scales, recipe) if container.fuses else 0
    if differing:
        notes.append(
            f"{differing:,} groups of weights that are served as one matrix have inputs of "
            "different amax: all get the largest, which is what readers take"
        )
    return scales, notes


def _scale(weight: Weight, amax: float) -> float:
    scheme = weight.target.name if weight.target is not None else ""
    scale = rounded(amax / LARGEST[scheme])
    if not scale or rounded(1.0 / scale) in (0.0, float("inf")):
        raise CheckpointError(
            f"{safe(weight.name)}: the amax {amax:g} of its inputs makes no fp32 scale"
        )
    return scale


def _share(scales: dict[str, float], recipe: Recipe) -> int:
    """Give the members of each group their largest scale; return how many groups differed."""
    groups: dict[str, list[str]] = {}
    for name, key in recipe.groups(scales).items():
        groups.setdefault(key, []).append(name)
    differing = 0
    for names in groups.values():
        largest = max(scales[name] for name in names)
        differing += any(scales[name] != largest for name in names)
        scales.update(dict.fromkeys(names, largest))
    return differing


def _caches(
    weights: Sequence[Weight], recipe: Recipe, amaxes: Amaxes, container: Container
) -> dict[str, tuple[float, float]]:
    """Return attention -> the scales of its keys and of its values."""
    if not amaxes.keys and not amaxes.values and recipe.kv_scale is None:
        return {}
    if container.cache is None:
        raise RecipeError(
            f"the container {container.name} has no place for scales of keys and values",
            hint="compressed-tensors and modelopt have",
        )
    apart = {kind.label for kind in recipe.kinds if kind.name in APART}
    names = {_module(weight) for weight in weights if weight.kept not in apart}
    attentions = {
        name.removesuffix(".k_proj")
        for name in names
        if name.endswith(".k_proj") and name.removesuffix(".k_proj") + ".v_proj" in names
    }
    _refuse_orphans(amaxes, (*amaxes.keys, *amaxes.values), attentions)
    _refuse_half(amaxes, attentions)
    found = {}
    if recipe.kv_scale is not None:
        if not attentions:
            raise RecipeError("kv_scale: no layer has a k_proj and a v_proj")
        found = dict.fromkeys(attentions, (recipe.kv_scale, recipe.kv_scale))
    for name in attentions & amaxes.keys.keys():
        pair = amaxes.keys[name], amaxes.values[name]
        found[name] = rounded(pair[0] / LARGEST_CACHED), rounded(pair[1] / LARGEST_CACHED)
    return found


def _refuse_half(amaxes: Amaxes, attentions: set[str]) -> None:
    """Raise CheckpointError where keys have an amax and values none, or some layers and others of
    their kind none."""
    told = amaxes.keys.keys() | amaxes.values.keys()
    kinds = {re.sub(r"\d+", "", name) for name in told}
    due = {name for name in attentions if re.sub(r"\d+", "", name) in kinds} | told
    missing = [
        f"{safe(name)}.{what}_amax"
        for name in sorted(due)
        for what, found in (("k", amaxes.keys), ("v", amaxes.values))
        if name not in found
    ]
    if missing:
        raise CheckpointError(
            f"{safe(amaxes.name)} has scales of some keys and values, and lacks {listed(missing)}"
        )


def _modules(weights: Iterable[Weight]) -> set[str]:
    found: set[str] = set()
    for weight in weights:
        module = _module(weight)
        while module and module not in found:
            found.add(module)
            module = module.rpartition(".")[0]
    return found


def _refuse_orphans(amaxes: Amaxes, names: Iterable[str], known: set[str]) -> None:
    """Raise CheckpointError for an entry that is about nothing in this checkpoint."""
    orphans = sorted(set(names) - known)
    if orphans:
        near = did_you_mean(orphans[0], sorted(known), "was it measured on this model?")
        raise CheckpointError(
            f"{safe(amaxes.name)} has amaxes of what this checkpoint has not: "
            f"{listed([safe(name) for name in orphans])}",
            hint=safe(near),
        )


def _with(
    weight: Weight,
    scales: Mapping[str, float],
    caches: Mapping[str, tuple[float, float]],
    container: Container,
) -> Weight:
    """Return a weight with the scales that stand beside it."""
    beside = []
    if weight.name in scales and weight.target is not None:
        static = container.static[weight.target.name]
        beside.append(static.stored(_module(weight), scales[weight.name]))
    attention, _, part = _module(weight).rpartition(".")
    if container.cache is not None and attention in caches and part in ("k_proj", "v_proj"):
        both = container.cache.stored(attention, caches[attention])
        beside.append(both[part == "v_proj"])
    return weight._replace(beside=tuple(beside)) if beside else weight


def of_readers(plan: Plan) -> list[tuple[str, str]]:
    """Return scheme -> what readers will make of activations, of the schemes that are written."""
    kinds = {
        (weight.target.name, weight.activations)
        for weight in plan.quantized
        if weight.target is not None and not weight.kept and not weight.fake
    }
    return [(scheme, _words(scheme, how, plan)) for scheme, how in sorted(kinds)]


def _words(scheme: str, how: str, plan: Plan) -> str:
    if how == "static":
        return "static: scaled by numbers that are stored"
    if plan.container == "lowbit":
        return "left to who reads it"
    told = f"dynamic: scaled by readers, {OF_WHAT.get(scheme, 'token by token')}"
    if how == "none":
        told = "none: readers multiply in 16 bits"
    if plan.container == "comfyui":
        told = "ComfyUI decides"
    if scheme in container_of(plan.container).static:
        told += "; static with --activation-scales"
    return told
