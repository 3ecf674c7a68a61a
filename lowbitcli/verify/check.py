"""Verify a checkpoint: structure first, then headers, then numbers, the cheap before the dear."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch

from lowbitcli.checkpoint.made import Made
from lowbitcli.checkpoint.manifest import Manifest
from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.errors import CheckpointError, UsageError
from lowbitcli.plan.components import examine
from lowbitcli.plan.pad import widened_like
from lowbitcli.plan.source import Source, SourceWeight, refuse_findings
from lowbitcli.plan.split import aligned
from lowbitcli.verify import again, compare, nearness, scales, structure
from lowbitcli.verify.align import dequantized, layouts_of, lying_like, nibbles_of, raw_fp8_of
from lowbitcli.verify.bound import half_gap
from lowbitcli.verify.counted import layers
from lowbitcli.verify.hands import Map, hands, undivided
from lowbitcli.verify.inputs import inputs
from lowbitcli.verify.kept import kept
from lowbitcli.verify.largest import Largest
from lowbitcli.verify.limits import Demands, limited
from lowbitcli.verify.lint import linted
from lowbitcli.verify.not_numbers import nan_in_kept
from lowbitcli.verify.nouns import (
    Histogram,
    Problem,
    Step,
    Summary,
    Verification,
    WeightRow,
)
from lowbitcli.verify.plausible import plausible
from lowbitcli.verify.rows import Rows, UnreadableError
from lowbitcli.verify.sample import document, sampled
from lowbitcli.verify.spread import Spread
from lowbitcli.verify.unreadable import environment, unreadable

# Called with bytes done, bytes in all, and the name of what is being worked on.
Progress = Callable[[int, int, str], None]
NO_SOURCE = "no source was named"


def verify(
    target: Checkpoint,
    source: Checkpoint | None,
    *,
    device: torch.device,
    demands: Demands | None = None,
    widening: float | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Check `target` by itself and, where there is one, against the `source` that it was made from.

    `demands` says what is asked beyond that, and how much is looked at. `widening` is how
    far, relatively, an element may lie outside the interval of its code: `BF16_WRITER` for
    outputs of a writer that computes in bf16. By default a code must be the very one that lowbit
    writes where the manifest says that it computed it, and elsewhere one that fp32 can lead to, or
    bf16 where the scales show that it was used. The check's note says which. One weight is looked
    at at a time, in bands of rows.

    Raises:
        CheckpointError: the source cannot be read, or is wrong in itself.
        UsageError: a limit without a source.
    """
    demands = demands or Demands()
    if demands.needs_source and source is None:
        raise UsageError(
            "what may be lost needs a source to measure it against", hint="name it: --against SRC"
        )
    theirs = None
    if source is not None:
        theirs = examine(
            source,
            raw_fp8=raw_fp8_of(target),
            nibbles=nibbles_of(target),
            layouts=layouts_of(target),
        )
        refuse_findings(theirs)
    try:
        ours = examine(target)
    except CheckpointError as error:
        said = str(source.path) if source is not None else None
        return unreadable(target.path, said, error, device)
    if theirs is not None:
        theirs = lying_like(theirs, ours)
        ours = lying_like(ours, theirs, dequantized(target, ours))
        theirs = widened_like(aligned(theirs, ours.weights), ours)
        ours = widened_like(ours, theirs)
    run = _Run(target, ours, source, theirs, device, widening, demands, progress)
    with undivided(device):
        return run.verify()


