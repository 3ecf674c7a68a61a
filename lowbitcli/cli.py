"""The commands: each parses, calls one function and prints what it returned.

Commands import what they need when they run, so that `lowbit --help` starts at once and `inspect`
and `plan` never load a tensor library. Each returns its exit code.
"""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from lowbitcli import options as opt
from lowbitcli import program
from lowbitcli.cli_recipe import recipe_app
from lowbitcli.errors import CheckpointError, UsageError
from lowbitcli.program import (
    EXIT_CODES,
    beside,
    byte_count,
    command,
    decibels,
    help_unless_invoked,
    one_of,
)

SHARD_SIZE = "--max-shard-size 5GB"

app = typer.Typer(
    name="lowbit",
    help="Turn safetensors checkpoints into low-bit ones, back again, and say what was lost.",
    epilog=EXIT_CODES,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.add_typer(recipe_app, name="recipe")
report_app = typer.Typer(
    help="Compare reports of verify.",
    epilog=EXIT_CODES,
    rich_markup_mode=None,
)
app.add_typer(report_app, name="report")


@app.callback(invoke_without_command=True)
def lowbit(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> int:
    """Turn safetensors checkpoints into low-bit ones, back again, and say what was lost."""
    from lowbitcli import __version__, console

    if version:
        console.data([f"lowbit {__version__}"])
        raise typer.Exit
    return help_unless_invoked(context)


@report_app.callback(invoke_without_command=True)
def report_group(context: typer.Context) -> int:
    """Compare reports of verify."""
    return help_unless_invoked(context)


@command(app, "quantize")
def quantize(
    context: typer.Context,
    source: opt.Source,
    output: opt.Output = None,
    scheme: opt.SchemeName = None,
    recipe: opt.RecipeName = None,
    container: opt.ContainerName = "auto",
    device: opt.Device = "auto",
    strict: opt.Strict = False,
    nonfinite: opt.Nonfinite = None,
    allow_split_groups: opt.SplitGroups = False,
    fake: opt.Fake = False,
    pad: opt.Pad = False,
    nibbles: opt.Nibbles = None,
    raw_fp8: opt.RawFp8 = False,
    importance: opt.Importance = None,
    activation_scales: opt.ActivationScales = None,
    max_shard_size: opt.MaxShardSize = None,
    force: opt.Force = False,
    max_memory: opt.MaxMemory = None,
    max_gpu_memory: opt.MaxGpuMemory = None,
    resume: opt.Resume = True,
    readback: opt.Readback = True,
    devices: opt.Devices = None,
    cluster: opt.Cluster = None,
    shard_index: opt.ShardIndex = None,
    num_shards: opt.NumShards = None,
    timings: opt.Timings = False,
    dry_run: opt.DryRun = False,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> int:
    """Quantize a checkpoint.

    Without options: NVFP4, beside the source, in the container that the source suggests.
    Embeddings, heads, norms, routers, vision and audio towers are kept as they are, and the plan
    says so.

    \b
    Examples:
      lowbit quantize model.safetensors
      lowbit quantize Llama-3.1-8B/ --scheme FP8_DYNAMIC -o Llama-3.1-8B-fp8/
      lowbit quantize Llama-3.1-8B/ --recipe recipe.yaml --dry-run
      lowbit quantize DeepSeek-V3/ -o out/ --devices cuda:0,cuda:1,cuda:2,cuda:3
      srun lowbit quantize DeepSeek-V3/ -o out/ --num-shards auto
    """
    from lowbitcli.pipeline import early

    device, devices = program.device_or_devices(context, device, devices)
    if not dry_run and num_shards is None:
        early.begin(source, device if devices is None and cluster is None else "cpu")
    with early.importing():
        from lowbitcli.plan.prepare import Request

    scheme, recipe = one_of(context, scheme=scheme, recipe=recipe)
    request = Request(
        scheme=scheme,
        recipe=recipe,
        container=container,
        strict=strict,
        nonfinite=nonfinite.value if nonfinite else None,
        allow_split_groups=allow_split_groups,
        fake=fake,
        pad=pad,
        nibbles=nibbles.value if nibbles else "",
        raw_fp8=raw_fp8,
        importance=importance,
        activation_scales=activation_scales,
        max_shard_size=byte_count(max_shard_size, SHARD_SIZE),
    )
    if dry_run:
        return _plan(source, output, request, as_json=as_json, quiet=quiet, verbose=verbose)
    memory, gpu_memory = byte_count(max_memory), byte_count(max_gpu_memory, opt.GPU_MEMORY)
    with early.importing():
        from lowbitcli import api
        from lowbitcli.progress import show_progress

    with show_progress("quantizing", quiet=quiet) as progress:
        outcome = api.quantize(
            source,
            output,
            request,
            device=device,
            force=force,
            max_memory=memory,
            max_gpu_memory=gpu_memory,
            resume=resume,
            readback=readback,
            spread=api.Spread(devices, cluster, shard_index, num_shards),
            progress=progress,
        )
    return _show_outcome(outcome, as_json=as_json, quiet=quiet, verbose=verbose, timings=timings)


@command(app, "importance")
def importance(
    source: opt.Source,
    output: opt.Output = None,
    tokens: opt.Tokens = 512,
    seed: opt.Seed = 0,
    text: opt.Text = None,
    device: opt.Device = "auto",
    force: opt.Force = False,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> int:
    """Measure how much each input channel of a model counts, without data.

    Runs the model on random tokens, layer by layer, with transformers, and writes an exponent for
    each input channel. quantize --importance weighs errors with them where it searches scales.

    \b
    Examples:
      lowbit importance Llama-3.1-8B/ -o stats.safetensors
      lowbit quantize Llama-3.1-8B/ --recipe nvfp4-best --importance stats.safetensors
    """
    from lowbitcli import api, console
    from lowbitcli.progress import show_progress

    if output is None:
        raise UsageError("importance writes a file", hint="name it: -o stats.safetensors")
    with show_progress("measuring", quiet=quiet) as progress:
        measured = api.importance(
            source,
            output,
            tokens=tokens,
            seed=seed,
            text=text,
            device=device,
            force=force,
            progress=progress,
        )
    if not quiet:
        console.notes(measured.notes)
    if as_json:
        console.document(measured.document())
    elif not quiet:
        console.data(measured.lines())
    return 0


@command(app, "dequantize")
def dequantize(
    context: typer.Context,
    source: opt.Source,
    output: opt.Output = None,
    dtype: opt.DtypeName = opt.Dtype.bf16,
    device: opt.Device = "auto",
    strict: opt.Strict = False,
    raw_fp8: opt.RawFp8 = False,
    nibbles: opt.Nibbles = None,
    max_shard_size: opt.MaxShardSize = None,
    force: opt.Force = False,
    max_memory: opt.MaxMemory = None,
    max_gpu_memory: opt.MaxGpuMemory = None,
    resume: opt.Resume = True,
    readback: opt.Readback = True,
    devices: opt.Devices = None,
    cluster: opt.Cluster = None,
    shard_index: opt.ShardIndex = None,
    num_shards: opt.NumShards = None,
    timings: opt.Timings = False,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> int:
    """Turn quantized weights back into floats.

    \b
    Examples:
      lowbit dequantize Llama-3.1-8B-fp8/ -o Llama-3.1-8B-bf16/
      lowbit dequantize model-nvfp4.safetensors --dtype fp32
    """
    from lowbitcli.pipeline import early

    device, devices = program.device_or_devices(context, device, devices)
    if num_shards is None:
        early.begin(source, device if devices is None and cluster is None else "cpu")
    memory, gpu_memory = byte_count(max_memory), byte_count(max_gpu_memory, opt.GPU_MEMORY)
    shard_size = byte_count(max_shard_size, SHARD_SIZE)
    with early.importing():
        from lowbitcli import api
        from lowbitcli.progress import show_progress

    with show_progress("dequantizing", quiet=quiet) as progress:
        outcome = api.dequantize(
            source,
            output,
            dtype=dtype.value,
            device=device,
            strict=strict,
            raw_fp8=raw_fp8,
            nibbles=nibbles.value if nibbles else "",
            max_shard_size=shard_size,
            force=force,
            max_memory=memory,
            max_gpu_memory=gpu_memory,
            resume=resume,
            readback=readback,
            spread=api.Spread(devices, cluster, shard_index, num_shards),
            progress=progress,
        )
    return _show_outcome(outcome, as_json=as_json, quiet=quiet, verbose=verbose, timings=timings)


@command(app, "finish")
def finish(
    output: opt.Shared,
    force: opt.Force = False,
    max_memory: opt.MaxMemory = None,
    readback: opt.Readback = True,
    timings: opt.Timings = False,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> int:
    """Publish an output that was written in shares.

    The last share to end does this by itself. Where it could not: checks that every share is
    proved, reads everything back, writes index, config and manifest, and gives it its name.

    \b
    Examples:
      lowbit finish DeepSeek-V3-nvfp4/
    """
    from lowbitcli import api, console
    from lowbitcli.progress import show_progress

    if api.is_finished(output):
        if as_json:
            console.document({"output": str(output), "already_complete": True})
        elif not quiet:
            console.data([f"{output}: already complete"])
        return 0
    with show_progress("finishing", quiet=quiet) as progress:
        outcome = api.finish(
            output,
            force=force,
            max_memory=byte_count(max_memory),
            readback=readback,
            progress=progress,
        )
    return _show_outcome(outcome, as_json=as_json, quiet=quiet, verbose=verbose, timings=timings)


def _show_outcome(outcome: Any, *, as_json: bool, quiet: bool, verbose: bool, timings: bool) -> int:
    from lowbitcli import console, tables

    if not quiet:
        console.notes(outcome.notes)
    if as_json:
        console.document(tables.outcome_document(outcome))
    elif not quiet:
        console.data(tables.outcome_lines(outcome, everything=verbose))
    if timings and not as_json:
        console.data(["", *tables.timing_lines(outcome)])
    return 0


@command(app, "verify")
def verify(
    output: opt.Checked,
    against: opt.Against = None,
    device: opt.Device = "auto",
    report: opt.Report = None,
    fail_under: opt.FailUnder = None,
    max_rel_error: opt.MaxRelError = None,
    recipe: opt.RecipeName = None,
    consumers: opt.For = None,
    sample: opt.SampleSize = None,
    fix: opt.Fix = False,
    new: opt.Output = None,
    force: opt.Force = False,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> int:
    """Check a checkpoint, and say what was lost.

    Its files and headers first, then, against its source, its numbers. Exits with 1 where
    something is wrong, and names the tensor.

    \b
    Examples:
      lowbit verify Llama-3.1-8B-nvfp4/
      lowbit verify Llama-3.1-8B-nvfp4/ --against Llama-3.1-8B/ --report
      lowbit verify Llama-3.1-8B-fp8/ --against Llama-3.1-8B/ --fail-under 30dB
      lowbit verify Llama-3.1-8B-nvfp4/ --for vllm --for sglang
      lowbit verify Llama-3.1-8B-nvfp4/ --fix -o Llama-3.1-8B-fixed/ --for vllm
    """
    from lowbitcli import api, console, tables
    from lowbitcli.progress import show_progress

    if fix != (new is not None):
        raise UsageError("--fix writes a new checkpoint", hint="name it: --fix -o NEW")
    where = None if report is None else Path(report) if report else beside(new or output)
    with show_progress("verifying", quiet=quiet) as progress:
        found = api.verify(
            output,
            against=against,
            device=device,
            fail_under_db=decibels(fail_under),
            max_rel_error=max_rel_error,
            recipe=recipe,
            consumers=consumers or (),
            sample=sample,
            report=where,
            fix=new,
            force=force,
            progress=progress,
        )
    if fix and not found.fixed and not quiet:
        console.notes(["nothing was found that --fix puts right: nothing was written"])
    if as_json:
        console.document(found.to_dict())
    elif not quiet or found.exit_code:
        console.data(tables.verification_lines(found, everything=verbose))
    if where is not None and not (as_json or quiet):
        console.data([f"report: {where}"])
    return found.exit_code


@command(report_app, "diff")
def report_diff(
    a: opt.ReportA,
    b: opt.ReportB,
    output: opt.Page = None,
    as_json: opt.Json = False,
    verbose: opt.Verbose = False,
) -> int:
    """Set two JSON reports of verify side by side.

    Verdicts, sizes, errors, the tensors that changed most, and problems that only one of them has.

    \b
    Examples:
      lowbit report diff nvfp4.json mxfp8.json
      lowbit report diff before.json after.json -o diff.html
    """
    from lowbitcli import console, report, tables
    from lowbitcli.report import sides

    if output is not None:
        report.check_path(output, (a, b))
    found = report.diff(report.read(a), report.read(b), (str(a), str(b)))
    if output is not None:
        report.write_diff(found, output)
    if as_json:
        console.document(sides.document(found))
    else:
        for rows, right in sides.tables(found, None if verbose else tables.SHOWN):
            console.data([*tables.columns(rows, right), ""])
        console.data([sides.summary(found)])
        console.data([] if output is None else [f"report: {output}"])
    return 0


@command(app, "inspect")
def inspect(
    source: opt.Source,
    nibbles: opt.Nibbles = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> int:
    """Show tensors, schemes and sizes.

    Reads headers only. Exits with 4 where tensors and what is declared of them disagree.

    \b
    Examples:
      lowbit inspect model.safetensors
      lowbit inspect Llama-3.1-8B-fp8/ --json
    """
    from lowbitcli import console, tables_inspection
    from lowbitcli.plan.inspection import inspect as look

    found = look(source, nibbles=nibbles.value if nibbles else "")
    if not quiet:
        console.notes(found.notes)
    if as_json:
        console.document(tables_inspection.inspection_document(found))
    else:
        console.data(tables_inspection.inspection_lines(found, everything=verbose))
    return CheckpointError.exit_code if found.findings else 0


@command(app, "plan")
def plan(
    context: typer.Context,
    source: opt.Source,
    output: opt.Output = None,
    scheme: opt.SchemeName = None,
    recipe: opt.RecipeName = None,
    container: opt.ContainerName = "auto",
    strict: opt.Strict = False,
    nonfinite: opt.Nonfinite = None,
    allow_split_groups: opt.SplitGroups = False,
    fake: opt.Fake = False,
    pad: opt.Pad = False,
    nibbles: opt.Nibbles = None,
    raw_fp8: opt.RawFp8 = False,
    importance: opt.Importance = None,
    activation_scales: opt.ActivationScales = None,
    max_shard_size: opt.MaxShardSize = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> int:
    """Say what quantize would do, tensor by tensor.

    Reads headers only, writes nothing.

    \b
    Examples:
      lowbit plan Llama-3.1-8B/ --scheme mxfp8
      lowbit plan Llama-3.1-8B/ --recipe recipe.yaml -v
    """
    return quantize(
        context,
        source,
        output,
        scheme=scheme,
        recipe=recipe,
        container=container,
        strict=strict,
        nonfinite=nonfinite,
        allow_split_groups=allow_split_groups,
        fake=fake,
        pad=pad,
        nibbles=nibbles,
        raw_fp8=raw_fp8,
        importance=importance,
        activation_scales=activation_scales,
        max_shard_size=max_shard_size,
        dry_run=True,
        as_json=as_json,
        quiet=quiet,
        verbose=verbose,
    )


def _plan(
    source: str, output: Path | None, request: Any, *, as_json: bool, quiet: bool, verbose: bool
) -> int:
    """Plan and show it."""
    from lowbitcli import console, tables
    from lowbitcli.plan.prepare import plan_quantize

    planned = plan_quantize(source, output, request)
    if not quiet:
        console.notes(planned.notes)
    if as_json:
        console.document(tables.plan_document(planned))
    else:
        console.data(tables.plan_lines(planned, everything=verbose))
    return 0


@command(app, "doctor")
def doctor(as_json: opt.Json = False) -> int:
    """Say what would run on this machine."""
    from lowbitcli import console
    from lowbitcli import doctor as examination

    found = examination.examine()
    if as_json:
        console.document(found)
    else:
        console.data(examination.lines(found))
    return 0


def main() -> None:
    """The program `lowbit`."""
    sys.exit(program.run(app, sys.argv[1:]))
