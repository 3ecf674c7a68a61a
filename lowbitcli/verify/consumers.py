"""Will it load? Each consumer's demands, held against a checkpoint: `verify --for vllm`.

What a rule is, and those that need no numbers, stands in `plan/consumers`. Rules about numbers read
scales only.
"""

from collections.abc import Iterable, Iterator

from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.containers.reading import VERSIONS
from lowbitcli.errors import CheckpointError, LowbitError
from lowbitcli.plan.consumers import FAIL, Rule, Seen
from lowbitcli.plan.source import Source, examine
from lowbitcli.recipe import Consumer
from lowbitcli.tensors import safe
from lowbitcli.verify.nouns import Problem, Step


def lint(checkpoint: Checkpoint, source: Source, consumer: Consumer, rules: Iterable[Rule]) -> Step:
    """Hold a checkpoint against what a consumer demands; of a pipeline each component."""
    name = consumer.name
    what = f"{name} loads it as it is meant (rules)"
    problems: list[Problem] = []
    count = 0
    rules = [rule for rule in rules if name in rule.consumers]
    for prefix, seen in _parts(checkpoint, source):
        for rule in rules:
            count += 1
            problems += _problems(rule, seen, name, prefix)
    failed = sum(one.severity == FAIL for one in problems)
    note = f"as {consumer.known} was read"
    if not failed:
        note = f"nothing found that it would not take, {note}"
    if consumer.doubt:
        note = f"{note}; {consumer.doubt}"
    return Step(what, count, tuple(problems), note=note)


def _parts(checkpoint: Checkpoint, source: Source) -> Iterator[tuple[str, Seen]]:
    if not checkpoint.components:
        yield "", Seen(checkpoint, source)
        return
    for part, one in checkpoint.components.items():
        try:
            yield f"{part}/", Seen(one, examine(one))
        except LowbitError:
            continue  # told of already: the pipeline could not have been examined


def _problems(rule: Rule, seen: Seen, consumer: str, prefix: str) -> Iterator[Problem]:
    try:
        for tensor, message, severity in rule.check(seen, consumer):
            stored = seen.checkpoint.tensors.get(tensor)
            file = prefix + stored.file if stored is not None else ""
            name = prefix + tensor if tensor else ""
            yield Problem(
                "consumer", name, safe(f"{VERSIONS[consumer]}: {message}"), file, severity
            )
    except CheckpointError as error:
        yield Problem("unreadable", "", error.message)
