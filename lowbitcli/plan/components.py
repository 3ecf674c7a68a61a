"""A diffusers pipeline on paper: every component planned by itself, and the plans put together.

| component | what becomes of it |
|---|---|
| the denoiser: see DENOISERS | the recipe's rules |
| any other that a pattern names: `text_encoder/*` | the rules of those patterns |
| the rest | copied byte for byte |

A pattern with a slash is for the components that what stands before the slash takes, and what
stands behind is tried on their tensors; one without is for the denoiser. In plans and reports
tensors and files have the name of their component in front.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.containers.plain import PLAIN
from lowbitcli.errors import RecipeError, UsageError
from lowbitcli.plan import source as sources
from lowbitcli.plan.build import build, build_dequantize
from lowbitcli.plan.choose import Conditions
from lowbitcli.plan.digest import digest
from lowbitcli.plan.loads import loads
from lowbitcli.plan.notes import notes_on
from lowbitcli.plan.nouns import Job, OutputFile, Part, Plan, Weight
from lowbitcli.plan.source import Source, lying
from lowbitcli.plan.together import source_under, together
from lowbitcli.recipe import Matcher, Recipe
from lowbitcli.recipe.layout import Lie
from lowbitcli.recipe.pattern_set import PatternSet
from lowbitcli.recipe.patterns import Pattern
from lowbitcli.tensors import DATA, safe

DENOISERS = ("transformer", "transformer_*", "unet", "unet_*", "prior", "decoder")
COPIED = "its component is copied"


def examine(
    checkpoint: Checkpoint, *, layouts: sources.Layouts | None = None, **how: Any
) -> Source:
    """Find every weight of a checkpoint, or of all components of a pipeline; `how` is as for
    `source.examine`, as is `layouts`, which is asked about `component/name`.

    Raises:
        UnsupportedError, CheckpointError: see `source.examine`.
    """
    if not checkpoint.components:
        return sources.examine(checkpoint, layouts=layouts, **how)
    found = {
        part: sources.examine(component, layouts=_layouts_under(part, layouts), **how)
        for part, component in checkpoint.components.items()
    }
    weights = [source_under(p, w) for p, one in found.items() for w in one.weights.values()]
    used = [one.container for one in found.values() if one.container is not PLAIN]
    return Source(
        container=used[0] if used else PLAIN,
        weights={weight.name: weight for weight in sorted(weights, key=lambda one: one.name)},
        findings=tuple(
            replace(finding, tensor=f"{part}/{finding.tensor}")
            for part, one in found.items()
            for finding in one.findings
        ),
        activations={
            f"{part}/{name}": what
            for part, one in found.items()
            for name, what in one.activations.items()
        },
        notes=tuple(f"{part}: {note}" for part, one in found.items() for note in one.notes),
    )


def _layouts_under(part: str, layouts: sources.Layouts | None) -> sources.Layouts | None:
    return None if layouts is None else lambda name: layouts(f"{part}/{name}")


def build_pipeline(
    checkpoint: Checkpoint,
    recipe: Recipe,
    conditions_of: Callable[[Checkpoint], Conditions],
    max_shard_size: int | None,
) -> Plan:
    """Plan the quantization of a pipeline.

    Raises:
        UsageError: no rule is for any of its components.
        RecipeError, CheckpointError, UnsupportedError: see `build`.
    """
    shares = {part: _share(recipe, part) for part in checkpoint.components}
    if not any(share.rules for share in shares.values()):
        names = ", ".join(checkpoint.components)
        raise UsageError(
            f"none of the components ({safe(names)}) is known for a denoiser, "
            "and no pattern of the recipe names one",
            hint="name one in a recipe, as in match: COMPONENT/*, or quantize its directory",
        )
    _refuse_dead(recipe, checkpoint)
    _refuse_dead_layouts(recipe, checkpoint)
    plans: dict[str, Plan] = {}
    for part, component in checkpoint.components.items():
        conditions = conditions_of(component)
        held = {
            name.removeprefix(f"{part}/")
            for name in conditions.non_finite
            if name.startswith(f"{part}/")
        }
        conditions = replace(conditions, non_finite=frozenset(held))
        share = shares[part]
        if share.rules:
            plan = build(component, share, conditions, max_shard_size)
            told = [*plan.notes, *notes_on(plan, share), *loads(plan, component, share)]
            told += _unread(component, plan)
            plans[part] = replace(plan, notes=tuple(told))
        else:
            plans[part] = _copied(component)
    said = {"name": recipe.name, "digest": recipe.digest}
    return together(checkpoint, plans, {**said, **_said(plans)})


def _said(plans: Mapping[str, Plan]) -> dict[str, Any]:
    """Return what a manifest must say of how the source was read: what the plans say of it, and
    of how weights lie by component."""
    every = [plan.recipe for plan in plans.values()]
    nibbles = next((one["nibbles"] for one in every if "nibbles" in one), "")
    layout = {
        part: plan.recipe["layout"] for part, plan in plans.items() if "layout" in plan.recipe
    }
    return {
        "fake": any(one.get("fake", False) for one in every),
        **({"layout": layout} if layout else {}),
        **({"nibbles": nibbles} if nibbles else {}),
        **({"raw_fp8": True} if any(one.get("raw_fp8", False) for one in every) else {}),
    }


def _unread(component: Checkpoint, plan: Plan) -> list[str]:
    """Tell of a component that diffusers loads, and quantized cannot."""
    if "_class_name" not in (component.config or {}) or not plan.quantized:
        return []
    if plan.container == PLAIN.name:
        return []
    return [
        f"diffusers 0.42 does not read {plan.container}, and refuses the component; "
        "lowbit dequantize gives it back"
    ]


def dequantize_pipeline(
    checkpoint: Checkpoint,
    dtype: str,
    *,
    raw_fp8: bool,
    nibbles: str,
    max_shard_size: int | None,
) -> Plan:
    """Plan the dequantization of a pipeline: components without a quantized weight are copied.

    Raises:
        CheckpointError: see `build_dequantize`.
    """
    plans = {}
    for part, component in checkpoint.components.items():
        plan = build_dequantize(
            component, dtype, raw_fp8=raw_fp8, nibbles=nibbles, max_shard_size=max_shard_size
        )
        computed = any(not weight.kept for weight in plan.weights)
        plans[part] = plan if computed else _copied(component)
    said = {"dequantize": dtype, **({"raw_fp8": True} if raw_fp8 else {})}
    said |= {"nibbles": nibbles} if nibbles else {}
    return together(checkpoint, plans, said)


def _share(recipe: Recipe, part: str) -> Recipe:
    """Return what of a recipe is for a component, as patterns over its own names."""
    rules = []
    for rule in recipe.rules:
        match = _patterns(rule.match, part)
        if match and (_is_denoiser(part) or any(_names_part(x, part) for x in rule.match)):
            exclude = _patterns(rule.exclude, part, everywhere=True)
            rules.append(rule.model_copy(update={"match": match, "exclude": exclude}))
    keep = _patterns(recipe.keep, part, everywhere=True)
    layout = tuple(one for lie in recipe.layout for one in _lies(lie, part))
    return recipe.model_copy(update={"rules": tuple(rules), "keep": keep, "layout": layout})


def _patterns(
    patterns: Iterable[Pattern], part: str, everywhere: bool = False
) -> tuple[Pattern, ...]:
    """Return the patterns for a component; one without a slash is for the denoiser, or, where it
    takes something out, for `everywhere`. None is held to take something: that is for all
    components together to show."""
    found = []
    for pattern in patterns:
        head, tail = _split(pattern)
        if head is None and (everywhere or _is_denoiser(part)):
            found.append(pattern.model_copy(update={"shipped": True}))
        elif head is not None and _names_part(pattern, part):
            found.append(pattern.model_copy(update={"text": tail, "shipped": True}))
    return tuple(found)


def _split(pattern: Pattern) -> tuple[str | None, str]:
    """Return what stands before the slash, None where there is none, and the pattern behind."""
    head, slash, tail = pattern.text.removeprefix("re:").partition("/")
    if not slash:
        return None, pattern.text
    return head, f"re:{tail}" if pattern.is_regex else tail


def _names_part(pattern: Pattern, part: str) -> bool:
    """Does what stands before the slash take this component?"""
    head, _ = _split(pattern)
    if head is None:
        return False
    if not pattern.is_regex:
        return fnmatchcase(part, head)
    try:
        return re.fullmatch(head, part) is not None
    except re.error as error:
        message = f"{pattern.text!r}: what stands before the slash is no pattern: {error}"
        raise RecipeError(message, where=pattern.where) from error


def _is_denoiser(part: str) -> bool:
    return any(fnmatchcase(part, name) for name in DENOISERS)


def _refuse_dead(recipe: Recipe, checkpoint: Checkpoint) -> None:
    """Raise RecipeError where a pattern of the user's takes a tensor of none of its components."""
    taken_out = [*recipe.keep, *(x for rule in recipe.rules for x in rule.exclude)]
    patterns = [*taken_out, *(x for rule in recipe.rules for x in rule.match)]
    alive: set[int] = set()
    for part, component in checkpoint.components.items():
        own = [
            (number, one)
            for number, pattern in enumerate(patterns)
            for one in _patterns([pattern], part, everywhere=number < len(taken_out))
        ]
        taking = PatternSet(one for _, one in own).taking(component.tensors)
        alive |= {own[place][0] for place in taking}
    dead = [x for n, x in enumerate(patterns) if not x.shipped and n not in alive]
    if dead:
        Matcher(Recipe(keep=tuple(dead))).dead(checkpoint.tensors)
        raise RecipeError(
            f"{dead[0].text!r} matches no tensor of the components that it is for",
            where=dead[0].where,
            hint="a pattern without a slash is for the denoiser: text_encoder/* names another",
        )


