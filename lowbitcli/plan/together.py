"""The plans of the components of a pipeline, each made as if it were alone, as one plan.

What a component calls `name` is `component/name` here: tensors, weights, groups and files. In the
headers of the files nothing changes.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.containers.plain import PLAIN
from lowbitcli.plan.nouns import Constant, Job, OutputFile, Part, Plan, Weight
from lowbitcli.plan.source import SourceWeight
from lowbitcli.tensors import TensorSpec


def together(checkpoint: Checkpoint, plans: Mapping[str, Plan], recipe: Mapping[str, Any]) -> Plan:
    """Return the plan of the pipeline `checkpoint` from those of its components."""
    weights: list[Weight] = []
    jobs: list[Job] = []
    for part, plan in plans.items():
        own = {weight.name: _weight_under(part, weight) for weight in plan.weights}
        weights += own.values()
        jobs += [Job(tuple(own[w.name] for w in job.weights), job.shared) for job in plan.jobs]
    told = [f"{part}: {note}" for part, plan in plans.items() for note in plan.notes]
    text = "\n".join(f"{part} {plan.digest}" for part, plan in plans.items())
    return Plan(
        source=checkpoint.path,
        output=None,
        directory=True,
        container=_names(plan.container for plan in plans.values()),
        source_container=_names(plan.source_container for plan in plans.values()),
        recipe=dict(recipe),
        weights=tuple(weights),
        jobs=tuple(sorted(jobs, key=lambda job: job.weights[0].name)),
        files=tuple(_file_under(part, file) for part, plan in plans.items() for file in plan.files),
        config=None,
        index=None,
        index_name="",
        sidecars=_sidecars(checkpoint, plans),
        notes=tuple(dict.fromkeys([*checkpoint.notes, *told])),
        digest=hashlib.sha256(text.encode()).hexdigest(),
        dropped={f"{part}/{x}": y for part, plan in plans.items() for x, y in plan.dropped.items()},
        documents=_documents(plans),
        constants=tuple(
            Constant(_spec_under(part, one.spec), f"{part}/{one.file}", one.data)
            for part, plan in plans.items()
            for one in plan.constants
        ),
        size_in=sum(plan.size_in for plan in plans.values()),
    )


def source_under(part: str, weight: SourceWeight) -> SourceWeight:
    """Return a component's weight as its pipeline calls it."""
    return weight._replace(name=f"{part}/{weight.name}", reads=_parts_under(part, weight.reads))


def _weight_under(part: str, weight: Weight) -> Weight:
    return weight._replace(
        name=f"{part}/{weight.name}",
        reads=_parts_under(part, weight.reads),
        writes=_parts_under(part, weight.writes),
        group=f"{part}/{weight.group}" if weight.group else "",
    )


def _parts_under(part: str, tensors: Mapping[str, Part]) -> dict[str, Part]:
    return {
        name: one._replace(spec=_spec_under(part, one.spec), file=f"{part}/{one.file}")
        for name, one in tensors.items()
    }


def _spec_under(part: str, spec: TensorSpec) -> TensorSpec:
    return spec.named(f"{part}/{spec.name}")


def _file_under(part: str, file: OutputFile) -> OutputFile:
    entries = {
        f"{part}/{name}": entry._replace(spec=_spec_under(part, entry.spec))
        for name, entry in file.entries.items()
    }
    return OutputFile(f"{part}/{file.name}", file.header, entries, file.size)


def _documents(plans: Mapping[str, Plan]) -> dict[str, bytes]:
    """Return the files that are written anew: configs and indexes lie in their components."""
    documents = {}
    for part, plan in plans.items():
        said = dict(plan.documents)
        if plan.config is not None:
            said["config.json"] = plan.config
        if plan.index is not None:
            said[plan.index_name] = plan.index
        documents |= {f"{part}/{name}": text for name, text in said.items()}
    return documents


def _sidecars(checkpoint: Checkpoint, plans: Mapping[str, Plan]) -> tuple[str, ...]:
    """Return the files to copy: those beside the components, and of each what its plan copies."""
    inside = {f"{p}/{x}" for p, one in checkpoint.components.items() for x in one.sidecars}
    beside = [name for name in checkpoint.sidecars if name not in inside]
    return (*beside, *(f"{part}/{x}" for part, plan in plans.items() for x in plan.sidecars))


def _names(containers: Iterable[str]) -> str:
    """Return the containers that are used, `plain` where there is no other."""
    used = dict.fromkeys(name for name in containers if name != PLAIN.name)
    return ", ".join(used) or PLAIN.name
