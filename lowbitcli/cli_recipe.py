"""The commands of `lowbit recipe`: each parses, calls one function, prints, as those of `cli`."""

from pathlib import Path
from typing import Annotated

import typer

from lowbitcli import options as opt
from lowbitcli.program import EXIT_CODES, beside, byte_count, command, finite, help_unless_invoked

recipe_app = typer.Typer(
    help="List, show, check and start recipes.",
    epilog=EXIT_CODES,
    rich_markup_mode=None,
)


@recipe_app.callback(invoke_without_command=True)
def recipe_group(context: typer.Context) -> int:
    """List, show, check and start recipes."""
    return help_unless_invoked(context)


@command(recipe_app, "list")
def recipe_list(as_json: opt.Json = False) -> int:
    """List the recipes that ship with lowbit."""
    from lowbitcli import console, recipe, tables

    shipped = recipe.names()
    if as_json:
        console.document([{"name": one.name, "description": one.description} for one in shipped])
    else:
        console.data(tables.columns([(one.name, one.description) for one in shipped]))
    return 0


@command(recipe_app, "show")
def recipe_show(name: opt.RecipeArgument, as_json: opt.Json = False) -> int:
    """Show a recipe: its text, or as --json what it means."""
    from lowbitcli import console, recipe
    from lowbitcli.recipe import shelf

    found = recipe.load(name)
    if as_json:
        console.document(found.model_dump(mode="json"))
    else:
        path = shelf.recipes().get(name, Path(name))
        console.data(path.read_text().splitlines())
    return 0


@command(recipe_app, "check")
def recipe_check(
    name: opt.RecipeArgument,
    source: Annotated[
        Path | None, typer.Argument(metavar="[SRC]", help="a checkpoint that it is for")
    ] = None,
    verbose: opt.Verbose = False,
) -> int:
    """Check a recipe, and whether its patterns find their tensors in a checkpoint."""
    from lowbitcli import console, recipe, tables
    from lowbitcli.plan.prepare import Request, plan_quantize

    found = recipe.load(name)
    lines = [f"{name}: {len(found.rules)} rule(s), good"]
    if source is not None:
        plan = plan_quantize(source, None, Request(recipe=name))
        lines.append(f"{source}: {len(plan.quantized)} of {len(plan.weights)} tensors quantized")
        lines += ["", *tables.recipe_lines(found, plan, everything=verbose)]
    console.data(lines)
    return 0


@command(recipe_app, "init")
def recipe_init(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="file to write [standard output]")
    ] = None,
) -> int:
    """Start a recipe: a text with comments to edit."""
    from lowbitcli import console, recipe
    from lowbitcli.search.write import write

    text = recipe.init()
    if file is None:
        console.data(text.splitlines())
    else:
        write(text, file)
    return 0


@command(recipe_app, "auto")
def recipe_auto(
    source: opt.Source,
    bits: opt.Bits = None,
    size: opt.TotalSize = None,
    schemes: opt.Schemes = None,
    floor_db: opt.FloorDb = None,
    importance: opt.Importance = None,
    output: opt.NewRecipe = None,
    container: opt.ContainerName = "auto",
    device: opt.Device = "auto",
    max_memory: opt.MaxMemory = None,
    max_gpu_memory: opt.MaxGpuMemory = None,
    report: opt.CurveReport = None,
    force: opt.Force = False,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> int:
    """Choose a scheme for each weight: the least error that a budget allows.

    Measures the error of every scheme on every weight, in one pass, and writes a recipe. Without a
    budget it shows error against bits, and writes none.

    \b
    Examples:
      lowbit recipe auto Llama-3.1-8B/
      lowbit recipe auto Llama-3.1-8B/ --bits 4.8 -o recipe.yaml
      lowbit recipe auto Llama-3.1-8B/ --size 6GB --floor-db 25 --schemes nvfp4:mse,fp8 > r.yaml
    """
    from lowbitcli import api, console
    from lowbitcli import report as reports
    from lowbitcli.progress import show_progress
    from lowbitcli.search import told

    where = None if report is None else Path(report) if report else beside(output or Path(source))
    if where is not None:
        reports.check_path(where)
    floor_db = finite(floor_db, "--floor-db 18")
    budget = finite(bits, "--bits 4.6"), byte_count(size, "--size 3.2GB")
    wanted = api.Wanted(*budget, schemes or "", floor_db, container, importance)
    allowed = api.Allowed(
        device,
        byte_count(max_memory) or api.DEFAULT,
        byte_count(max_gpu_memory, opt.GPU_MEMORY),
    )
    with show_progress("measuring", quiet=quiet) as progress:
        found = api.choose(source, wanted, allowed, output, force=force, progress=progress)
    if not quiet:
        console.notes(found.notes)
    if where is not None:
        reports.write_curve(found, where)
    if as_json:
        console.document(told.document(found))
    elif found.chosen is not None and output is None:
        console.data(found.chosen.text.splitlines())
    elif not quiet:
        console.data(told.lines(found))
        console.data([] if output is None else [f"recipe: {output}"])
        console.data([] if where is None else [f"report: {where}"])
    return 0


@command(recipe_app, "schema")
def recipe_schema() -> int:
    """Print the JSON schema of recipes, for editors."""
    from lowbitcli import console, recipe

    console.document(recipe.schema())
    return 0