def _lies(lie: Lie, part: str) -> list[Lie]:
    """Return what is said of how a component's weights lie, over its own names."""
    own = _patterns([lie.pattern], part)
    return [Lie(pattern=one, words=lie.words, where=lie.where) for one in own]


def _refuse_dead_layouts(recipe: Recipe, checkpoint: Checkpoint) -> None:
    """Raise RecipeError where a pattern of `layout` takes no stack and no matrix of the components
    that it is for."""
    if not recipe.layout:
        return
    names = {part: lying(sources.examine(one)) for part, one in checkpoint.components.items()}
    for lie in recipe.layout:
        if not any(one.takes(x) for part in names for one in _lies(lie, part) for x in names[part]):
            raise RecipeError(
                f"layout: {lie.pattern.text!r} takes no stack of experts and no matrix",
                where=lie.where,
                hint="a pattern without a slash is for the denoiser: text_encoder/* names another",
            )


def _copied(component: Checkpoint) -> Plan:
    """Plan to copy a component: its files with their very headers, its index, what is beside it."""
    weights = []
    for name, stored in component.tensors.items():
        spec, part = stored.spec, {DATA: Part(stored.spec, stored.file)}
        weights.append(Weight(name, spec.shape, spec.dtype, None, None, part, part, kept=COPIED))
    files = tuple(
        OutputFile(
            file,
            len(header.raw).to_bytes(8, "little") + header.raw,
            header.entries,
            header.size,
        )
        for file, header in component.headers.items()
    )
    specs = {
        file: [x.spec for x in one.entries.values()] for file, one in component.headers.items()
    }
    return Plan(
        source=component.path,
        output=None,
        directory=True,
        container=PLAIN.name,
        source_container=PLAIN.name,
        recipe={"copied": True},
        weights=tuple(weights),
        jobs=tuple(Job((weight,)) for weight in weights),
        files=files,
        config=None,
        index=None,
        index_name="",
        sidecars=(*component.sidecars, *([component.index_name] if component.index_name else [])),
        notes=component.notes,
        digest=digest(component, {"copied": True}, specs, component.metadata, None),
        size_in=sum(header.size for header in component.headers.values()),
    )
