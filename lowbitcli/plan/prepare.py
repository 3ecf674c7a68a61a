"""From what a user asks for to a plan: open the source, find the recipe and the container, name
the output."""

import gc
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from lowbitcli import recipe as recipes
from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.containers import Container, container
from lowbitcli.containers.comfyui import COMFYUI
from lowbitcli.containers.compressed_tensors import COMPRESSED_TENSORS
from lowbitcli.containers.families import family_of
from lowbitcli.containers.lowbit import LOWBIT
from lowbitcli.errors import UsageError
from lowbitcli.plan.amaxes import Amaxes
from lowbitcli.plan.build import build, build_dequantize
from lowbitcli.plan.choose import Conditions
from lowbitcli.plan.components import build_pipeline, dequantize_pipeline
from lowbitcli.plan.importance import Importance
from lowbitcli.plan.loads import loads
from lowbitcli.plan.nibbles import nibbles_of, nibbles_told
from lowbitcli.plan.notes import notes_on
from lowbitcli.plan.nouns import PathLike, Plan
from lowbitcli.recipe import Recipe
from lowbitcli.recipe.fuse import refuse_dead
from lowbitcli.tensors import safe

DEFAULT_SCHEME = "nvfp4"
DTYPE_NAMES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32", "bfloat16": "BF16"}
DTYPE_NAMES |= {"float16": "F16", "float32": "F32"}


@dataclass(frozen=True)
class Request:
    """What a user asks of a quantization; the defaults are those of `lowbit quantize SRC`."""

    scheme: str | None = None
    recipe: PathLike | None = None
    container: str = "auto"
    strict: bool = False
    nonfinite: str | None = None
    allow_split_groups: bool = False
    fake: bool = False
    pad: bool = False
    nibbles: str = ""
    raw_fp8: bool = False
    max_shard_size: int | None = None
    importance: PathLike | None = None
    activation_scales: PathLike | None = None


def recipe_of(request: Request) -> Recipe:
    """Return the recipe that is asked for, by name, by file, or the one of a scheme.

    Raises:
        UsageError: both a scheme and a recipe are asked for, or no such scheme.
        RecipeError: the recipe is wrong.
    """
    if request.recipe is not None and request.scheme is not None:
        raise UsageError("--scheme and --recipe exclude each other", hint="leave one out")
    if request.recipe is not None:
        return recipes.load(os.fspath(request.recipe))
    return recipes.for_scheme(request.scheme or DEFAULT_SCHEME)


def container_of(name: str, checkpoint: Checkpoint) -> Container:
    """Return the container of that name; `auto` is compressed-tensors for a model directory of the
    Hugging Face kind, ComfyUI's for a lone file of a diffusion model, and the self-describing one
    otherwise.

    Raises:
        UsageError: no container is called so.
    """
    if name != "auto":
        return container(name)
    config = checkpoint.config or {}
    if "model_type" in config or "architectures" in config:
        return COMPRESSED_TENSORS
    if not checkpoint.is_directory and family_of(checkpoint.tensors):
        return COMFYUI
    return LOWBIT


def _why(chosen: Container) -> str:
    """Return why `auto` is this container."""
    named = "config.json names a model"
    return named if chosen is COMPRESSED_TENSORS else f"no {named}"