@dataclass
class _Run:
    """One verification under way."""

    target: Checkpoint
    ours: Source
    source: Checkpoint | None
    theirs: Source | None
    device: torch.device
    widening: float | None
    demands: Demands
    progress: Progress | None
    done: int = 0
    total: int = 0
    manifest: Manifest | None = None
    restored: frozenset[str] = frozenset()
    steps: list[Step] = field(default_factory=list)
    rows: dict[str, WeightRow] = field(default_factory=dict)
    untouched: int = 0
    widenings: Counter[float | None] = field(default_factory=Counter)
    spreads: dict[str, Spread] = field(default_factory=dict)
    again: int = 0  # weights of which some is quantized again
    largest: Largest = field(default_factory=Largest)

    def verify(self) -> Verification:
        self.manifest, broken = structure.manifest_of(self.target)
        self.restored = structure.restored(self.manifest, self.ours, self.theirs)
        self.total = self._bytes_to_read()
        files = Step("files can be read, and their headers hold", len(self.target.files), broken)
        self.steps += [
            files,
            structure.declared(self.ours, self.target, self.theirs, self.made.kept),
            structure.any_quantized(self.ours),
            *sampled(self.demands.sample, self.looked, self.ours),
            structure.index(self.target),
            structure.manifest(self.target, self.manifest),
            structure.coverage(self.ours, self.theirs, self.restored),
            layers(self.target.config, self.ours.weights),
        ]
        self.steps += linted(self.target, self.ours, self.demands.consumers)
        self.steps += [
            scales.shared(self.target, self.ours),
            scales.scales(self.target, self.looked, self.device, self._tell, self.made.rounded),
            *inputs(self.target, self.ours),
            self._plausible(),
            scales.nan_codes(self.target, self.looked, self.device, self._tell),
            nan_in_kept(self.target, self.looked, self._tell, alone=self.source is None),
            structure.hashes(self.target, self.manifest, self._tell, self._names),
        ]
        for weight in self.ours.weights.values():
            if weight.scheme is not None:
                self.rows[weight.name] = _unmeasured(weight)
        self.steps += self._against_source()
        self.steps += limited([self.rows[x] for x in sorted(self.rows)], self.ours, self.demands)
        if self.progress is not None:
            self.progress(self.total, self.total, "")
        return self._verification()

    def _plausible(self) -> Step:
        alone = self.source is None
        return plausible(self.target, self.looked, self.device, self._tell, alone=alone)

    @cached_property
    def looked(self) -> Source:
        """The weights that are looked at: all, or a sample."""
        sample = self.demands.sample
        return self.ours if sample is None else sample.of_source(self.ours)

    @property
    def _names(self) -> frozenset[str] | None:
        """The stored tensors that are looked at, None for all."""
        if self.demands.sample is None:
            return None
        weights = self.looked.weights.values()
        return frozenset(x.spec.name for weight in weights for x in weight.reads.values())

    @property
    def made(self) -> Made:
        """What the manifest says of the weights: nothing, where there is none."""
        return (self.manifest.made if self.manifest is not None else None) or Made()

    def _bytes_to_read(self) -> int:
        """Return about how many bytes will be read, over all steps."""
        sizes = [weight.nbytes for weight in self.looked.weights.values()]
        passes = 1 + (self.manifest is not None) + (self.source is not None)
        return passes * sum(sizes)

    def _tell(self, name: str, size: int) -> None:
        if self.progress is not None:
            self.progress(min(self.done, self.total), self.total, name)
        self.done += size

    def _against_source(self) -> list[Step]:
        equal = "tensors left as they were are the source's bytes"
        numbers = "quantized weights against the source, element by element"
        values = "dequantized weights against the source"
        if self.source is None or self.theirs is None:
            return [Step(what, skipped=NO_SOURCE) for what in (equal, numbers, values)]
        problems: dict[str, list[Problem]] = {equal: [], numbers: [], values: []}
        counts = dict.fromkeys(problems, 0)
        with hands(self.device) as each:
            for weight, other in self._pairs():
                self._tell(weight.name, weight.nbytes)
                if weight.scheme is not None:
                    what = numbers
                elif other.scheme is None and not self._was_rounded(weight):
                    what = equal
                else:
                    what = values
                counts[what] += 1
                if what == equal:
                    found = compare.same_bytes(self.target, weight, self.source, other)
                    problems[what] += [found] if found is not None else []
                    self.untouched += found is None
                else:
                    problems[what] += self._compare(weight, other, self.source, each)
        problems[numbers] += self.largest.problems(self.ours.weights, self.made.rounded)
        return [
            Step(equal, counts[equal], tuple(problems[equal])),
            Step(
                numbers,
                counts[numbers],
                tuple(problems[numbers]),
                note=nearness.told(self.widenings, self.again),
            ),
            Step(
                values,
                counts[values],
                tuple(problems[values]),
                skipped="" if counts[values] else "there are none",
                note=structure.told_of(self.restored),
            ),
        ]

    def _pairs(self) -> list[tuple[SourceWeight, SourceWeight]]:
        """Return the tensors that both hold and that can be compared: same shape, and same dtype
        where they were left alone."""
        if self.theirs is None:
            return []
        pairs = []
        for name, weight in self.looked.weights.items():
            other = self.theirs.weights.get(name)
            if other is None or other.shape != weight.shape:
                continue
            alone = weight.scheme is None and other.scheme is None
            if alone and weight.dtype != other.dtype and name not in self.restored:
                continue
            pairs.append((weight, other))
        return pairs

    def _was_rounded(self, weight: SourceWeight) -> bool:
        """Does this weight hold numbers that stood in codes, which the source does not have?"""
        told = weight.name in self.made.rounded or weight.name in self.restored
        return weight.scheme is None and told

    def _compare(
        self, weight: SourceWeight, other: SourceWeight, source: Checkpoint, each: Map
    ) -> list[Problem]:
        ours = Rows(self.target, weight, self.device, tested=True)
        theirs = Rows(source, other, self.device, tested=False)
        try:
            if weight.scheme is not None:
                widening = self.widening or nearness.widening(
                    ours, other.dtype, self.manifest, self.ours.container.name
                )
                self.widenings[widening] += 1
                rule = again.rule_of(weight, other, self.manifest)
                rows = again.rows_of(weight.scheme, rule, self.manifest)
                found = compare.quantized(ours, theirs, widening, each, compare.Rule(rule, rows))
                self.again += found.again
                self.largest.add(weight, rule, found.largest)
                row, problems = found.row, found.problems
                seen = self.spreads.get(row.scheme, Spread())
                self.spreads[row.scheme] = seen.plus(found.spread)
            else:
                fake, rounded = weight.name in self.made.rounded, self._was_rounded(weight)
                row, problems = compare.unquantized(ours, theirs, fake=fake, rounded=rounded)
        except UnreadableError as error:
            return [Problem("unreadable", weight.name, str(error), weight.file)]
        self.rows[weight.name] = row
        return problems

    def _verification(self) -> Verification:
        summary = Summary(
            tensors=len(self.ours.weights),
            bytes_before=structure.size_of(self.source) if self.source is not None else None,
            bytes_after=structure.size_of(self.target),
            bits_per_weight=_bits(self.ours),
            schemes=structure.schemes(self.ours),
        )
        # Of the weights' own schemes: some of those that are read are in no list.
        schemes = {w.scheme for w in self.ours.weights.values() if w.scheme is not None}
        elements = {scheme.name: scheme.element for scheme in schemes}
        said = None
        if self.manifest is not None:
            said = {
                "version": self.manifest.version,
                "plan": self.manifest.plan_digest,
                "recipe": dict(self.manifest.recipe),
                "source": self.manifest.source,
                "files": {name: proof.digest for name, proof in self.manifest.files.items()},
            }
        return Verification(
            target=str(self.target.path),
            source=str(self.source.path) if self.source is not None else None,
            container=self.ours.container.name,
            problems=tuple(problem for step in self.steps for problem in step.problems),
            checks=tuple(step.check for step in self.steps),
            weights=tuple(self.rows[name] for name in sorted(self.rows)),
            kept=kept(self.ours, self.made),
            untouched=self.untouched,
            sample=document(self.demands.sample, self.looked),
            summary=summary,
            manifest=said,
            environment=environment(self.device),
            errors={
                name: Histogram(half_gap(elements[name]), spread.counts)
                for name, spread in sorted(self.spreads.items())
            },
        )


def _unmeasured(weight: SourceWeight) -> WeightRow:
    scheme = weight.scheme.name if weight.scheme is not None else ""
    return WeightRow(weight.name, scheme, "quantized", weight.shape, None, weight.nbytes)


def _bits(ours: Source) -> float | None:
    """Return the bits that an element of the quantized weights takes, scales counted."""
    weights = [weight for weight in ours.weights.values() if weight.scheme is not None]
    elements = sum(weight.numel for weight in weights)
    return 8 * sum(weight.nbytes for weight in weights) / elements if elements else None
