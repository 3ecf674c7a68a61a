"""Make a plan: from a checkpoint's headers and a recipe to every read and write, on paper."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lowbitcli import __version__
from lowbitcli.checkpoint import manifest, shard_index
from lowbitcli.checkpoint.header import lay_out
from lowbitcli.checkpoint.made import Made
from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.containers import Container, torchao
from lowbitcli.containers.container import Declaration
from lowbitcli.containers.plain import PLAIN
from lowbitcli.errors import UsageError
from lowbitcli.plan.activations import activated
from lowbitcli.plan.apart import contradicted, readers_of, taken_apart
from lowbitcli.plan.choose import TRANSPOSED_MODELS, Conditions, choose
from lowbitcli.plan.digest import digest
from lowbitcli.plan.importance import weighted
from lowbitcli.plan.nouns import Choice, Constant, Job, OutputFile, Plan, Weight, made_of
from lowbitcli.plan.pad import padded
from lowbitcli.plan.shards import Placed, index_name, place
from lowbitcli.plan.source import Source, SourceWeight, examine, lying, refuse_findings
from lowbitcli.plan.split import modules_of
from lowbitcli.plan.unshared import unshared
from lowbitcli.plan.writes import writes_of
from lowbitcli.recipe import Recipe
from lowbitcli.recipe.drafts import first_draft
from lowbitcli.tensors import DATA, FLOATING, FP8, SCALE, TensorSpec, safe

# Header metadata that speaks of how a file is stored, and is not carried over to another container.
STORAGE_METADATA = ("lowbit.", "_quantization_metadata")

CACHED = ("k_scale", "v_scale")  # endings of the scales of keys and values

# Files that say how the source was quantized, and would be wrong beside the output.
QUANTIZATION_FILES = ("hf_quant_config.json",)


def build(
    checkpoint: Checkpoint,
    recipe: Recipe,
    conditions: Conditions,
    max_shard_size: int | None = None,
) -> Plan:
    """Plan a quantization; `max_shard_size` is the limit of shards that are cut anew, in bytes.

    Raises:
        CheckpointError: the source is wrong, or declares what is not read.
        RecipeError: the recipe asks for what cannot be done; see `choose`.
        UnsupportedError: a strict one would leave what its readers cannot take.
    """
    layouts = recipe.layouts
    source = examine(
        checkpoint,
        raw_fp8=conditions.raw_fp8,
        nibbles=conditions.nibbles,
        layouts=layouts.of if recipe.layout else None,
    )
    refuse_findings(source)
    if recipe.layout:
        layouts.dead(lying(source))
    container = PLAIN if conditions.fake else conditions.container
    if container.needs_config and checkpoint.config is None:
        raise UsageError(
            f"{container.name} needs a config.json, and {safe(str(checkpoint.path))} has none",
            hint="--container lowbit writes a file that describes itself",
        )
    model = str((checkpoint.config or {}).get("model_type", ""))
    conditions = replace(
        conditions,
        transposed=model in TRANSPOSED_MODELS,
        drafts=first_draft(checkpoint.config),
        non_finite=modules_of(conditions.non_finite, source.weights),
    )
    choices = choose(source.weights, recipe, conditions)
    apart = taken_apart(source, choices, recipe, container)
    weights = [
        _quantized(
            padded(weight, choice.target) if conditions.pad else weight,
            choice,
            container,
            conditions.fake,
        )
        for weight, choice in apart
    ]
    weighed: tuple[str, ...] = ()
    if conditions.importance is not None:
        weights, weighed = weighted(weights, conditions.importance, checkpoint)
    weights, scaled = activated(weights, recipe, conditions)
    told = (
        *source.notes,
        *contradicted(source, checkpoint.config),
        *readers_of((weight for weight, _ in apart), model),
        *unshared(checkpoint, weights, container.name, strict=conditions.strict),
        *weighed,
        *scaled,
    )
    source = replace(source, notes=told)
    said: dict[str, Any] = {
        "name": recipe.name,
        "digest": recipe.digest,
        "fake": conditions.fake,
        **({"layout": layouts.document()} if recipe.layout else {}),
        **({"measured": recipe.measured.document()} if recipe.measured else {}),
        **({"nibbles": conditions.nibbles} if conditions.nibbles else {}),
        **({"raw_fp8": True} if conditions.raw_fp8 else {}),
        **({"importance": conditions.importance.digest} if conditions.importance else {}),
    }
    return _assemble(checkpoint, source, weights, container, said, max_shard_size)


def build_dequantize(
    checkpoint: Checkpoint,
    dtype: str,
    *,
    raw_fp8: bool = False,
    nibbles: str = "",
    max_shard_size: int | None = None,
) -> Plan:
    """Plan a dequantization of every quantized weight to `dtype` (F32, BF16 or F16), and with
    `raw_fp8` of FP8 tensors without a scale, as if it were 1; `nibbles` is as for `examine`.

    Raises:
        CheckpointError: the source is wrong, or declares what is not read.
        UsageError: `dtype` is no dtype to dequantize to.
    """
    if dtype not in FLOATING:
        raise UsageError(f"cannot dequantize to {dtype}", hint="use bf16, fp16 or fp32")
    source = examine(checkpoint, raw_fp8=raw_fp8, nibbles=nibbles)
    refuse_findings(source)
    weights = [_dequantized(weight, dtype, raw_fp8) for weight in source.weights.values()]
    said = {"dequantize": dtype, **({"raw_fp8": True} if raw_fp8 else {})}
    said |= {"nibbles": nibbles} if nibbles else {}
    return _assemble(checkpoint, source, weights, PLAIN, said, max_shard_size)


def _quantized(weight: SourceWeight, choice: Choice, container: Container, fake: bool) -> Weight:
    target = choice.target
    if fake and target == weight.scheme:
        target = None  # it has been rounded already: what is left is to dequantize it
    fake = fake and target is not None
    scheme = None if fake else target
    dtype = "BF16" if target is not None and weight.dtype in FP8 else weight.dtype or "BF16"
    return Weight(
        weight.name,
        weight.shape,
        dtype,
        weight.scheme,
        target,
        weight.reads,
        writes_of(weight, scheme, dtype, container),
        rule=choice.rule,
        activations=choice.activations,
        input_scale=choice.input_scale,
        fake=fake,
        kept=choice.kept,
        group=choice.group if target is not None else "",
        plain=weight.plain,
    )


def _dequantized(weight: SourceWeight, dtype: str, raw_fp8: bool) -> Weight:
    computed = weight.scheme is not None or (raw_fp8 and weight.dtype in FP8)
    dtype = dtype if computed else weight.dtype
    writes = writes_of(weight, None, dtype, PLAIN)
    kept = "" if computed else "not quantized"
    return Weight(
        weight.name, weight.shape, dtype, weight.scheme, None, weight.reads, writes, kept=kept
    )


def _assemble(
    checkpoint: Checkpoint,
    source: Source,
    weights: Sequence[Weight],
    container: Container,
    recipe: Mapping[str, Any],
    max_shard_size: int | None,
) -> Plan:
    placed = place(weights, checkpoint, max_shard_size)
    weights = placed.weights
    declarations = [_declaration(weight) for weight in weights]
    declared = container.declare(declarations, checkpoint.config)
    config, sidecars = _config(checkpoint, declared.config)
    documents = {name: _json(said) for name, said in declared.files.items()}
    specs, metadata, constants = _contents(checkpoint, placed, declarations, container)
    beside = [config or b"", *documents.values(), *(one.data for one in constants)]
    made = made_of(weights)
    beside.append(json.dumps(made.document()).encode())
    name = digest(checkpoint, recipe, specs, metadata, b"".join(beside))
    files = _files(specs, metadata, None if checkpoint.is_directory else (recipe, name, made))
    notes = [*checkpoint.notes, *source.notes, *declared.notes]
    if source.activations:
        notes.append(f"{len(source.activations)} scales of activations are not carried over")
    index = None
    sharded = len(files) > 1 or (
        max_shard_size is None and (checkpoint.index is not None or len(checkpoint.files) > 1)
    )
    if sharded and any(file.entries for file in files):
        index = shard_index.index({f.name: f.entries for f in files}, checkpoint.index)
    return Plan(
        source=checkpoint.path,
        output=None,
        directory=checkpoint.is_directory,
        container=container.name,
        source_container=source.container.name,
        recipe=recipe,
        weights=tuple(weights),
        jobs=_jobs(weights),
        files=files,
        config=config,
        index=index,
        index_name=index_name(file.name for file in files),
        sidecars=sidecars,
        notes=tuple(notes),
        digest=name,
        dropped=dict(source.activations),
        documents=documents,
        constants=constants,
        size_in=sum(header.size for header in checkpoint.headers.values()),
    )


def _config(
    checkpoint: Checkpoint, declared: Mapping[str, Any] | None
) -> tuple[bytes | None, tuple[str, ...]]:
    """Return the new config.json (None where it stays as it is) and the files that are copied."""
    sidecars = [name for name in checkpoint.sidecars if name not in QUANTIZATION_FILES]
    if declared is None or declared == checkpoint.config:
        return None, tuple(sidecars)
    return _json(declared), tuple(name for name in sidecars if name != "config.json")


def _declaration(weight: Weight) -> Declaration:
    scheme = None if weight.fake else weight.target
    rule = "" if weight.recodes else weight.rule
    return Declaration(
        weight.name,
        scheme,
        weight.shape,
        weight.dtype,
        weight.activations,
        rule,
        weight.plain,
        weight.writes[SCALE].spec.dtype if scheme is not None else "",
        bool(weight.beside) and any(spec.name.endswith(CACHED) for spec, _ in weight.beside),
    )


def _contents(
    checkpoint: Checkpoint,
    placed: Placed,
    declarations: Sequence[Declaration],
    container: Container,
) -> tuple[dict[str, list[TensorSpec]], dict[str, dict[str, str]], tuple[Constant, ...]]:
    """Return what each output file holds, what its header says besides, and what of it is known."""
    specs: dict[str, list[TensorSpec]] = {file: [] for file in placed.files}
    held: dict[str, list[Declaration]] = {file: [] for file in placed.files}
    constants: list[Constant] = []
    for weight, declaration in zip(placed.weights, declarations, strict=True):
        for part in weight.writes.values():
            specs[part.file].append(part.spec)
        file = weight.writes[DATA].file
        held[file].append(declaration)
        for spec, data in weight.beside:
            constants.append(Constant(spec, file, data))
            specs[file].append(spec)
    metadata: dict[str, dict[str, str]] = {}
    for name, sources in placed.files.items():
        declared = container.declare(held[name], None)
        carried: dict[str, str] = {}
        for file in sources:
            carried = {**_carried(checkpoint.metadata[file]), **carried}
        metadata[name] = {**carried, **declared.metadata}
        for tensor, data in sorted(declared.constants.items()):
            spec = TensorSpec(tensor, "U8", (len(data),))
            constants.append(Constant(spec, name, data))
            specs[name].append(spec)
        for tensor, shape in sorted(declared.shapes.items()):
            spec = TensorSpec(tensor, "I64", (len(shape),))
            data = b"".join(number.to_bytes(8, "little") for number in shape)
            constants.append(Constant(spec, name, data))
            specs[name].append(spec)
    for name in _without_tensors(specs):
        del specs[name], metadata[name]
    return specs, metadata, tuple(constants)


def _without_tensors(specs: Mapping[str, Sequence[TensorSpec]]) -> list[str]:
    """Return the files that nothing goes to, as no index could name them, unless that is all."""
    empty = [name for name, held in specs.items() if not held]
    return empty if len(empty) < len(specs) else []


def _files(
    specs: Mapping[str, Sequence[TensorSpec]],
    metadata: Mapping[str, Mapping[str, str]],
    proof: tuple[Mapping[str, Any], str, Made] | None,
) -> tuple[OutputFile, ...]:
    """Lay out the output files; the header of a single file also has room for its `proof`."""
    files = []
    for name, held in specs.items():
        said = dict(metadata[name])
        if proof is not None:
            recipe, plan, made = proof
            said = manifest.reserve(
                len(held), said, recipe=recipe, version=__version__, plan_digest=plan, made=made
            )
        header, entries = lay_out(held, said)
        size = max((entry.stop for entry in entries.values()), default=len(header))
        files.append(OutputFile(name, header, entries, size))
    return tuple(files)


def _carried(metadata: Mapping[str, str]) -> dict[str, str]:
    dropped = {*torchao.storage_keys(metadata)}
    return {
        k: v for k, v in metadata.items() if not k.startswith(STORAGE_METADATA) and k not in dropped
    }


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _jobs(weights: Iterable[Weight]) -> tuple[Job, ...]:
    """Group the weights that share a scale; every other weight is a job of its own."""
    shared: dict[str, list[Weight]] = {}
    jobs: list[Job] = []
    for weight in weights:
        if weight.group and not weight.recodes:
            shared.setdefault(weight.group, []).append(weight)
        else:
            jobs.append(Job((weight,)))
    jobs += [Job(tuple(members), shared=True) for members in shared.values()]
    return tuple(sorted(jobs, key=lambda job: job.weights[0].name))
