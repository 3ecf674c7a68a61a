"""All that is asked about the consumers that are named: a step for each."""

from collections.abc import Iterable

from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.plan.rules_activations import ACTIVATION_RULES
from lowbitcli.plan.rules_config import CONFIG_RULES
from lowbitcli.plan.rules_files import FILE_RULES
from lowbitcli.plan.rules_names import NAME_RULES
from lowbitcli.plan.rules_shapes import SHAPE_RULES
from lowbitcli.plan.source import Source
from lowbitcli.recipe import Consumer
from lowbitcli.verify.consumers import lint
from lowbitcli.verify.nouns import Step
from lowbitcli.verify.rules_scales import SCALE_RULES

RULES = (*CONFIG_RULES, *FILE_RULES, *ACTIVATION_RULES, *NAME_RULES, *SHAPE_RULES, *SCALE_RULES)


def linted(checkpoint: Checkpoint, source: Source, consumers: Iterable[Consumer]) -> list[Step]:
    """Hold a checkpoint against the demands of each consumer."""
    return [lint(checkpoint, source, consumer, RULES) for consumer in consumers]
