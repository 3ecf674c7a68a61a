"""Look for NaN and Inf before anything is written, so that weights with some can be kept."""

import os

import torch

from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.pipeline.crew import Crew, Step
from lowbitcli.pipeline.ledger import Progress
from lowbitcli.pipeline.work import look
from lowbitcli.plan.nouns import Plan, Weight


def find_non_finite(
    plan: Plan, checkpoint: Checkpoint, progress: Progress | None = None
) -> dict[str, str]:
    """Return name -> what is wrong, of every weight to be quantized that holds NaN or Inf.

    This reads all weights that the plan rounds, once, before anything is written.
    """
    rounded = [weight for weight in plan.quantized if not weight.recodes]
    total = sum(weight.bytes_in for weight in rounded)
    found: dict[str, str] = {}
    done = 0

    def step(weight: Weight) -> Step:
        def work() -> None:
            bad = look(weight, checkpoint, torch.device("cpu"))
            if bad.found:
                found[weight.name] = bad.error().message

        return Step(work, weight.bytes_in, weight.name)

    def tell(step: Step) -> None:
        nonlocal done
        done += step.size
        if progress is not None:
            progress(done, total, step.name)

    with Crew(len(os.sched_getaffinity(0)), torch.device("cpu")) as crew:
        crew.run(map(step, rounded), tell)
    return dict(sorted(found.items()))
