"""Importance files for small models, and what a search measures with them."""

import torch

from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.plan.importance import Importance
from lowbitcli.search import Allowed
from lowbitcli.search.candidates import candidates
from lowbitcli.search.measure import Measured, measure
from lowbitcli.search.units import paper
from tests.checkpoints import read, write

METADATA = {"lowbit.importance": "1", "tokens": "512", "seed": "0"}


def by_columns(path, source, seed=0) -> Importance:
    """Write an importance file for every matrix of a layer, and read it."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, w in read(source).items():
        if "layers" in name:
            h = torch.randint(-9, 9, (w.shape[1],), generator=generator)
            found[name.removesuffix(".weight")] = h.to(torch.int8)
    write(path, found, METADATA)
    return Importance.open(path)


def errors_of(path, schemes, by=None, progress=None) -> Measured:
    """Return what a search measures of a checkpoint."""
    with Checkpoint.open(path) as checkpoint:
        known = paper(checkpoint, candidates(schemes), "auto", by)
        plans = {name: plan for name, plan in known.plans.items() if plan is not known.kept}
        jobs = {name: known.jobs(name) for name in plans}
        return measure(checkpoint, plans, jobs, Allowed("cpu"), by, progress)
