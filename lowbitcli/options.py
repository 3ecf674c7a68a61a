"""Every argument and option of the command line, with its environment variable.

docs/cli.md lists them; a test holds that table against the program.
"""

import importlib
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer


class NonFinite(str, Enum):
    """What to do with a weight that holds NaN or Inf."""

    error = "error"
    keep = "keep"


class Nibble(str, Enum):
    """Which four bits of a byte hold the even column."""

    low = "low"
    high = "high"


class Dtype(str, Enum):
    """What to dequantize to."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


def _names(room: str, table: str) -> Callable[[str], list[str]]:
    """Return a completion function with the names of the values listed in a package."""

    def complete(incomplete: str) -> list[str]:
        values = getattr(importlib.import_module(f"lowbitcli.{room}"), table)
        return [value.name for value in values if value.name.startswith(incomplete)]

    return complete


def _option(flags: str, variable: str, help_text: str, **more: Any) -> Any:
    """Return an option with its environment variable, which docs/cli.md lists."""
    envvar = f"LOWBIT_{variable}" if variable else None
    # What cannot be read is no wrong command line, and whoever reads it says so.
    more = {"show_default": False, "readable": False, **more}
    return typer.Option(*flags.split(), envvar=envvar, help=help_text, **more)


# Not a Path, which would make one slash of the two of an address, which is then not known as one.
Source = Annotated[str, typer.Argument(metavar="SRC", help="a .safetensors file or a directory")]
Output = Annotated[Path | None, _option("--output -o", "", "file or directory to write")]
SchemeName = Annotated[
    str | None,
    _option(
        "--scheme",
        "SCHEME",
        "scheme for all weights that are not kept by default [nvfp4]",
        autocompletion=_names("schemes", "SCHEMES"),
    ),
]
RecipeName = Annotated[
    str | None, _option("--recipe", "RECIPE", "a recipe: its name or a YAML file")
]
ContainerName = Annotated[
    str,
    _option(
        "--container",
        "CONTAINER",
        "how to store it: auto, or a container by name [auto]",
        autocompletion=_names("containers", "CONTAINERS"),
    ),
]
Device = Annotated[str, _option("--device", "DEVICE", "auto, cpu, cuda or cuda:N [auto]")]
Strict = Annotated[
    bool, _option("--strict", "STRICT", "refuse what would be kept or passed over with a note")
]
RawFp8 = Annotated[
    bool, _option("--raw-fp8", "RAW_FP8", "take FP8 tensors without a scale for numbers: scale 1")
]
Nonfinite = Annotated[
    NonFinite | None,
    _option("--nonfinite", "NONFINITE", "a weight with NaN or Inf: stop, or keep it as it is"),
]
SplitGroups = Annotated[
    bool,
    _option(
        "--allow-split-groups",
        "ALLOW_SPLIT_GROUPS",
        "let the weights that a runtime fuses (q/k/v, gate/up) have different schemes",
    ),
]
Fake = Annotated[
    bool,
    _option(
        "--fake",
        "FAKE",
        "store what the quantized weights decode to, unquantized; in no container",
    ),
]
Nibbles = Annotated[
    Nibble | None,
    _option(
        "--nibbles",
        "NIBBLES",
        "where the source's NVFP4 has the even column: low or high [as its container has it]",
    ),
]
Pad = Annotated[
    bool,
    _option(
        "--pad",
        "PAD",
        "fill an incomplete last block with zeros, where the container's readers know it",
    ),
]
Importance = Annotated[
    Path | None,
    _option(
        "--importance",
        "IMPORTANCE",
        "weigh the errors of columns where scales are searched, by a file of lowbit importance",
        metavar="FILE",
    ),
]
ActivationScales = Annotated[
    Path | None,
    _option(
        "--activation-scales",
        "ACTIVATION_SCALES",
        "store scales of activations: a file of amax by module, .safetensors or .json",
        metavar="FILE",
    ),
]
Tokens = Annotated[int, _option("--tokens", "TOKENS", "tokens that the model is shown [512]")]
Seed = Annotated[int, _option("--seed", "SEED", "which random tokens these are [0]")]
Text = Annotated[
    Path | None,
    _option("--text", "", "take the tokens of a text instead of random ones", metavar="FILE"),
]
Force = Annotated[bool, _option("--force", "FORCE", "replace an output that exists")]
MaxMemory = Annotated[
    str | None,
    _option(
        "--max-memory",
        "MAX_MEMORY",
        "memory that the whole program may take, at least 1GiB [2GiB]",
        metavar="SIZE",
    ),
]
GPU_MEMORY = "--max-gpu-memory 4GiB"  # how it is written
MaxGpuMemory = Annotated[
    str | None,
    _option(
        "--max-gpu-memory",
        "MAX_GPU_MEMORY",
        "memory of the GPU that may be reserved, at least 256MiB [what it needs]",
        metavar="SIZE",
    ),
]
MaxShardSize = Annotated[
    str | None,
    _option(
        "--max-shard-size",
        "MAX_SHARD_SIZE",
        "cut the output's shards anew, each of at most this size, such as 5GB",
        metavar="SIZE",
    ),
]
Resume = Annotated[
    bool,
    _option(
        "--resume/--no-resume",
        "RESUME",
        "go on with what an interrupted run of the same plan left [--resume]",
    ),
]
Readback = Annotated[
    bool,
    _option(
        "--readback/--no-readback",
        "READBACK",
        "read and hash what was written before it gets its name [--readback]",
    ),
]
Devices = Annotated[
    str | None,
    _option(
        "--devices",
        "DEVICES",
        "a process for each device: cuda:0,cuda:1, or all; each may take --max-memory",
        metavar="LIST",
    ),
]
Cluster = Annotated[
    str | None,
    _option(
        "--cluster",
        "CLUSTER",
        "let Ray do the work: local, auto or ray://HOST:PORT",
        metavar="ADDRESS",
    ),
]
ShardIndex = Annotated[
    int | None,
    _option(
        "--shard-index",
        "SHARD_INDEX",
        "which share of the work this run does, from 0 [what the launcher says]",
        metavar="I",
    ),
]
NumShards = Annotated[
    str | None,
    _option(
        "--num-shards",
        "NUM_SHARDS",
        "do one of N shares of the work, as other machines do the others; auto: N as the launcher "
        "says",
        metavar="N",
    ),
]
Timings = Annotated[bool, _option("--timings", "TIMINGS", "say where the time went, by stage")]
DryRun = Annotated[bool, _option("--dry-run", "DRY_RUN", "plan only: read headers, write nothing")]
Json = Annotated[bool, _option("--json", "JSON", "print one JSON document to stdout")]
Quiet = Annotated[bool, _option("--quiet -q", "QUIET", "no progress, no notes and no summary")]
Verbose = Annotated[bool, _option("--verbose -v", "VERBOSE", "list every tensor")]


DtypeName = Annotated[Dtype, _option("--dtype", "DTYPE", "what to write [bf16]")]
Shared = Annotated[Path, typer.Argument(metavar="OUT", help="what the shares are shares of")]
Checked = Annotated[
    Path, typer.Argument(metavar="DST", help="the checkpoint to check", readable=False)
]
Against = Annotated[Path | None, _option("--against", "", "the source that it was made from")]
Report = Annotated[
    str | None,
    _option(
        "--report",
        "REPORT",
        "write a report, .html, .md or .json [DST.report.html where no FILE is named]",
        metavar="[FILE]",
    ),
]
FailUnder = Annotated[
    str | None,
    _option(
        "--fail-under",
        "FAIL_UNDER",
        "the SQNR that every weight must reach, such as 20dB",
        metavar="DB",
    ),
]
MaxRelError = Annotated[
    float | None,
    _option(
        "--max-rel-error",
        "MAX_REL_ERROR",
        "the relative error that every weight may have, such as 0.1",
        metavar="E",
    ),
]
SampleSize = Annotated[
    str | None,
    _option(
        "--sample",
        "SAMPLE",
        "look at a share of the tensors of each kind, such as 5%, or 5%:7 with a seed",
        metavar="SHARE",
    ),
]
Fix = Annotated[
    bool,
    _option("--fix", "FIX", "write to -o what can be put right, say what was changed, check it"),
]
For = Annotated[
    list[str] | None,
    _option(
        "--for",
        "FOR",
        "who is to load it: vllm, sglang, tensorrt-llm, transformers, comfyui; several with commas",
        metavar="NAME",
    ),
]
Bits = Annotated[
    float | None,
    _option(
        "--bits",
        "BITS",
        "bits for each weight that can be quantized, scales counted, such as 4.6",
        metavar="B",
    ),
]
TotalSize = Annotated[
    str | None,
    _option(
        "--size",
        "SIZE",
        "bytes of all safetensors files of the output, such as 3.2GB",
        metavar="SIZE",
    ),
]
Schemes = Annotated[
    str | None,
    _option(
        "--schemes",
        "SCHEMES",
        "what to choose from, nvfp4:mse with a scale rule [nvfp4,mxfp8,fp8,keep]",
        metavar="LIST",
    ),
]
FloorDb = Annotated[
    float | None,
    _option("--floor-db", "FLOOR_DB", "the SQNR that every weight must reach, in dB", metavar="DB"),
]
NewRecipe = Annotated[
    Path | None, _option("--output -o", "", "recipe to write [standard output]", metavar="FILE")
]
CurveReport = Annotated[
    str | None,
    _option(
        "--report",
        "REPORT",
        "write the curve, .html, .md or .json [FILE.report.html where no FILE is named]",
        metavar="[FILE]",
    ),
]
ReportA = Annotated[Path, typer.Argument(metavar="A", help="a JSON report of verify")]
ReportB = Annotated[Path, typer.Argument(metavar="B", help="another")]
Page = Annotated[Path | None, _option("--output -o", "", "write it as a page: .html, .md or .json")]
RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="its name, or a YAML file")]