@contextmanager
def _uncollected() -> Iterator[None]:
    """Hold off the collector of cycles: a plan makes millions of objects and no cycle, and looking
    at all of them again and again takes a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():
            gc.freeze()  # by way of the permanent generation, into the oldest one, unlooked at
            gc.unfreeze()
        if enabled:
            gc.enable()


@contextmanager
def quantization(
    source: PathLike,
    output: PathLike | None,
    request: Request,
    non_finite: frozenset[str] = frozenset(),
) -> Iterator[tuple[Plan, Checkpoint, Recipe]]:
    """Plan a quantization and hold its source open; `non_finite` names weights to be kept."""
    recipe = recipe_of(request)
    fake = request.fake or recipe.fake
    if fake and request.container not in ("auto", LOWBIT.name):
        raise UsageError(
            "--fake writes the weights' own dtype, with the numbers of lowbit's container",
            hint=f"leave out --container {safe(request.container)}",
        )
    with ExitStack() as held:
        with _uncollected():
            checkpoint = held.enter_context(Checkpoint.open(source, strict=request.strict))
            asked = request.container if request.container != "auto" else recipe.container
            if asked == "auto" and {one.name for one in recipe.consumer} == {COMFYUI.name}:
                asked = COMFYUI.name

            importance = None
            if request.importance is not None:
                if checkpoint.components:
                    raise UsageError("--importance is for models of tokens, and this is a pipeline")
                importance = Importance.open(request.importance)
            amaxes = None
            if request.activation_scales is not None:
                if checkpoint.components:
                    raise UsageError(
                        "--activation-scales is for one model, and this is a pipeline",
                        hint="quantize the directory of a component",
                    )
                amaxes = Amaxes.open(request.activation_scales)

            def conditions_of(of: Checkpoint) -> Conditions:
                return Conditions(
                    container=container_of(asked, of),
                    strict=request.strict,
                    split_groups=request.allow_split_groups,
                    non_finite=non_finite,
                    fake=fake,
                    pad=request.pad,
                    nibbles=nibbles_of(request.nibbles),
                    raw_fp8=request.raw_fp8,
                    importance=importance,
                    amaxes=amaxes,
                )

            size = request.max_shard_size
            if checkpoint.components:
                plan = build_pipeline(checkpoint, recipe, conditions_of, size)
            else:
                conditions = conditions_of(checkpoint)
                plan = build(checkpoint, recipe, conditions, size)
                if asked == "auto" and plan.container == conditions.container.name:
                    plan = replace(plan, chosen=_why(conditions.container))
                told = (*notes_on(plan, recipe), *loads(plan, checkpoint, recipe))
                plan = replace(plan, notes=(*plan.notes, *told))
        if recipe.fuse:
            names = {*checkpoint.tensors, *(weight.name for weight in plan.weights)}
            if checkpoint.components:
                names = {name.partition("/")[2] for name in names}
            refuse_dead(names, recipe.fuse)
        suffix = f"{recipe.name}-fake" if fake else recipe.name
        plan = _with_nibbles(plan, request.nibbles)
        yield _aimed(plan, checkpoint, output, suffix), checkpoint, recipe


@contextmanager
def dequantization(
    source: PathLike,
    output: PathLike | None,
    dtype: str,
    *,
    strict: bool = False,
    raw_fp8: bool = False,
    nibbles: str = "",
    max_shard_size: int | None = None,
) -> Iterator[tuple[Plan, Checkpoint]]:
    """Plan a dequantization to `dtype` (bf16, fp16, fp32) and hold its source open.

    Raises:
        UsageError: no such dtype.
    """
    if dtype.lower() not in DTYPE_NAMES:
        raise UsageError(f"no dtype {safe(dtype)!r} to dequantize to", hint="bf16, fp16 or fp32")
    with ExitStack() as held:
        with _uncollected():
            checkpoint = held.enter_context(Checkpoint.open(source, strict=strict))
            make = dequantize_pipeline if checkpoint.components else build_dequantize
            plan = make(
                checkpoint,
                DTYPE_NAMES[dtype.lower()],
                raw_fp8=raw_fp8,
                nibbles=nibbles_of(nibbles),
                max_shard_size=max_shard_size,
            )
            plan = _with_nibbles(plan, nibbles)
        yield _aimed(plan, checkpoint, output, dtype.lower()), checkpoint


def plan_quantize(source: PathLike, output: PathLike | None, request: Request) -> Plan:
    """Plan a quantization and let go of the source: what `lowbit plan` shows."""
    with quantization(source, output, request) as (plan, _, _):
        return plan


def _with_nibbles(plan: Plan, said: str) -> Plan:
    told = nibbles_told(((weight.source, weight.reads) for weight in plan.weights), said)
    return replace(plan, notes=(*plan.notes, *told))


def _aimed(plan: Plan, checkpoint: Checkpoint, output: PathLike | None, suffix: str) -> Plan:
    if output and plan.directory and os.fspath(output).endswith(".safetensors"):
        raise UsageError(
            f"{safe(os.fspath(output))}: the output of a directory is a directory, not a file",
            hint="name a folder, or give a single safetensors file as the source",
        )
    return replace(plan, output=Path(output) if output else beside(checkpoint, suffix))


def beside(checkpoint: Checkpoint, suffix: str) -> Path:
    """Return where the output goes when nobody says: beside the source, with `-suffix` in its
    name."""
    path = checkpoint.path
    if checkpoint.is_directory:
        path = Path(os.path.abspath(path))  # so that `.` has a name
        return path.with_name(f"{path.name}-{suffix}")
    return path.with_name(f"{path.name.removesuffix('.safetensors')}-{suffix}.safetensors")
