"""All weights of a source and what becomes of them, stacks of experts taken apart where they are
quantized and readers want single experts."""

from collections.abc import Iterable, Mapping
from typing import Any

from lowbitcli.containers import Container
from lowbitcli.containers.layouts import TRANSPOSED
from lowbitcli.containers.stacks import LETTERS, MODELS, NOT_SINGLY, Stacking, fits
from lowbitcli.errors import CheckpointError
from lowbitcli.plan.choose import splits
from lowbitcli.plan.fused import grouped
from lowbitcli.plan.nouns import Choice
from lowbitcli.plan.source import Source, SourceWeight
from lowbitcli.plan.split import biases, biases_of_experts, experts
from lowbitcli.recipe import Recipe
from lowbitcli.tensors import DATA, safe

NAMED = 5  # stacks that are named


def contradicted(source: Source, config: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return what to tell of stacks that a recipe says lie otherwise than the hidden size of the
    model's config has them: the recipe is believed."""
    names = [
        name
        for name, weight in source.weights.items()
        if weight.told and len(weight.shape) == 3 and not _agrees(weight, config or {})
    ]
    if not names:
        return ()
    shown = [f"{safe(name)}: {list(source.weights[name].reads[DATA].spec.shape)}" for name in names]
    more = [f"and {len(names) - NAMED:,} more"] if len(names) > NAMED else []
    told = "the recipe's layout is believed, and by config.json's hidden_size these lie otherwise:"
    return ("\n".join([told, *shown[:NAMED], *more]),)


def _agrees(weight: SourceWeight, config: Mapping[str, Any]) -> bool:
    said = Stacking("in_out" if weight.plain == TRANSPOSED else "out_in")
    return fits(weight.name, weight.reads[DATA].spec.shape, said, config)


def readers_of(weights: Iterable[SourceWeight], model: str) -> tuple[str, ...]:
    """Return what is known of programs that read single experts of a model whose stacks were taken
    apart."""
    split = [one.name for one in weights if one.reads[DATA].view is not None]
    if not split:
        return ()
    if model not in MODELS:
        return (
            "nothing is known of programs that read single experts of this model: they are called "
            f"as the stack was, {safe(split[0])}",
        )
    if model in LETTERS - {"lfm2_moe"} and any(".mlp.experts." in name for name in split):
        return (
            f"vLLM 0.33 and SGLang 0.5.23 call the module of the experts of {safe(model)} "
            "block_sparse_moe, and read no `mlp`, quantized or not; transformers 5.24 does",
        )
    if model not in NOT_SINGLY:
        return ()
    if model == "gpt_oss":
        return (
            "neither transformers 5.24 nor vLLM 0.33 takes experts of gpt_oss one by one: for them "
            "write mxfp4 into --container gpt-oss",
        )
    return (f"transformers 5.24 does not take experts of {safe(model)} one by one",)


def taken_apart(
    source: Source, choices: Mapping[str, Choice], recipe: Recipe, container: Container
) -> list[tuple[SourceWeight, Choice]]:
    """Return all weights and what becomes of them, with stacks that are quantized taken apart
    where readers want single experts, and their biases with them.

    Raises:
        CheckpointError: an expert's name is that of another tensor.
    """
    stacks = [
        weight
        for name, weight in source.weights.items()
        if choices[name].target is not None and splits(weight, container)
    ]
    if not stacks:
        return [(weight, choices[name]) for name, weight in source.weights.items()]
    found = dict(source.weights)
    chosen = dict(choices)
    single: list[str] = []
    for stack in stacks:
        pieces = [(one, chosen[stack.name]) for one in experts(stack)]
        for name, bias in biases(stack, source.weights).items():
            pieces += [(one, chosen[name]) for one in biases_of_experts(bias, stack)]
            del found[name]
        del found[stack.name]
        for one, choice in pieces:
            if one.name in found:
                message = f"{safe(one.name)} is there besides the stack {safe(stack.name)}"
                raise CheckpointError(message, hint="a model has its experts in one way only")
            found[one.name], chosen[one.name] = one, choice
            single.append(one.name)
    groups = recipe.groups(single) if container.fuses else {}
    return [
        (weight, grouped(chosen[name], groups[name]) if name in groups else chosen[name])
        for name, weight in sorted(found.items())
    ]
