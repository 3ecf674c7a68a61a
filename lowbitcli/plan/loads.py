"""Will what is planned be loaded? The consumers that a recipe names, held against the output on
paper with the rules of `verify --for`, less those about numbers."""

from collections.abc import Iterator

from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.containers.reading import OK, READS
from lowbitcli.errors import RecipeError
from lowbitcli.plan.consumers import FAIL, Seen
from lowbitcli.plan.nouns import Plan
from lowbitcli.plan.paper import Paper
from lowbitcli.plan.rules_activations import ACTIVATION_RULES
from lowbitcli.plan.rules_config import CONFIG_RULES
from lowbitcli.plan.rules_files import FILE_RULES
from lowbitcli.plan.rules_names import NAME_RULES
from lowbitcli.plan.rules_shapes import SHAPE_RULES
from lowbitcli.plan.source import examine
from lowbitcli.recipe import Consumer, Recipe
from lowbitcli.tensors import safe

RULES = (*CONFIG_RULES, *FILE_RULES, *ACTIVATION_RULES, *NAME_RULES, *SHAPE_RULES)
SHOWN = 3  # reasons of a refusal


def loads(plan: Plan, checkpoint: Checkpoint, recipe: Recipe) -> tuple[str, ...]:
    """Return what the recipe's consumers make of the output otherwise than meant.

    Raises:
        RecipeError: one of them would not load it, or read other numbers.
    """
    if not recipe.consumer:
        return ()
    paper = Paper(plan, checkpoint)
    seen = Seen(paper, examine(paper))
    notes: list[str] = []
    for consumer in recipe.consumer:
        found = list(_found(seen, consumer))
        wrong = [message for message, severity in found if severity == FAIL]
        if wrong:
            raise _refusal(consumer, wrong, seen)
        notes += [consumer.doubt] if consumer.doubt else []
        notes += [f"{consumer.known}: {message}" for message, _ in found]
    return tuple(dict.fromkeys(notes))


def _found(seen: Seen, consumer: Consumer) -> Iterator[tuple[str, str]]:
    for rule in RULES:
        if consumer.name in rule.consumers:
            for tensor, message, severity in rule.check(seen, consumer.name):
                yield safe(f"{tensor}: {message}" if tensor else message), severity


def _refusal(consumer: Consumer, wrong: list[str], seen: Seen) -> RecipeError:
    shown = wrong[:SHOWN]
    if len(wrong) > SHOWN:
        shown.append(f"and {len(wrong) - SHOWN:,} more")
    return RecipeError(
        "\n  ".join([f"{consumer.known} would not load this as it is meant:", *shown]),
        where=consumer.where,
        hint=_instead(consumer, seen),
    )


def _instead(consumer: Consumer, seen: Seen) -> str:
    """Return where this consumer reads the schemes that are planned, or else which it reads."""
    reads = READS[consumer.name]
    schemes = sorted({weight.scheme.name for weight in seen.quantized.values() if weight.scheme})
    fit = [
        container
        for container, answers in reads.items()
        if schemes and all(isinstance(answers.get(one), OK) for one in schemes)
    ]
    if fit and seen.container not in fit:
        return f"it reads {', '.join(schemes)} in --container {' or '.join(fit)}"
    every = [
        f"{', '.join(names)} in {container}"
        for container, answers in reads.items()
        if (names := [one for one, answer in answers.items() if isinstance(answer, OK)])
    ]
    return f"it reads {'; '.join(every)}"
