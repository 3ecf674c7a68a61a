"""`deepseek-v4`: FP8 in blocks and FP4 experts as DeepSeek-V4 is released (`quant_method: fp8`);
only read.

| scheme | `.weight` | `.scale` |
|---|---|---|
| fp8_block128 | F8_E4M3 [o, i] | F8_E8M0 or F32 [o/128, i/128] rounded up, by value |
| mxfp8 | F8_E4M3 [o, i] | F8_E8M0 [o/32, i/32] rounded up: 32 rows share it (V4.1) |
| mxfp4 | I8 [o, i/2], even column in the low four bits | F8_E8M0 [o, i/32], a byte |

Which of the first two it is `weight_block_size` says. `expert_dtype`, in config.json or its
quantization_config, is `fp4` or `fp8` and must be what the experts are stored as. Everything
multiplies. Source: vLLM 0.33 `models/deepseek_v4/quant_config.py`; transformers 5.24
`integrations/finegrained_fp8.py`. No released file was read.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from lowbitcli.containers import ct_config, suffixes
from lowbitcli.containers.container import (
    Container,
    Declaration,
    Declared,
    Examination,
    Finding,
    Listing,
    QuantizedWeight,
    Stored,
)
from lowbitcli.containers.deepseek import kept_modules
from lowbitcli.containers.grouping import weight_from
from lowbitcli.containers.layouts import IDENTITY, ROWS32
from lowbitcli.errors import UnsupportedError, UsageError
from lowbitcli.schemes import BY_NAME
from lowbitcli.tensors import DATA, FLOATING, SCALE, safe

SUFFIX = ".scale"
HALVES = ("BF16", "F16")
BINDINGS: dict[str, dict[str, Stored]] = {
    "fp8_block128": {
        DATA: Stored(".weight", "F8_E4M3", IDENTITY),
        SCALE: Stored(SUFFIX, "F32", IDENTITY, reads=("F8_E8M0", *HALVES)),
    },
    "mxfp8": {
        DATA: Stored(".weight", "F8_E4M3", IDENTITY),
        SCALE: Stored(SUFFIX, "U8", ROWS32, reads=("F8_E8M0",)),
    },
    "mxfp4": {
        DATA: Stored(".weight", "U8", IDENTITY, reads=("I8",)),
        SCALE: Stored(SUFFIX, "U8", IDENTITY, reads=("F8_E8M0",)),
    },
}
BLOCKS = (([128, 128], "fp8_block128"), ([32, 32], "mxfp8"))
CODES = ("F8_E4M3", "F8_E5M2", "I8")
EXPERTS = {"fp4": "I8", "fp8": "F8_E4M3"}


def detect(listing: Listing) -> bool:
    if ct_config.of(listing.config).get("quant_method") != "fp8":
        return False
    return any(name.endswith(SUFFIX) and _has_codes(name, listing) for name in listing.tensors)


def _has_codes(scale: str, listing: Listing) -> bool:
    """Does a scale stand beside a weight of 8 bits, or could it be nothing else than one of
    blocks?"""
    data = listing.tensors.get(scale.removesuffix(SUFFIX) + ".weight")
    return (data is not None and data.dtype in CODES) or _is_of_blocks(scale, listing)


def _is_of_blocks(scale: str, listing: Listing) -> bool:
    """Is `X.scale` one of blocks, by itself: a power of two, or a matrix of numbers that has no
    weight, or one of as many blocks? A vector may be anything, such as a norm's."""
    spec, data = listing.tensors[scale], listing.tensors.get(scale.removesuffix(SUFFIX) + ".weight")
    if spec.dtype == "F8_E8M0":
        return True
    if len(spec.shape) != 2 or spec.dtype not in FLOATING:
        return False
    return data is None or (
        len(data.shape) == 2
        and spec.shape in [tuple(-(-n // size) for n in data.shape) for (size, _), _ in BLOCKS]
    )


def examine(listing: Listing) -> Examination:
    """Return the weights that are stored with a scale beside them, and what disagrees.

    Raises:
        UnsupportedError: the config declares blocks of another size, or other codes.
    """
    said = ct_config.of(listing.config)
    linear = _of_blocks(said.get("weight_block_size"))
    kept = kept_modules(said)
    dtype = ct_config.model_dtype(listing.config)
    expert = (listing.config or {}).get("expert_dtype", said.get("expert_dtype"))
    _known("expert_dtype", expert, (None, *EXPERTS))
    _known("quantization_config.fmt", said.get("fmt"), (None, "e4m3"))
    weights: dict[str, QuantizedWeight] = {}
    findings: list[Finding] = []
    for name, spec in listing.tensors.items():
        stem = name.removesuffix(".weight")
        if not name.endswith(".weight") or spec.dtype not in CODES:
            continue
        if stem + SUFFIX not in listing.tensors and (listing.raw_fp8 and spec.dtype != "I8"):
            continue
        wrong = _contradiction(stem, spec.dtype, expert, stem in kept)
        if wrong:
            findings.append(Finding("mismatch", name, wrong))
            continue
        scheme = "mxfp4" if spec.dtype == "I8" else linear
        weight, problems = weight_from(
            stem, BY_NAME[scheme], BINDINGS[scheme], listing, lambda _: dtype
        )
        if weight is not None:
            weights[name] = weight
        findings += problems
    findings += _alone(listing)
    findings += suffixes.unread(listing)
    return Examination(weights, tuple(findings), suffixes.activations(listing))


def _known(key: str, value: Any, known: Sequence[str | None]) -> None:
    """Refuse what a config says of codes that are not read."""
    if value not in known:
        raise UnsupportedError(
            f"{key} is {safe(str(value)[:80])}, which is not read",
            hint=f"read is {' or '.join(name for name in known if name)}",
        )


def _of_blocks(size: Any) -> str:
    """Return the scheme of FP8 in blocks of a size that a config declares."""
    size = [128, 128] if size is None else size
    scheme = next((name for blocks, name in BLOCKS if blocks == size), None)
    if scheme is None:
        raise UnsupportedError(
            f"quantization_config.weight_block_size is {safe(str(size)[:80])}, which is not read",
            hint="read are blocks of [128, 128] and, of DeepSeek-V4.1, [32, 32]",
        )
    return scheme


def _contradiction(stem: str, dtype: str, expert: Any, kept: bool) -> str:
    """Return what the config says and is not so, "" where it agrees."""
    if kept:
        return f"stored as {dtype}, but the config says that it is not converted"
    wanted = EXPERTS.get(str(expert))
    if ".experts." in stem and wanted is not None and wanted != dtype:
        return f"expert_dtype is {expert}, stored is {dtype}"
    return ""


def _alone(listing: Listing) -> list[Finding]:
    """Return a finding for each scale that no weight of 8 bits stands beside."""
    found = []
    for name in listing.tensors:
        if not name.endswith(SUFFIX) or not _is_of_blocks(name, listing):
            continue
        data = listing.tensors.get(name.removesuffix(SUFFIX) + ".weight")
        if data is None:
            found.append(Finding("orphan", name, "a scale, but the weight is not there"))
        elif data.dtype not in CODES:
            message = f"a scale, but its weight is stored as {data.dtype}"
            found.append(Finding("mismatch", name, message))
    return found


def declare(declarations: Sequence[Declaration], config: Mapping[str, Any] | None) -> Declared:
    """Refuse.

    Raises:
        UsageError: always: only DeepSeek's own program and few others read this container.
    """
    raise UsageError(
        "the container deepseek-v4 is read, and not written",
        hint="--container compressed-tensors, modelopt or deepseek has the same schemes",
    )


DEEPSEEK_V4 = Container(
    name="deepseek-v4",
    bindings=BINDINGS,
    detect=detect,
    examine=examine,
    declare=declare,
    needs_config=True,
    unwritten=frozenset(BINDINGS),
)
